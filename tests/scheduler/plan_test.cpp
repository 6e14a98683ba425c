// Plans divide the state as the policy says, within their memory.
#include "scheduler/plan/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/base/error.hpp"
#include "core/ops/update_kernels.hpp"
#include "tests/scheduler/advice.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using testing::advised_host_memory;
using testing::advised_memory;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

/// Twelve blocks and a large embedding, tied to the head: the shape of a small GPT-2.
ParameterLayout transformer_like() {
  ParameterLayout layout;
  layout.add_layer("embedding").add("tokens", {50257, 768}).add("positions", {1024, 768});
  for (int i = 0; i < 12; ++i) {
    layout.add_layer("h." + std::to_string(i)).add("w", {7077888}).add("b", {9984}, {.decay = false});
  }
  layout.add_layer("head").add("norm", {768}, {.decay = false}).add("tokens", {50257, 768});
  layout.tie("embedding.tokens", "head.tokens");
  return layout;
}

OffloadOptions with(const std::string& policy) {
  OffloadOptions options;
  options.policy = parse_policy(policy);
  return options;
}

OffloadOptions speculating(OffloadOptions options, Speculate speculate) {
  options.speculate = speculate;
  return options;
}

Plan plan_of(const std::string& policy, std::size_t ceiling = 64_GiB) {
  return make_plan(transformer_like(), with(policy), {ceiling, 0});
}

TEST(Plan, MicroBatchesAtOnceTakeAGradientBufferEachOfATiedLayer) {
  const auto made = [](int micro_batches, int at_once) {
    OffloadOptions options = with("host");
    options.resident_layers = 0;
    options.max_micro_batches = micro_batches;
    options.micro_batches_at_once = at_once;
    return make_plan(transformer_like(), options, {64_GiB, 0});
  };
  const auto working = [](const Plan& plan) {
    for (const MemoryEntry& e : plan.memory.entries) {
      if (e.name == "gradients, working") return e.bytes;
    }
    return std::size_t{0};
  };
  const std::size_t embedding = 4 * static_cast<std::size_t>(transformer_like().layer(0).state_elements);
  EXPECT_EQ(working(made(8, 4)) - working(made(8, 2)), 2 * embedding);
  EXPECT_EQ(made(8, 3).order(),
            "by layer, 3 at once: weights cross the link 2 x 3 times a step instead of 2 x 8 times, gradients 8 times");
  EXPECT_EQ(made(8, 1).order(), "by micro-batch: weights cross the link 2 x 8 times a step, gradients 8 times");
  EXPECT_EQ(made(8, 8).order(),
            "by layer: weights cross the link twice a step instead of 2 x 8 times, gradients once instead of 8 times");
  EXPECT_EQ(made(2, 8).micro_batches_at_once, 2);
  EXPECT_THROW(made(2, 0), UsageError);
  EXPECT_EQ(nlohmann::json::parse(made(8, 3).json())["micro_batches_at_once"], 3);
  EXPECT_NE(made(8, 3).table().find("3 at once"), std::string::npos);
  EXPECT_EQ(made(1, 1).table().find("order"), std::string::npos);
}

// Between the head's gradient and the embedding's lie all others: one buffer is free again in time.
TEST(Plan, LayersThatDoNotFollowEachOtherShareAGradientBuffer) {
  ParameterLayout layout;
  layout.add_layer("embedding").add("tokens", {50257, 768});
  for (int i = 0; i < 12; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {7077888});
  layout.add_layer("head").add("tokens", {50257, 768});
  const auto buffers = [&](int at_once) {
    OffloadOptions options = with("host");
    options.max_micro_batches = options.micro_batches_at_once = at_once;
    std::vector<int> all;
    for (const SizeClass& c : make_plan(layout, options, {64_GiB, 0}).size_classes) all.push_back(c.gradient_buffers);
    return all;
  };
  EXPECT_EQ(buffers(1), (std::vector<int>{1, 2}));
  EXPECT_EQ(buffers(3), (std::vector<int>{2, 2})) << "micro-batches follow each other in one layer";
}

TEST(Plan, LayersWithoutGradientsDoNotPartThoseWithThem) {
  ParameterLayout layout;
  for (int i = 0; i < 4; ++i) {
    layout.add_layer("h." + std::to_string(i)).add("w", {7077888});
    layout.add_layer("table." + std::to_string(i)).add("w", {1024}, {.trainable = false});
  }
  EXPECT_EQ(make_plan(layout, with("host"), {64_GiB, 0}).size_classes.front().gradient_buffers, 2);
}

