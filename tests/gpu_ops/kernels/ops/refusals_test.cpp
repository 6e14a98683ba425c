// Calls against the contract are refused before anything is queued, by operation and shape.
#include <gmock/gmock.h>

#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

class RefusedOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  }
  Ops& ops() { return bench().ops(); }
  StreamView stream() { return bench().stream(); }
  /// Message of the MisuseError that the call throws, or "" where it throws none.
  template <class Call>
  static std::string refusal(const Call& call) {
    try {
      call();
    } catch (const MisuseError& error) {
      return error.what();
    }
    return "";
  }
  Random random_{1};
};

TEST_F(RefusedOps, NameTheOperationAndTheShapes) {
  const Operand x = bench().put(random_.tensor(DType::f32, {5, 24})), w = bench().put(Tensor(DType::bf16, {52, 23}));
  const Operand y = bench().put(Tensor(DType::f32, {5, 52})), narrow = bench().put(Tensor(DType::bf16, {5, 52}));
  const Operand rows = bench().put(Tensor(DType::f32, {5}));
  EXPECT_THAT(refusal([&] { ops().linear(x, w, {}, y, stream()); }),
              ::testing::AllOf(::testing::HasSubstr("linear"), ::testing::HasSubstr("(52, 23)"),
                               ::testing::HasSubstr("(52, 24)")));
  EXPECT_THAT(refusal([&] { ops().gelu(y, narrow, stream()); }),
              ::testing::AllOf(::testing::HasSubstr("gelu"), ::testing::HasSubstr("bf16")));
  EXPECT_THAT(refusal([&] { ops().rms_norm(x, {}, x, rows, 1e-5F, stream()); }),
              ::testing::HasSubstr("weight is empty"));
  const AttentionShape shape{.batch = 1, .sequence = 5, .heads = 3, .kv_heads = 2, .head_dim = 8};
  EXPECT_THAT(refusal([&] { ops().attention(x.heads(24), x.heads(24), x.heads(24), x, {}, shape, stream()); }),
              ::testing::HasSubstr("divide"));
  const AttentionShape backwards{.batch = 1, .sequence = 5, .heads = 3, .kv_heads = 3, .head_dim = 8, .window = -1};
  EXPECT_THAT(refusal([&] { ops().attention(x.heads(24), x.heads(24), x.heads(24), x, {}, backwards, stream()); }),
              ::testing::HasSubstr("window"));
}

TEST_F(RefusedOps, NameTheOperationOfExpertsAndTheShapes) {
  const Operand slots = bench().put(Tensor(DType::i32, {5, 2})), begins = bench().put(Tensor(DType::i32, {4}));
  const Operand shares = bench().put(Tensor(DType::f32, {5, 2})), rows = bench().put(Tensor(DType::i32, {10}));
  const Routing routing{slots, shares, begins, rows, slots}, of_more{slots, shares, rows, rows, slots};
  const Operand x = bench().put(random_.tensor(DType::f32, {5, 24})), y = bench().put(Tensor(DType::f32, {10, 52}));
  const Operand w = bench().put(Tensor(DType::bf16, {3, 52, 23}));
  EXPECT_THAT(refusal([&] {
                ops().expert_linear({x, true}, w, routing, y, stream());
              }),
              ::testing::AllOf(::testing::HasSubstr("expert_linear"), ::testing::HasSubstr("(3, 52, 23)"),
                               ::testing::HasSubstr("(3, 52, 24)")));
  EXPECT_THAT(refusal([&] {
                ops().expert_linear({x, false}, w, routing, y, stream());
              }),
              ::testing::HasSubstr("(10, 24)"));
  EXPECT_THAT(refusal([&] { ops().sum_rows(y, routing, x, x, stream()); }), ::testing::HasSubstr("sum_rows"));
  EXPECT_THAT(refusal([&] { ops().route(x, true, of_more, stream()); }), ::testing::HasSubstr("route"));
  Routing too_many = routing;
  too_many.experts.shape = {std::int64_t{1} << 30, 2};
  EXPECT_THAT(refusal([&] { ops().route(x, true, too_many, stream()); }), ::testing::HasSubstr("more rows than"));
}

TEST_F(RefusedOps, AreThoseOfMoreThanALaunchNumbers) {
  // Nothing is read of arrays that are refused.
  const Operand few = bench().put(Tensor(DType::bf16, {1})), angles = bench().put(Tensor(DType::f32, {1, 1, 2}));
  const TensorView heads{few.view().data, DType::bf16, {std::int64_t{1} << 31, 1, 1, 2}};
  EXPECT_THAT(refusal([&] { ops().rope(heads, angles, {}, false, stream()); }), ::testing::HasSubstr("2147483648"));
}

TEST_F(RefusedOps, AreThoseOfSequencesThatAreNoPairs) {
  const Operand losses = bench().put(Tensor(DType::f32, {3, 5})), of_each = bench().put(Tensor(DType::f32, {3}));
  const Operand pairs = bench().put(Tensor(DType::f32, {1, 3})), two = bench().put(Tensor(DType::f32, {2, 5}));
  const Operand of_two = bench().put(Tensor(DType::f32, {2}));
  EXPECT_THAT(refusal([&] {
                ops().preference_loss({losses, of_each, 0.1F, of_each, pairs}, stream());
              }),
              ::testing::HasSubstr("3 sequences are no pairs"));
  EXPECT_THAT(refusal([&] {
                ops().preference_loss({two, of_two, 0.0F, of_two, pairs}, stream());
              }),
              ::testing::HasSubstr("beta"));
  EXPECT_THAT(refusal([&] {
                ops().preference_loss({two, of_each, 0.1F, of_two, pairs}, stream());
              }),
              ::testing::HasSubstr("reference"));
  const Operand x = bench().put(Tensor(DType::f32, {4, 8})), w = bench().put(Tensor(DType::bf16, {11, 8}));
  const Operand targets = bench().put(Tensor(DType::i32, {4})), l = bench().put(Tensor(DType::f32, {4}));
  EXPECT_THAT(refusal([&] {
                ops().head_loss({x, w, targets, l, 1.0F, x, {}, of_each}, stream());
              }),
              ::testing::HasSubstr("4 rows are not 3 sequences"));
}

TEST_F(RefusedOps, AWorkspaceThatIsTooSmallIsSeenBeforeItIsUsed) {
  bench().lend({.tokens = 1, .vocabulary = 1, .channels = 1});
  const Operand x = bench().put(random_.tensor(DType::f32, {64, 512}));
  const Operand w = bench().put(random_.tensor(DType::bf16, {1000, 512}));
  const Operand targets = bench().put(Tensor(DType::i32, {64})), losses = bench().put(Tensor(DType::f32, {64}));
  EXPECT_THAT(refusal([&] {
                ops().head_loss({x, w, targets, losses, 1.0F, {}, {}}, stream());
              }),
              ::testing::HasSubstr("workspace"));
}

}  // namespace
}  // namespace tandem::testing
