// Guards of weights and gradients, which are released or committed once.
#include "core/params/parameter_access.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {
namespace {

// A view from a guard that nobody keeps would be of a buffer that has been given back.
template <class Guard>
concept GivesViewsOfTemporaries = requires(Guard guard) {
  std::move(guard)["w"];
};
static_assert(!GivesViewsOfTemporaries<WeightsGuard> && !GivesViewsOfTemporaries<GradientsGuard>);

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

/// Notes every call as one line.
class Recorder : public ParameterAccess {
 public:
  explicit Recorder(const ParameterLayout& layout) : layout_(layout) {}

  WeightsGuard fetch(int layer, StreamView stream) override {
    LayerBases bases;
    bases.add(layer, weights_.data() + layer * 8192);
    for (const int other : layout_.layer(layer).borrows) bases.add(other, weights_.data() + other * 8192);
    return {this, &layout_, layer, ++ticket_, bases, stream};
  }
  GradientsGuard gradients(int layer, StreamView) override {
    LayerBases bases;
    bases.add(layer, gradients_.data() + layer * 8192);
    return {this, &layout_, layer, ++ticket_, bases};
  }

  const bf16* weights(int layer) const { return weights_.data() + layer * 8192; }
  const float* gradients(int layer) const { return gradients_.data() + layer * 8192; }
  std::vector<std::string> calls;
  bool commit_throws = false;

 private:
  void note(const char* what, std::uint64_t ticket) { calls.push_back(fmt::format("{} {}", what, ticket)); }
  void also_used(std::uint64_t ticket, StreamView) override { note("used", ticket); }
  void release(std::uint64_t ticket, StreamView) noexcept override { note("release", ticket); }
  void commit(std::uint64_t ticket, StreamView) override {
    note("commit", ticket);
    if (commit_throws) throw DeviceError("lost");
  }
  void abandon(std::uint64_t ticket) noexcept override { note("abandon", ticket); }