// Two buffers for the blocks and one for the embedding.
TEST(Plan, GradientsThatTheCallerWritesInBf16TakeHalfTheMemory) {
  const auto working = [](DType gradient) {
    ParameterLayout layout;
    layout.add_layer("embedding").add("tokens", {50257, 768});
    for (int i = 0; i < 12; ++i) {
      layout.add_layer("h." + std::to_string(i)).add("w", {7077888}, {.gradient = gradient}).add("b", {9984});
    }
    const Plan plan = make_plan(layout, with("host"), {64_GiB, 0});
    const auto& entries = plan.memory.entries;
    const auto row = std::ranges::find(entries, "gradients, working", &MemoryEntry::name);
    return row == entries.end() ? std::size_t{0} : row->bytes;
  };
  EXPECT_EQ(working(DType::f32) - working(DType::bf16), 2U * 2U * 7077888U);
}

TEST(Plan, SumsOnTheDeviceSaveThoseOnTheHost) {
  const auto made = [](int at_once, std::size_t ceiling) {
    OffloadOptions options = with("host");
    options.resident_layers = 0;
    options.max_micro_batches = 4;
    options.micro_batches_at_once = at_once;
    return make_plan(transformer_like(), options, {ceiling, 0});
  };
  const auto sums = [](const Plan& plan, Place place) {
    for (const MemoryEntry& e : plan.memory.entries) {
      if (e.name == "gradients, accumulated" && e.place == place) return e.bytes;
    }
    return std::size_t{0};
  };
  const ParameterLayout layout = transformer_like();
  const std::size_t all = 4 * static_cast<std::size_t>(layout.state_elements());
  std::size_t largest = 0;  // bytes of the largest layer of each class: embedding, blocks, head
  for (const int l : {0, 1, layout.layer_count() - 1}) {
    largest += 4 * static_cast<std::size_t>(layout.layer(l).state_elements);
  }
  const Plan roomy = made(4, 64_GiB);
  EXPECT_TRUE(roomy.sends_sums);
  EXPECT_EQ(sums(roomy, Place::device), largest);
  EXPECT_EQ(sums(roomy, Place::pinned), 0U);
  const Plan by_half = made(2, 64_GiB);
  EXPECT_FALSE(by_half.sends_sums);
  EXPECT_EQ(sums(by_half, Place::device), 0U);
  EXPECT_EQ(sums(by_half, Place::pinned), all);
  OffloadOptions options = with("host");
  options.resident_layers = 0;
  options.prefetch_layers = 1;
  options.max_micro_batches = options.micro_batches_at_once = 4;
  const Plan tight = make_plan(layout, options, {smallest_device_memory(layout, options), 0});
  EXPECT_FALSE(tight.sends_sums);
  EXPECT_EQ(sums(tight, Place::pinned), all);
}

// The owner's buffer is no longer held from the head on: it has two, as other layers' micro-batches have, whatever
// their number.
TEST(Plan, OwnersThatMakeAllOfATiedGradientHaveNoBufferForEachMicroBatch) {
  const auto buffers = [](int at_once, bool owners_make, bool roomy = true) {
    OffloadOptions options = with("host");
    options.max_micro_batches = options.micro_batches_at_once = at_once;
    options.owners_make_gradients = owners_make;
    const std::size_t least = smallest_device_memory(transformer_like(), options);
    const Plan plan = make_plan(transformer_like(), options, {roomy ? 64_GiB : least, 0});
    EXPECT_EQ(plan.owners_make_gradients, owners_make);
    EXPECT_EQ(nlohmann::json::parse(plan.json())["owners_make_gradients"], owners_make);
    return plan.size_classes[static_cast<std::size_t>(plan.layers[0].size_class)].gradient_buffers;
  };
  EXPECT_EQ(buffers(8, false), 8);
  EXPECT_EQ(buffers(8, true), 2);
  EXPECT_EQ(buffers(3, true), 2);
  EXPECT_EQ(buffers(8, true, false), 1);
}

