// Layout of parameters: padding, order, ties and frozen layers.
#include "core/params/parameter_layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/base/error.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr ParameterOptions frozen{.trainable = false};

TEST(ParameterLayout, PadsEachParameterToTheQuantum) {
  ParameterLayout layout;
  layout.add_layer("h").add("a", {1}).add("b", {22, 55}).add("c", {layout_quantum}).add("d", {100003});
  const Layer& layer = layout.layer(0);
  std::int64_t offset = 0;
  for (const Parameter& p : layer.parameters) {
    EXPECT_EQ(p.offset, offset) << p.name;
    EXPECT_EQ(p.padded_count % layout_quantum, 0);
    EXPECT_GE(p.padded_count, p.count);
    EXPECT_LT(p.padded_count - p.count, layout_quantum);
    offset += p.padded_count;
  }
  EXPECT_EQ(layer.elements, offset);
  EXPECT_EQ(layer.elements, 1024 + 2048 + 1024 + 100352);
  EXPECT_EQ(layer.state_elements, layer.elements);
  EXPECT_EQ(layout.parameter_count(), 1 + 22 * 55 + 1024 + 100003);
}

TEST(ParameterLayout, PutsTrainableParametersFirst) {
  ParameterLayout layout;
  layout.add_layer("h").add("f1", {10}, frozen).add("t1", {2000}).add("f2", {10}, frozen).add("t2", {10});
  const Layer& layer = layout.layer(0);
  EXPECT_EQ(layout.parameter("h.t1").offset, 0);
  EXPECT_EQ(layout.parameter("h.t2").offset, 2048);
  EXPECT_EQ(layout.parameter("h.f1").offset, 3072);
  EXPECT_EQ(layout.parameter("h.f2").offset, 4096);
  EXPECT_EQ(layer.state_elements, 3072);
  EXPECT_EQ(layer.elements, 5120);
  EXPECT_EQ(layer.parameters[0].name, "f1") << "the order of declaration stays";
  EXPECT_EQ(layout.state_elements(), 3072);
}

TEST(ParameterLayout, PutsGradientsThatAreSummedFirst) {
  ParameterLayout layout;
  layout.add_layer("h")
      .add("w", {3000}, {.gradient = DType::bf16})
      .add("f", {10}, {.trainable = false, .gradient = DType::bf16})
      .add("b", {10})
      .add("u", {10}, {.gradient = DType::bf16});
  const Layer& layer = layout.layer(0);
  EXPECT_EQ(layout.parameter("h.b").offset, 0);
  EXPECT_EQ(layout.parameter("h.w").offset, 1024);
  EXPECT_EQ(layout.parameter("h.u").offset, 1024 + 3072);
  EXPECT_EQ(layout.parameter("h.f").offset, 1024 + 3072 + 1024);
  EXPECT_EQ(layer.summed_elements, 1024);
  EXPECT_EQ(layer.state_elements, 1024 + 3072 + 1024);
  EXPECT_EQ(layer.gradient_offset(0), 0U);
  EXPECT_EQ(layer.gradient_offset(1024), 4096U);
  EXPECT_EQ(layer.gradient_offset(1024 + 3072), 4096U + 6144U);
  EXPECT_EQ(layer.gradient_offset(layer.state_elements), 4096U + 6144U + 2048U);
}

TEST(ParameterLayout, GradientsInBf16AreOtherStorage) {
  const auto hash = [](DType gradient) {
    ParameterLayout layout;
    layout.add_layer("h").add("w", {3000}, {.gradient = gradient});
    return layout.storage_hash();
  };
  EXPECT_NE(hash(DType::f32), hash(DType::bf16));
}

TEST(ParameterLayout, WhollyFrozenOrEmptyLayersHaveNoState) {
  ParameterLayout layout;
  layout.add_layer("frozen").add("w", {5}, frozen);
  layout.add_layer("empty");
  EXPECT_EQ(layout.layer(0).state_elements, 0);
  EXPECT_EQ(layout.layer(0).elements, 1024);
  EXPECT_EQ(layout.layer(1).elements, 0);
}

TEST(ParameterLayout, TiedParametersShareTheOwnersStorage) {
  ParameterLayout layout;
  layout.add_layer("embedding").add("positions", {7}, frozen).add("tokens", {50, 3});
  layout.add_layer("head").add("norm", {3}).add("weight", {50, 3});
  layout.tie("embedding.tokens", "head.weight");
  const Layer& head = layout.layer(1);
  EXPECT_EQ(head.elements, 1024) << "only its norm";
  EXPECT_THAT(head.borrows, ElementsAre(0));
  const Parameter& tied = head.parameters[1];
  EXPECT_TRUE(tied.tied());
  EXPECT_EQ(tied.tied_layer, 0);
  EXPECT_EQ(tied.tied_index, 1);
  EXPECT_EQ(&layout.parameter("head.weight"), &layout.parameter("embedding.tokens"));
  EXPECT_EQ(layout.parameter_count(), 7 + 150 + 3);
  EXPECT_EQ(layout.owned_parameters().size(), 3U);
}

