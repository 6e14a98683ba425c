// Operations queued on the host device: their names, refusals and workspaces.
#include "cpu_ops/device/host_ops.hpp"

#include <gmock/gmock.h>

#include <string>

#include "cpu_ops/reference/reference.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

/// Ops whose stream is a list: work runs when the test says so.
class HostOpsTest : public ::testing::Test {
 protected:
  std::shared_ptr<Parallel> parallel_ = make_parallel(2);
  std::unique_ptr<UpdateKernels> kernels_ = make_host_update_kernels(parallel_);
  std::vector<std::pair<std::string, std::function<void()>>> queue_;
  HostOps ops_{parallel_, *kernels_, [this](StreamView, std::string_view name, std::function<void()> work) {
                 queue_.emplace_back(name, std::move(work));
               }};
  Random random_{1};

  void drain() {
    for (auto& [name, work] : queue_) work();
    queue_.clear();
  }
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
};

TEST_F(HostOpsTest, QueuesUnderItsNameAndComputesLater) {
  const Tensor x = random_.tensor(DType::f32, {5, 24}), w = random_.tensor(DType::bf16, {52, 24});
  Tensor y(DType::f32, {5, 52}), expected = y;
  const Tensor untouched = y;
  LentWorkspace workspace(
      ops_.workspace_bytes({.tokens = 5, .sequence = 5, .vocabulary = 1, .channels = 52, .heads = 1, .head_dim = 1}));
  ops_.bind_workspace(workspace.get().data, workspace.get().bytes);
  ops_.linear(x, w, {}, y, {});
  ASSERT_EQ(queue_.size(), 1U);
  EXPECT_EQ(queue_[0].first, "linear");
  EXPECT_SAME_BITS(y, untouched);
  drain();
  reference::linear(x, w, {}, expected);
  EXPECT_CLOSE(y, expected);
}