TEST(Plan, SubgroupsCoverTheStateOnceInOrder) {
  const ParameterLayout layout = transformer_like();
  for (const std::int64_t size :
       {std::int64_t{1}, std::int64_t{100'000}, std::int64_t{1} << 20, std::int64_t{1} << 40}) {
    OffloadOptions options = with("interleave:2");
    options.subgroup_size = size == 1 ? 5000 : size;
    const Plan plan = make_plan(layout, options, {64_GiB, 0});
    int layer = 0;
    std::int64_t at = 0;
    for (const Subgroup& s : plan.subgroups) {
      if (s.layer != layer) {
        EXPECT_EQ(at, layout.layer(layer).state_elements);
        ++layer;
        at = 0;
      }
      EXPECT_EQ(s.layer, layer);
      EXPECT_EQ(s.begin, at);
      EXPECT_EQ(s.begin % layout_quantum, 0);
      EXPECT_EQ(s.count() % layout_quantum, 0);
      EXPECT_GT(s.count(), 0);
      at = s.end;
    }
    EXPECT_EQ(layer, layout.layer_count() - 1);
  }
}

TEST(Plan, SharesAreWhatThePolicyAsksFor) {
  const double all = static_cast<double>(transformer_like().state_elements());
  const auto share = [&](std::int64_t part) { return static_cast<double>(part) / all; };
  const double granule = 8388608.0 / all;  // a subgroup either way
  EXPECT_EQ(plan_of("device").shares().resident, transformer_like().state_elements());
  EXPECT_EQ(plan_of("host").shares().cpu, transformer_like().state_elements());
  EXPECT_EQ(plan_of("stream").shares().streamed, transformer_like().state_elements());
  for (const double r : {0.0, 0.25, 0.5, 0.9, 1.0}) {
    EXPECT_NEAR(share(plan_of("static:" + std::to_string(r)).shares().cpu), r, granule / 2);
  }
  EXPECT_EQ(plan_of("interleave:1").shares().streamed, transformer_like().state_elements());
  const Plan::Shares mixed = plan_of("interleave:2,resident=0.3").shares();
  EXPECT_NEAR(share(mixed.resident), 0.3, granule / 2);
  EXPECT_NEAR(share(mixed.streamed), 0.35, 2 * granule);
}

/// All that an engine is told: everything but the policy's name.
nlohmann::json division_of(const Plan& plan) {
  nlohmann::json division = nlohmann::json::parse(plan.json());
  division.erase("policy");
  return division;
}

/// Trained is therefore one of each pair.
TEST(Plan, PoliciesOfOneDivisionAreOnePlan) {
  for (const auto& [name, other] : {std::pair{"host", "static:1"}, {"stream", "interleave:1"}}) {
    for (const StateFormat state : state_formats) {
      for (const int subgroup : {0, 1 << 20}) {
        for (const int resident : {-1, 0, 3}) {
          for (const auto& [micro_batches, at_once] : {std::pair{1, 1}, {4, 1}, {4, 4}}) {
            OffloadOptions options = with(name);
            options.state = state;
            if (subgroup > 0) options.subgroup_size = subgroup;
            if (resident >= 0) options.resident_layers = resident;
            options.max_micro_batches = micro_batches;
            options.micro_batches_at_once = at_once;
            OffloadOptions same = options;
            same.policy = parse_policy(other);
            for (const std::size_t ceiling : {4_GiB, 64_GiB}) {
              const Plan plan = make_plan(transformer_like(), options, {ceiling, 0});
              const Plan twin = make_plan(transformer_like(), same, {ceiling, 0});
              ASSERT_NE(plan.policy.text(), twin.policy.text());
              ASSERT_EQ(division_of(plan), division_of(twin)) << name << ", " << other << ", subgroups of " << subgroup;
            }
          }
        }
      }
    }
  }
  EXPECT_NE(division_of(plan_of("host")), division_of(plan_of("static:0.99")));
  EXPECT_NE(division_of(plan_of("stream")), division_of(plan_of("interleave:2")));
}

TEST(Plan, InterleaveStreamsEveryKthSubgroup) {
  const Plan plan = plan_of("interleave:3");
  for (std::size_t i = 0; i < plan.subgroups.size(); ++i) {
    EXPECT_EQ(plan.subgroups[i].updater == Updater::device, (i + 1) % 3 == 0) << i;
    EXPECT_EQ(plan.subgroups[i].tier, Tier::host);
  }
}

TEST(Plan, NeverPassesTheCeilingAndUsesMoreWhereThereIsMore) {
  std::size_t before = 0;
  for (const std::size_t ceiling : {300_MiB, 400_MiB, 600_MiB, 1_GiB, 2_GiB, 4_GiB}) {
    const Plan plan = plan_of("host", ceiling);
    EXPECT_LE(plan.memory.device_bytes(), ceiling);
    EXPECT_GE(plan.memory.device_bytes(), before);
    before = plan.memory.device_bytes();
  }
}

TEST(Plan, TheCallersShareCountsAgainstTheCeiling) {
  OffloadOptions options = with("host");
  options.reserved_device_memory = 100_MiB;
  const Plan plan = make_plan(transformer_like(), options, {500_MiB, 0});
  EXPECT_LE(plan.memory.device_bytes(), 400_MiB);
}

TEST(Plan, PageTablesOfItsPinnedMemoryCountAgainstTheCeiling) {
  const ParameterLayout layout = transformer_like();
  PlanningFacts facts{.pinned_per_page_table = 64};
  for (const char* policy : {"host", "static:0.5", "stream", "auto"}) {
    for (facts.device_capacity = 300_MiB; facts.device_capacity <= 2_GiB; facts.device_capacity += 37_MiB) {
      const std::optional<Plan> plan = find_plan(layout, with(policy), facts);
      if (!plan) continue;
      EXPECT_GE(plan->page_tables * 64, plan->memory.bytes_in(Place::pinned)) << policy;
      EXPECT_LT(plan->page_tables * 64, plan->memory.bytes_in(Place::pinned) + 64 * 2_MiB) << policy;
      EXPECT_LE(plan->memory.device_bytes() + plan->page_tables, facts.device_capacity) << policy;
    }
  }
  const Plan plan = make_plan(layout, with("host"), {.device_capacity = 1_GiB, .pinned_per_page_table = 64});
  EXPECT_NE(plan.table().find("page tables of pinned memory"), std::string::npos) << plan.table();
  EXPECT_EQ(nlohmann::json::parse(plan.json())["page_tables"], plan.page_tables);
  EXPECT_EQ(plan_of("host").page_tables, 0U) << "a device that is host memory has none";
}

TEST(Plan, RefusalNamesASizeThatThenFits) {
  const ParameterLayout layout = transformer_like();
  for (const char* policy : {"device", "host", "static:0.5", "interleave:2", "stream", "auto"}) {
    OffloadOptions options = with(policy);
    options.device_memory = 50_MiB;
    try {
      make_plan(layout, options, {64_GiB, 0});
      FAIL() << policy;
    } catch (const PlanError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("--device-memory"), std::string::npos) << text;
      EXPECT_NE(error.table().find("total"), std::string::npos);
    }
    options.device_memory = smallest_device_memory(layout, options);
    EXPECT_NO_THROW(make_plan(layout, options, {64_GiB, 0})) << policy;
    --*options.device_memory;
    EXPECT_THROW(make_plan(layout, options, {64_GiB, 0}), PlanError) << policy;
  }
}

std::string refusal(const OffloadOptions& options, const PlanningFacts& facts) {
  EXPECT_FALSE(find_plan(transformer_like(), options, facts));
  try {
    make_plan(transformer_like(), options, facts);
  } catch (const PlanError& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return {};
}

TEST(Plan, RefusalOfWhatIsNotTrainedAdvisesNoPolicy) {
  ParameterLayout layout;
  for (int l = 0; l < 6; ++l) {
    layout.add_layer("h." + std::to_string(l)).add("w", {1 << 20}, {.trainable = false});
  }
  OffloadOptions options = with("host");
  options.prefetch_layers = 3;
  options.device_memory = 5_MiB;
  try {
    make_plan(layout, options, {64_GiB, 0});
    FAIL();
  } catch (const PlanError& error) {
    const std::string text = error.what();
    EXPECT_THAT(text, HasSubstr("it needs at least"));
    EXPECT_THAT(text, HasSubstr("or --resident-layers 0 --prefetch-layers 1"));
    EXPECT_THAT(text, Not(HasSubstr("policy")));
  }
  options.prefetch_layers = 1;
  options.resident_layers = 0;
  EXPECT_NO_THROW(make_plan(layout, options, {64_GiB, 0}));
}

TEST(Plan, RefusalDoesNotAdviseTheSameCeilingTwice) {
  ParameterLayout layout;
  for (int l = 0; l < 4; ++l) layout.add_layer("h." + std::to_string(l)).add("w", {1000});
  OffloadOptions options = with("host");
  options.prefetch_layers = 3;
  options.device_memory = 1_KiB;
  const PlanningFacts facts{64_GiB, 0};
  OffloadOptions frugal = options;
  frugal.prefetch_layers = 1;
  ASSERT_LT(smallest_device_memory(layout, frugal), smallest_device_memory(layout, options));
  try {
    make_plan(layout, options, facts);
    FAIL();
  } catch (const PlanError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("try --device-memory 1MiB"), Not(HasSubstr(", or "))));
  }
}