TEST(ParameterLayout, TiedParametersThatAreWrittenWholeLieBehindWhatIsSummed) {
  ParameterLayout layout;
  layout.add_layer("embedding").add("tokens", {500, 3}, {.gradient = DType::bf16}).add("positions", {7});
  layout.add_layer("head").add("weight", {500, 3}, {.gradient = DType::bf16});
  layout.tie("embedding.tokens", "head.weight");
  const Layer& owner = layout.layer(0);
  EXPECT_EQ(owner.summed_elements, 1024);
  EXPECT_EQ(layout.parameter("head.weight").offset, 1024);
  EXPECT_EQ(owner.gradient_offset(owner.state_elements), 1024U * 4 + 2048U * 2);
}

TEST(ParameterLayout, TiedOffsetFollowsAnOwnerThatMoves) {
  ParameterLayout layout;
  auto first = layout.add_layer("a").add("w", {4}, frozen);
  layout.add_layer("b").add("w", {4});
  layout.tie("a.w", "b.w");
  EXPECT_EQ(layout.layer(1).parameters[0].offset, 0);
  first.add("before", {4});
  EXPECT_EQ(layout.parameter("a.w").offset, 1024);
  EXPECT_EQ(layout.layer(1).parameters[0].offset, 1024);
  EXPECT_FALSE(layout.layer(1).parameters[0].options.trainable) << "the owner's options hold for both";
}

TEST(ParameterLayout, TwoTiesToOneLayerBorrowItOnce) {
  ParameterLayout layout;
  layout.add_layer("a").add("x", {4}).add("y", {4});
  layout.add_layer("b").add("x", {4}).add("y", {4});
  layout.tie("a.x", "b.x");
  layout.tie("a.y", "b.y");
  EXPECT_THAT(layout.layer(1).borrows, ElementsAre(0));
  EXPECT_EQ(layout.layer(1).elements, 0);
}

TEST(ParameterLayout, RefusesWrongTies) {
  ParameterLayout layout;
  layout.add_layer("a").add("w", {4}).add("v", {4}).add("row", {1, 4});
  layout.add_layer("b").add("w", {4});
  layout.add_layer("c").add("w", {4}).add("written", {4}, {.gradient = DType::bf16});
  EXPECT_THAT([&] { layout.tie("a.w", "c.written"); },
              ThrowsMessage<MisuseError>(HasSubstr("gradients of f32 and bf16")));
  EXPECT_THAT([&] { layout.tie("c.written", "a.w"); },
              ThrowsMessage<MisuseError>(HasSubstr("gradients of bf16 and f32")));
  EXPECT_THAT([&] { layout.tie("a.w", "b.none"); }, ThrowsMessage<MisuseError>(HasSubstr("'b.none' is not declared")));
  EXPECT_THAT([&] { layout.tie("a.none", "b.w"); }, ThrowsMessage<MisuseError>(HasSubstr("'a.none' is not declared")));
  EXPECT_THAT([&] { layout.tie("a.row", "b.w"); }, ThrowsMessage<MisuseError>(HasSubstr("(1, 4) and (4)")));
  EXPECT_THAT([&] { layout.tie("a.w", "a.v"); }, ThrowsMessage<MisuseError>(HasSubstr("one layer")));
  layout.tie("a.w", "b.w");
  EXPECT_THROW(layout.tie("a.v", "b.w"), MisuseError) << "twice";
  EXPECT_THROW(layout.tie("b.w", "c.w"), MisuseError) << "owner is tied itself";
  EXPECT_THROW(layout.tie("c.w", "a.w"), MisuseError) << "shared is an owner";
}

TEST(ParameterLayout, RefusesMoreLoansThanAGuardCanHold) {
  ParameterLayout layout;
  for (const char* owner : {"a", "b", "c", "d"}) layout.add_layer(owner).add("w", {4});
  layout.add_layer("z").add("a", {4}).add("b", {4}).add("c", {4}).add("d", {4});
  layout.tie("a.w", "z.a");
  layout.tie("b.w", "z.b");
  layout.tie("c.w", "z.c");
  EXPECT_THROW(layout.tie("d.w", "z.d"), MisuseError);
  EXPECT_FALSE(layout.layer(4).parameters[3].tied()) << "a refusal changes nothing";
}

TEST(ParameterLayout, RefusesBadDeclarations) {
  ParameterLayout layout;
  EXPECT_THROW(layout.add_layer(""), MisuseError);
  auto layer = layout.add_layer("a").add("w", {4});
  EXPECT_THROW(layout.add_layer("a"), MisuseError);
  EXPECT_THROW(layer.add("w", {4}), MisuseError);
  EXPECT_THROW(layer.add("", {4}), MisuseError);
  EXPECT_THROW(layer.add("none", {4, 0}), MisuseError);
  EXPECT_THROW(layer.add("s", {4}, {.lr_scale = -1}), MisuseError);
  EXPECT_THROW(layer.add("s", {4}, {.lr_scale = std::numeric_limits<double>::quiet_NaN()}), MisuseError);
  EXPECT_THROW(layer.add("s", {4}, {.gradient = DType::i32}), MisuseError);
  layer.add("b.w", {4});
  EXPECT_THROW(layout.add_layer("a.b").add("w", {4}), MisuseError) << "one full name for two parameters";
  EXPECT_THROW(layout.parameter("nobody"), MisuseError);
  EXPECT_EQ(layout.layer(0).find("nobody"), -1);
  EXPECT_EQ(layout.layer(0).elements, 2048);
}

}  // namespace
}  // namespace tandem