TEST_F(HostOpsTest, RefusalsNameTheOperationAndTheShapesAndQueueNothing) {
  const Tensor x = random_.tensor(DType::f32, {5, 24}), w = random_.tensor(DType::bf16, {52, 23});
  Tensor y(DType::f32, {5, 52}), narrow(DType::bf16, {5, 52}), rows(DType::f32, {5});
  const std::string wrong_shape = refusal([&] { ops_.linear(x, w, {}, y, {}); });
  EXPECT_THAT(wrong_shape, ::testing::AllOf(::testing::HasSubstr("linear"), ::testing::HasSubstr("(52, 23)"),
                                            ::testing::HasSubstr("(52, 24)")));
  const std::string wrong_type = refusal([&] { ops_.gelu(x, narrow.view().reshaped({5, 52}), {}); });
  EXPECT_THAT(wrong_type, ::testing::AllOf(::testing::HasSubstr("gelu"), ::testing::HasSubstr("bf16")));
  EXPECT_THAT(refusal([&] { ops_.rms_norm(x, {}, x, rows, 1e-5F, {}); }), ::testing::HasSubstr("weight is empty"));
  const AttentionShape shape{.batch = 1, .sequence = 5, .heads = 3, .kv_heads = 2, .head_dim = 8};
  const HeadsView heads{x.view().data, DType::f32, 24};
  EXPECT_THAT(refusal([&] { ops_.attention(heads, heads, heads, x, {}, shape, {}); }), ::testing::HasSubstr("divide"));
  const AttentionShape backwards{.batch = 1, .sequence = 5, .heads = 3, .kv_heads = 3, .head_dim = 8, .window = -1};
  EXPECT_THAT(refusal([&] { ops_.attention(heads, heads, heads, x, {}, backwards, {}); }),
              ::testing::HasSubstr("window"));
  EXPECT_THAT(refusal([&] {
                ops_.rope(x.view().reshaped({1, 5, 8, 3}), rows, {}, false, {});
              }),
              ::testing::HasSubstr("no pairs"));
  const Tensor wide(DType::f32, {5, 2, 2});
  EXPECT_THAT(refusal([&] {
                ops_.rope(x.view().reshaped({1, 5, 8, 3}), wide, {}, false, {});
              }),
              ::testing::HasSubstr("more than a head"));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(HostOpsTest, TheBookedWorkspaceIsEnoughForEveryCallWithinIt) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const WorkspaceNeeds needs{.tokens = 200,
                               .sequence = 100,
                               .vocabulary = 1001,
                               .channels = 900,
                               .heads = 4,
                               .head_dim = 16,
                               .activations = dtype};
    LentWorkspace workspace(ops_.workspace_bytes(needs));
    ops_.bind_workspace(workspace.get().data, workspace.get().bytes);
    for (const std::int64_t n : {1, 37, 150, 200}) {
      for (const std::int64_t in : {1, 64, 801, 900}) {
        for (const std::int64_t out : {1, 130, 900}) {
          const Tensor x(dtype, {n, in}), w(DType::bf16, {out, in});
          Tensor y(dtype, {n, out}), dx(dtype, {n, in}), dw(DType::f32, {out, in});
          ops_.linear(x, w, {}, y, {});
          ops_.linear_backward_input(y, w, dx, false, {});
          ops_.linear_backward_weight(y, x, dw, {}, {});
          EXPECT_NO_THROW(drain());
        }
      }
      const Tensor x(dtype, {n, 64}), w(DType::bf16, {1001, 64}), targets(DType::i32, {n});
      Tensor losses(DType::f32, {n}), dx(dtype, {n, 64}), dw(DType::f32, {1001, 64});
      ops_.head_loss(
          {.x = x, .weight = w, .targets = targets, .losses = losses, .gradient_scale = 1.0F, .dx = dx, .dweight = dw},
          {});
      EXPECT_NO_THROW(drain());
    }
    for (const std::int64_t t : {1, 63, 100}) {
      const AttentionShape s{.batch = 2, .sequence = t, .heads = 4, .kv_heads = 2, .head_dim = 16, .scale = 1.0F};
      const Tensor q(dtype, {2, t, 64});
      Tensor out(dtype, {2, t, 64}), lse(DType::f32, {2, 4, t});
      const HeadsView h{q.view().data, dtype, 64};
      Tensor dq(dtype, {2, t, 64}), dk(dtype, {2, t, 32}), dv(dtype, {2, t, 32});
      ops_.attention(h, h, h, out, lse, s, {});
      ops_.attention_backward(q, h, h, h, out, lse, {dq.view().data, dtype, 64}, {dk.view().data, dtype, 32},
                              {dv.view().data, dtype, 32}, s, {});
      EXPECT_NO_THROW(drain());
    }
  }
}

/// A matrix of eight-bit floating point in memory of its own, and the numbers that its elements are.
struct Quantized {
  Quantized(HostOps& ops, const Tensor& x, Fp8Format format = Fp8Format::e4m3)
      : memory(ops.fp8_bytes(x.view().shape[0], x.view().shape[1], Fp8Sums::both)),
        view{memory.get().data, x.view().shape[0], x.view().shape[1], Fp8Sums::both, format},
        values(DType::bf16, x.view().shape) {
    ops.quantize(x, view, {});
    reference::quantize(x, format, values);
  }
  LentWorkspace memory;
  Fp8Matrix view;
  Tensor values;
};