TEST(Plan, TheTableOfARefusalNamesEveryByteUnderTheCeiling) {
  OffloadOptions options = with("host");
  options.device_memory = 50_MiB;
  options.reserved_device_memory = 100_MiB;
  options.reserved_host_memory = 300_MiB;
  try {
    make_plan(transformer_like(), options, {.device_capacity = 64_GiB, .device_reserved = 20_MiB});
    FAIL();
  } catch (const PlanError& error) {
    const std::string total = format_bytes(smallest_device_memory(transformer_like(), options) + 20_MiB);
    EXPECT_THAT(error.what(), HasSubstr("needs at least " + total));
    EXPECT_THAT(error.table(), ContainsRegex("total +" + total));
    EXPECT_THAT(error.table(), ContainsRegex("reserved by the caller +100.0 MiB +300.0 MiB"));
    EXPECT_THAT(error.table(), ContainsRegex("context and libraries +20.0 MiB"));
  }
}

TEST(Plan, WhereBothCeilingsAreTooSmallBothAreNamed) {
  const ParameterLayout layout = transformer_like();
  for (const bool is_host : {false, true}) {
    for (const char* policy : {"device", "host", "static:0.5", "auto"}) {
      OffloadOptions options = with(policy);
      options.device_memory = 50_MiB;
      options.host_memory = 10_MiB;
      const PlanningFacts facts{.device_capacity = 64_GiB, .host_available = 64_GiB, .device_is_host = is_host};
      const std::string text = refusal(options, facts);
      const std::size_t advice = text.find("; try --device-memory ");
      ASSERT_NE(advice, std::string::npos) << text;
      const std::string flags = text.substr(advice, text.find(", or ") - advice);
      options.device_memory = advised_memory(flags, "--device-memory ");
      if (flags.find("--host-memory ") != std::string::npos)
        options.host_memory = advised_memory(flags, "--host-memory ");
      EXPECT_NO_THROW(make_plan(layout, options, facts)) << policy << ": " << text;
    }
  }
}

