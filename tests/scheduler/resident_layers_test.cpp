// Choice of the layers whose weights stay on the device.
#include "scheduler/plan/resident_layers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory/memory.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
constexpr std::int64_t block = 7077888, table = 4 * block;

/// Blocks between two tables of one size, which may be one and the same.
ParameterLayout between_tables(bool tied, int blocks = 4) {
  ParameterLayout layout;
  layout.add_layer("embedding").add("tokens", {table});
  for (int i = 0; i < blocks; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {block});
  layout.add_layer("head").add("norm", {1024}).add("tokens", {table});
  if (tied) layout.tie("embedding.tokens", "head.tokens");
  return layout;
}

OffloadOptions options_with(std::string_view policy, int micro_batches = 1) {
  OffloadOptions options;
  options.policy = parse_policy(policy);
  options.max_micro_batches = micro_batches;
  options.subgroup_size = block;
  return options;
}

std::vector<int> order_of(const ParameterLayout& layout, const OffloadOptions& options) {
  std::vector<int> order;
  for (const LayerIndex l : by_worth_of_residence(layout, make_plan(layout, options, {64_GiB, 0}))) {
    order.push_back(l.number());
  }
  return order;
}

std::vector<int> residents(const Plan& plan) {
  std::vector<int> list;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    if (plan.layers[l].resident) list.push_back(static_cast<int>(l));
  }
  return list;
}

std::vector<int> weight_buffers(const Plan& plan) {
  std::vector<int> list;
  for (const SizeClass& c : plan.size_classes) list.push_back(c.weight_buffers);
  return list;
}

std::size_t bytes_of_weights(const Plan& plan) {
  std::size_t bytes = 0;
  for (const MemoryEntry& e : plan.memory.entries) {
    if (e.name == "weights, resident" || e.name == "weights, streamed") bytes += e.bytes;
  }
  return bytes;
}

// The embedding is fetched in forward alone, and the head once for both passes.
TEST(ResidentLayers, AreBlocksBeforeWhatIsFetchedOnce) {
  const ParameterLayout layout = between_tables(false);
  EXPECT_EQ(order_of(layout, options_with("host")), (std::vector<int>{1, 2, 3, 4, 0, 5}));
  EXPECT_EQ(order_of(layout, options_with("host", 8)), (std::vector<int>{1, 2, 3, 4, 0, 5}));
}

TEST(ResidentLayers, OfATiedModelIsTheTableOneOfThoseFetchedTwice) {
  EXPECT_EQ(order_of(between_tables(true), options_with("host")), (std::vector<int>{0, 1, 2, 3, 4, 5}));
}

// Layers that the CPU updates receive their weights, and those that the device updates need not return them.
TEST(ResidentLayers, AreThoseThatTheDeviceUpdatesFirst) {
  const std::vector<int> last_half = order_of(between_tables(false), options_with("static:0.5"));
  EXPECT_EQ(last_half, (std::vector<int>{3, 4, 5, 1, 2, 0}));
}

TEST(ResidentLayers, AreSoManyAsTheOptionsSay) {
  for (const bool tied : {false, true}) {
    for (int count = 0; count <= 6; ++count) {
      OffloadOptions options = options_with("host");
      options.resident_layers = count;
      const Plan plan = make_plan(between_tables(tied), options, {64_GiB, 0});
      EXPECT_EQ(residents(plan).size(), static_cast<std::size_t>(count)) << tied;
    }
  }
}

// Between the two tables lie all blocks: there is time to fill the buffer again.
TEST(ResidentLayers, LeaveOneBufferToOthersThatAreFarFromEachOther) {
  OffloadOptions options = options_with("host");
  options.resident_layers = 0;
  const auto buffers = [&](bool tied, int blocks) {
    return weight_buffers(make_plan(between_tables(tied, blocks), options, {64_GiB, 0}));
  };
  EXPECT_EQ(buffers(false, 12), (std::vector<int>{1, 2}));
  EXPECT_EQ(buffers(false, 4), (std::vector<int>{2, 2}));
  options.prefetch_layers = 3;
  EXPECT_EQ(buffers(false, 12), (std::vector<int>{1, 3}));
  // A table that is lent is held while its borrower's own weights pass.
  EXPECT_EQ(buffers(true, 12), (std::vector<int>{1, 3, 1}));
  options.resident_layers = 11;
  EXPECT_EQ(buffers(false, 12), (std::vector<int>{1, 1})) << "one block passes, between tables far from each other";
}

// Layers in between may be of another size, or stay.
TEST(ResidentLayers, LeaveSeveralBuffersToOthersThatAlternate) {
  ParameterLayout layout;
  for (int i = 0; i < 6; ++i) {
    layout.add_layer("large." + std::to_string(i)).add("w", {4 * block});
    layout.add_layer("small." + std::to_string(i)).add("w", {block});
  }
  OffloadOptions options = options_with("host");
  options.resident_layers = 0;
  EXPECT_EQ(weight_buffers(make_plan(layout, options, {64_GiB, 0})), (std::vector<int>{2, 2}));
}

// A buffer that one layer alone passes through is as large as the layer.
TEST(ResidentLayers, AreThoseWithABufferForEachWhateverTheCeiling) {
  const ParameterLayout layout = between_tables(true);
  OffloadOptions none = options_with("host");
  none.resident_layers = 0;
  none.prefetch_layers = 1;
  const Plan passing = make_plan(layout, none, {64_GiB, 0});
  OffloadOptions open = options_with("host");
  open.device_memory = passing.memory.device_bytes();
  const Plan plan = make_plan(layout, open, {64_GiB, 0});
  EXPECT_EQ(residents(plan), (std::vector<int>{0, 5}));
  EXPECT_LE(bytes_of_weights(plan), bytes_of_weights(passing));
  EXPECT_LE(plan.memory.device_bytes(), passing.memory.device_bytes());
}

TEST(ResidentLayers, OfAModelOfOneLayerAreNoneOrAll) {
  ParameterLayout layout;
  layout.add_layer("only").add("w", {block});
  EXPECT_EQ(order_of(layout, options_with("host")), (std::vector<int>{0}));
  EXPECT_EQ(residents(make_plan(layout, options_with("host"), {64_GiB, 0})), (std::vector<int>{0}));
}

TEST(ResidentLayers, SaveTheHostsCopyWhereTheDeviceUpdatesAllOfThem) {
  const Plan plan = make_plan(between_tables(false), options_with("static:0.5"), {64_GiB, 0});
  for (const Subgroup& s : plan.subgroups) {
    const LayerPlacement& layer = plan.layers[static_cast<std::size_t>(s.layer)];
    EXPECT_TRUE(layer.host_copy || (layer.resident && s.updater == Updater::device)) << s.layer;
  }
  EXPECT_FALSE(plan.layers[3].host_copy);
  EXPECT_FALSE(plan.layers[4].host_copy);
}

}  // namespace
}  // namespace tandem