TEST_F(HostOpsTest, ProductsOfEightBitFactorsAreThoseOfTheirNumbers) {
  const Tensor of_x = random_.tensor(DType::bf16, {48, 64}), of_w = random_.tensor(DType::bf16, {80, 64}, 0.1F);
  const Tensor of_dy = random_.tensor(DType::bf16, {48, 80}, 1e-4F), bias = random_.tensor(DType::bf16, {80});
  LentWorkspace workspace(ops_.workspace_bytes({.tokens = 48,
                                                .sequence = 48,
                                                .vocabulary = 1,
                                                .channels = 80,
                                                .heads = 1,
                                                .head_dim = 1,
                                                .activations = DType::bf16}));
  ops_.bind_workspace(workspace.get().data, workspace.get().bytes);
  const Quantized x(ops_, of_x), w(ops_, of_w), dy(ops_, of_dy, Fp8Format::e5m2);
  const Tensor residual = random_.tensor(DType::bf16, {48, 80});
  Tensor y(DType::bf16, {48, 80}), sum = y, dx = random_.tensor(DType::bf16, {48, 64}, 1e-4F);
  Tensor dw = random_.tensor(DType::f32, {80, 64}, 1e-3F), narrow(DType::bf16, {80, 64});
  Tensor expected = y, expected_sum = y, expected_dx = dx, expected_dw = dw, expected_narrow = narrow;
  ops_.fp8_linear(x.view, w.view, Fp8Accumulation::full, bias, {}, y, {});
  ops_.fp8_linear(x.view, w.view, Fp8Accumulation::fast, bias, residual, sum, {});
  ops_.fp8_backward_input(dy.view, w.view, Fp8Accumulation::full, dx, true, {});
  ops_.fp8_backward_weight(dy.view, x.view, Fp8Accumulation::full, dw, {});
  ops_.fp8_backward_weight(dy.view, x.view, Fp8Accumulation::full, narrow, {});
  drain();
  reference::linear(x.values, w.values, bias, expected);
  EXPECT_CLOSE(y, expected);
  reference::add(residual, expected, expected_sum);
  EXPECT_CLOSE(sum, expected_sum);
  reference::linear_backward_input(dy.values, w.values, expected_dx, true);
  EXPECT_CLOSE(dx, expected_dx);
  reference::linear_backward_weight(dy.values, x.values, expected_dw, {});
  EXPECT_CLOSE(dw, expected_dw);
  reference::linear_backward_weight(dy.values, x.values, expected_narrow, {});
  EXPECT_CLOSE(narrow, expected_narrow);
}

TEST_F(HostOpsTest, SlicesOfAHeadsGradientAreOfOneThatIsWrittenAndOfNoTiedTable) {
  const Tensor x(DType::f32, {3, 8}), w(DType::bf16, {20, 8}), targets(DType::i32, {3});
  Tensor losses(DType::f32, {3}), sums(DType::f32, {20, 8}), written(DType::bf16, {20, 8}), rows(DType::f32, {3, 8});
  const HeadLoss head{.x = x, .weight = w, .targets = targets, .losses = losses, .dx = {}, .dweight = {}};
  const auto refused = [&](const TensorView& dweight, std::int64_t at_once, bool tied) {
    HeadLoss call = head;
    call.dweight = dweight;
    call.rows_at_once = at_once;
    if (tied) {
      call.tokens = targets;
      call.token_rows = rows;
    }
    EXPECT_THROW(ops_.head_loss(call, {}), MisuseError);
  };
  refused(sums, 7, false);
  refused(written, -1, false);
  refused(written, 7, true);
  EXPECT_NO_THROW(drain());
}

TEST_F(HostOpsTest, OptimizerArithmeticIsThatOfTheUpdateKernels) {
  std::vector<float> master(55, 0.5F), m(55), v(55), sum(55);
  std::vector<bf16> gradient(55, numerics::round_to_bf16(0.25F)), weight(55);
  std::vector<double> partial(1);
  const AdamCoefficients c = numerics::adam_coefficients({}, 1, 1e-3, 1.0, true);
  ops_.adamw({{master.data(), m.data(), v.data()}, gradient.data(), weight.data(), 55}, c, {});
  ops_.accumulate(sum.data(), gradient.data(), true, 55, {});
  ops_.accumulate(sum.data(), gradient.data(), false, 55, {});
  ops_.round(sum.data(), gradient.data(), 55, {});
  ops_.norm_blocks(gradient.data(), 55, partial.data(), {});
  ops_.weights_of_master(master.data(), weight.data(), 55, {});
  EXPECT_EQ(queue_.size(), 6U);
  drain();
  const numerics::AdamElement expected = numerics::adamw({0.5F, 0.0F, 0.0F}, 0.25F, c);
  EXPECT_EQ(master[54], expected.master);
  EXPECT_EQ(weight[54], numerics::weight_of_master(expected.master));
  EXPECT_EQ(partial[0], 55 * 0.25);
}

}  // namespace
}  // namespace tandem::testing