  const ParameterLayout& layout_;
  std::vector<bf16> weights_ = std::vector<bf16>(4 * 8192);
  std::vector<float> gradients_ = std::vector<float>(4 * 8192);
  std::uint64_t ticket_ = 0;
};

struct ParameterAccessTest : ::testing::Test {
  ParameterAccessTest() {
    layout.add_layer("embedding").add("frozen", {5}, {.trainable = false}).add("tokens", {9, 3});
    layout.add_layer("h").add("a", {1500}).add("b", {2, 3});
    layout.add_layer("head").add("norm", {3}).add("weight", {9, 3});
    layout.tie("embedding.tokens", "head.weight");
    access.emplace(layout);
  }
  ParameterLayout layout;
  std::optional<Recorder> access;
};

TEST_F(ParameterAccessTest, WeightsLieWhereTheLayoutSays) {
  const WeightsGuard guard = access->fetch(1, {});
  const TensorView b = guard["b"];
  EXPECT_EQ(b.as<bf16>(), access->weights(1) + 2048);
  EXPECT_EQ(b.shape, (Shape{2, 3}));
  EXPECT_EQ(b.dtype, DType::bf16);
  EXPECT_THAT([&] { guard["c"]; }, ThrowsMessage<MisuseError>(HasSubstr("layer 'h' has no parameter 'c'")));
}

TEST_F(ParameterAccessTest, TiedWeightsLieInTheOwnersLayer) {
  const WeightsGuard guard = access->fetch(2, {});
  EXPECT_EQ(guard["weight"].as<bf16>(), access->weights(0));
  EXPECT_EQ(guard["norm"].as<bf16>(), access->weights(2));
}

TEST_F(ParameterAccessTest, MissingBasesAreNamed) {
  const GradientsGuard guard = access->gradients(2, {});  // the recorder leaves the owner's base out
  EXPECT_THAT([&] { guard["weight"]; }, ThrowsMessage<MisuseError>(HasSubstr("'embedding.tokens'")));
}

TEST_F(ParameterAccessTest, GradientsAreFloatAndEmptyWhereFrozen) {
  const GradientsGuard guard = access->gradients(0, {});
  EXPECT_FALSE(guard["frozen"]);
  EXPECT_EQ(guard["tokens"].as<float>(), access->gradients(0));
}

TEST_F(ParameterAccessTest, GradientsLieBehindTheSumsWhereTheyAreBf16) {
  layout.add_layer("last")
      .add("w", {700, 3}, {.gradient = DType::bf16})
      .add("frozen", {5}, {.trainable = false, .gradient = DType::bf16})
      .add("b", {3})
      .add("u", {4}, {.gradient = DType::bf16});
  access.emplace(layout);
  const GradientsGuard guard = access->gradients(3, {});
  EXPECT_EQ(guard["b"].as<float>(), access->gradients(3));
  const auto* const behind = reinterpret_cast<const bf16*>(access->gradients(3) + layout_quantum);
  EXPECT_EQ(guard["w"].as<bf16>(), behind);
  EXPECT_EQ(guard["u"].as<bf16>(), behind + 3 * layout_quantum);
  EXPECT_EQ(guard["w"].dtype, DType::bf16);
  EXPECT_EQ(guard["w"].shape, (Shape{700, 3}));
  EXPECT_FALSE(guard["frozen"]);
}

TEST_F(ParameterAccessTest, WeightsAreReleasedOnceHoweverTheyMove) {
  {
    WeightsGuard a = access->fetch(0, {});
    WeightsGuard b = std::move(a);
    b.also_used_on({});
    WeightsGuard c;
    c = std::move(b);
    WeightsGuard& same = c;
    c = std::move(same);
    EXPECT_THAT(access->calls, ElementsAre("used 1"));
    EXPECT_THROW(a["tokens"], MisuseError);  // NOLINT: use after move must throw
    EXPECT_THROW(a.also_used_on({}), MisuseError);
    c = access->fetch(1, {});
    EXPECT_THAT(access->calls, ElementsAre("used 1", "release 1"));
  }
  EXPECT_THAT(access->calls, ElementsAre("used 1", "release 1", "release 2"));
}

TEST_F(ParameterAccessTest, CommittedGradientsAreNotAbandoned) {
  {
    GradientsGuard a = access->gradients(0, {});
    GradientsGuard b = std::move(a);
    EXPECT_THROW(a.commit({}), MisuseError);  // NOLINT: use after move must throw
    b.commit({});
    EXPECT_THROW(b.commit({}), MisuseError);
    EXPECT_THROW(b["tokens"], MisuseError);
  }
  EXPECT_THAT(access->calls, ElementsAre("commit 1"));
}

TEST_F(ParameterAccessTest, UncommittedGradientsAbandonTheStep) {
  {
    GradientsGuard a = access->gradients(0, {});
    a = access->gradients(1, {});
    EXPECT_THAT(access->calls, ElementsAre("abandon 1"));
    GradientsGuard& same = a;
    a = std::move(same);
  }
  EXPECT_THAT(access->calls, ElementsAre("abandon 1", "abandon 2"));
}

TEST_F(ParameterAccessTest, AFailedCommitAbandons) {
  access->commit_throws = true;
  {
    GradientsGuard a = access->gradients(0, {});
    EXPECT_THROW(a.commit({}), DeviceError);
  }
  EXPECT_THAT(access->calls, ElementsAre("commit 1", "abandon 1"));
}

TEST_F(ParameterAccessTest, EmptyGuardsDoNothing) {
  { WeightsGuard weights; }
  { GradientsGuard gradients; }
  EXPECT_THAT(access->calls, IsEmpty());
}

TEST(LayerBases, HoldsFourDistinctLayers) {
  LayerBases bases;
  std::array<int, 5> memory{};
  for (int i = 0; i < LayerBases::capacity; ++i) bases.add(i, &memory[static_cast<std::size_t>(i)]);
  EXPECT_EQ(bases.of(3), &memory[3]);
  EXPECT_EQ(bases.of(4), nullptr);
  EXPECT_THROW(bases.add(1, &memory[4]), MisuseError);
  EXPECT_THROW(bases.add(4, &memory[4]), MisuseError);
}

}  // namespace
}  // namespace tandem