TEST(Plan, HostCeilingsAreKept) {
  OffloadOptions options = with("host");
  options.host_memory = 1_GiB;
  EXPECT_THROW(make_plan(transformer_like(), options, {64_GiB, 0}), PlanError);
  EXPECT_THROW(make_plan(transformer_like(), with("host"), {64_GiB, 1_GiB}), PlanError);
}

TEST(Plan, TheHostCeilingIsTheCallersShareToo) {
  OffloadOptions options = speculating(with("host"), Speculate::off);
  const std::size_t engine = make_plan(transformer_like(), options, {64_GiB, 0}).memory.host_bytes();
  options.reserved_host_memory = 100_MiB;
  options.host_memory = engine + 100_MiB;
  const Plan plan = make_plan(transformer_like(), options, {64_GiB, 0});
  EXPECT_NE(plan.table().find(format_bytes(engine + 100_MiB)), std::string::npos) << plan.table();
  --*options.host_memory;
  const std::string text = refusal(options, {64_GiB, 0});
  EXPECT_NE(text.find(format_bytes(engine + 100_MiB)), std::string::npos) << text;
  options.host_memory = advised_host_memory(text);
  EXPECT_NO_THROW(make_plan(transformer_like(), options, {64_GiB, 0}));

  // The available memory is for both, too.
  options.host_memory = std::nullopt;
  EXPECT_NO_THROW(make_plan(transformer_like(), options, {64_GiB, engine + 100_MiB}));
  refusal(options, {64_GiB, engine + 100_MiB - 1});
}

TEST(Plan, ADeviceOnHostMemoryLeavesTheHostItsPart) {
  const ParameterLayout layout = transformer_like();
  const auto all = [](const Plan& plan) { return plan.memory.device_bytes() + plan.memory.host_bytes(); };
  for (const char* policy : {"host", "static:0.5", "interleave:2", "stream", "auto"}) {
    OffloadOptions options = with(policy);
    options.reserved_device_memory = 50_MiB;
    options.reserved_host_memory = 30_MiB;
    PlanningFacts facts{64_GiB, 64_GiB};
    facts.device_is_host = true;
    const std::size_t at_will = all(make_plan(layout, options, facts));
    // If that is more memory than there is, something that is worth less than fitting gives way.
    for (const std::size_t there : {at_will, at_will - 1}) {
      facts.host_available = there + 80_MiB;
      EXPECT_LE(all(make_plan(layout, options, facts)), there) << policy;
    }
    facts.host_available = 1_GiB;
    const std::string text = refusal(options, facts);
    EXPECT_EQ(text.find("--host-memory"), std::string::npos) << "there is no more: " << text;
  }
}

TEST(Plan, NoMoreOfTheDeviceIsAdvisedThanThereIsOfTheHostsMemory) {
  PlanningFacts facts{300_MiB, 64_GiB};
  facts.device_is_host = true;
  EXPECT_NE(refusal(with("device"), facts).find("--device-memory"), std::string::npos);
  facts.host_available = 1_GiB;
  EXPECT_EQ(refusal(with("device"), facts).find("--"), std::string::npos);
}

TEST(Plan, RefusalOfHostMemoryNamesFlagsThatThenFit) {
  OffloadOptions options = with("host");
  const auto needed = [](StateFormat state) {
    OffloadOptions of = speculating(with("host"), Speculate::off);
    of.state = state;
    return make_plan(transformer_like(), of, {300_MiB, 0}).memory.host_bytes();
  };
  const PlanningFacts split{300_MiB, needed(StateFormat::split)};
  EXPECT_NE(refusal(options, split).find("try --state split"), std::string::npos);
  options.state = StateFormat::split;
  EXPECT_NO_THROW(make_plan(transformer_like(), options, split));
  options.state = StateFormat::fp32;
  const PlanningFacts moments{300_MiB, needed(StateFormat::bf16_moments)};
  EXPECT_NE(refusal(options, moments).find("try --state bf16-moments"), std::string::npos);
  const PlanningFacts bytes{300_MiB, needed(StateFormat::byte_moments)};
  EXPECT_NE(refusal(options, bytes).find("try --state 8bit-moments"), std::string::npos);
  // Another optimizer is no advice, and Lion has no smaller format.
  const PlanningFacts less{300_MiB, needed(StateFormat::byte_moments) - 1};
  EXPECT_EQ(refusal(options, less).find("lion"), std::string::npos);
  OffloadOptions lion = options;
  lion.state = StateFormat::lion;
  EXPECT_EQ(refusal(lion, bytes).find("--state"), refusal(lion, bytes).find("--state-dir"));
  EXPECT_NE(refusal(options, {64_GiB, 1_GiB}).find("try --policy auto"), std::string::npos);
  EXPECT_NO_THROW(make_plan(transformer_like(), with("auto"), {64_GiB, 1_GiB}));
  EXPECT_NE(refusal(options, {300_MiB, 1_MiB}).find("smaller model"), std::string::npos);
}

TEST(Plan, ACeilingOfHostMemoryMayInsistOnWhatIsNotFreeNow) {
  OffloadOptions options = speculating(with("host"), Speculate::off);
  const std::size_t needed = make_plan(transformer_like(), options, {300_MiB, 0}).memory.host_bytes();
  PlanningFacts facts{300_MiB, needed / 2};
  options.host_memory = 2 * needed;
  refusal(options, facts);
  facts.host_limit = needed - 1;
  refusal(options, facts);
  facts.host_limit = needed;
  EXPECT_NO_THROW(make_plan(transformer_like(), options, facts));
  options.host_memory = std::nullopt;
  refusal(options, facts);
  facts.host_limit = 2 * needed;
  options.host_memory = advised_host_memory(refusal(options, facts));
  EXPECT_NO_THROW(make_plan(transformer_like(), options, facts));
  // On a device that is host memory the word is for both.
  facts.device_is_host = true;
  options.host_memory = advised_host_memory(refusal(options, facts));
  EXPECT_NO_THROW(make_plan(transformer_like(), options, facts));
}

TEST(Plan, AutomaticTakesWhatFitsMostOnTheDeviceFirst) {
  EXPECT_EQ(plan_of("auto", 64_GiB).policy.kind, Policy::Kind::device);
  const Plan middle = plan_of("auto", 1200_MiB);
  EXPECT_EQ(middle.policy.kind, Policy::Kind::static_share);
  EXPECT_TRUE(middle.chosen_by_auto);
  EXPECT_EQ(plan_of("auto", 300_MiB).policy.kind, Policy::Kind::host);
}

TEST(Plan, ContradictionsAreRefused) {
  OffloadOptions options = with("device");
  options.resident_layers = 2;
  EXPECT_THROW(make_plan(transformer_like(), options, {64_GiB, 0}), UsageError);
  options = with("host");
  options.resident_layers = 15;
  EXPECT_THROW(make_plan(transformer_like(), options, {64_GiB, 0}), UsageError);
  for (const double seconds : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    options = with("host");
    options.watchdog_seconds = seconds;
    EXPECT_THROW(make_plan(transformer_like(), options, {64_GiB, 0}), UsageError) << seconds;
  }
}

TEST(Plan, AccumulatorsAreBookedOnlyWhereNeeded) {
  OffloadOptions options = with("host");
  const Plan one = make_plan(transformer_like(), options, {64_GiB, 0});
  options.max_micro_batches = 4;
  const Plan four = make_plan(transformer_like(), options, {64_GiB, 0});
  EXPECT_EQ(four.memory.host_bytes() - one.memory.host_bytes(),
            static_cast<std::size_t>(transformer_like().state_elements()) * 4);
}

TEST(Plan, JsonHoldsEverySubgroup) {
  const Plan plan = plan_of("interleave:2,resident=0.5");
  const auto json = nlohmann::json::parse(plan.json());
  EXPECT_EQ(json["policy"], "interleave:2,resident=0.5");
  ASSERT_EQ(json["subgroups"].size(), plan.subgroups.size());
  EXPECT_EQ(json["subgroups"].back()["tier"], "device");
  EXPECT_EQ(json["memory"].size(), plan.memory.entries.size());
}

TEST(Plan, ItsOutlineDoesNotGrowWithItsSubgroups) {
  OffloadOptions options = with("interleave:2");
  const auto outline = [&](std::int64_t subgroup_size) {
    options.subgroup_size = subgroup_size;
    const Plan plan = make_plan(transformer_like(), options, {64_GiB, 0});
    const auto full = nlohmann::json::parse(plan.json());
    auto json = nlohmann::json::parse(plan.outline_json());
    EXPECT_EQ(json["subgroups"], plan.subgroups.size());
    EXPECT_EQ(json["updated_parameters"]["cpu"], plan.shares().cpu);
    for (const auto& [key, value] : full.items()) {
      if (key == "subgroups") continue;
      EXPECT_EQ(json[key], value) << key;
    }
    return plan.outline_json().size();
  };
  EXPECT_LT(outline(1024), outline(1 << 20) + 64);
}

TEST(Plan, SaysOnHowManyThreadsTheCpuUpdates) {
  OffloadOptions options = with("host");
  options.update_threads = 6;
  const Plan plan = make_plan(transformer_like(), options, {64_GiB, 0});
  EXPECT_NE(plan.table().find("CPU updates on 6 threads"), std::string::npos) << plan.table();
  EXPECT_EQ(nlohmann::json::parse(plan.json())["update_threads"], 6);
  EXPECT_EQ(plan_of("host").table().find("CPU updates on"), std::string::npos);
  options.update_threads = -1;
  EXPECT_THROW(make_plan(transformer_like(), options, {64_GiB, 0}), UsageError);
}

TEST(Plan, RefusesOptionsThatAreGivenAndNone) {
  const std::vector<std::function<void(OffloadOptions&)>> none{
      [](OffloadOptions& o) { o.device_memory = 0; },    [](OffloadOptions& o) { o.host_memory = 0; },
      [](OffloadOptions& o) { o.subgroup_size = 0; },    [](OffloadOptions& o) { o.prefetch_layers = 0; },
      [](OffloadOptions& o) { o.resident_layers = -1; }, [](OffloadOptions& o) { o.update_threads = 0; },
      [](OffloadOptions& o) { o.state_folder = ""; }};
  for (std::size_t i = 0; i < none.size(); ++i) {
    OffloadOptions options = with("host");
    EXPECT_NO_THROW(check_options(transformer_like(), options));
    none[i](options);
    EXPECT_THROW(check_options(transformer_like(), options), UsageError) << i;
  }
}

}  // namespace
}  // namespace tandem
