// How attention is described to cuDNN and cut into slices, over a cuDNN made of this CPU; and what happens where it is
// missing, too old, refuses or fails.
#include <cudnn.h>
#include <dlfcn.h>
#include <gmock/gmock.h>

#include "core/base/error.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/base/attention_slices.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "gpu_ops/ops/attention_cudnn.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"
#include "tests/gpu_ops/kernels/cudnn/fake_cudnn.hpp"

namespace tandem::testing {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// One call in bf16, forward and backward, with q, k and v side by side and everything that it needs.
struct Problem {
  explicit Problem(const AttentionShape& s)
      : shape(s),
        in(random.tensor(DType::bf16, {s.batch, s.sequence, width()})),
        dout(random.tensor(DType::bf16, {s.batch, s.sequence, s.heads * s.head_dim})),
        out(DType::bf16, {s.batch, s.sequence, s.heads * s.head_dim}),
        lse(DType::f32, {s.batch, s.heads, s.sequence}),
        d(DType::bf16, {s.batch, s.sequence, width()}) {}

  std::int64_t width() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_dim; }
  HeadsView part(const Tensor& of, std::int64_t first_head) const {
    return {of.view().as<bf16>() + first_head * shape.head_dim, DType::bf16, width()};
  }
  gpu::AttentionForward forward() const {
    return {part(in, 0), part(in, shape.heads), part(in, shape.heads + shape.kv_heads), out, lse, shape};
  }
  gpu::AttentionBackward backward() const {
    const gpu::AttentionForward f = forward();
    return {dout, f.q, f.k, f.v, out, lse, part(d, 0), part(d, shape.heads), part(d, shape.heads + shape.kv_heads),
            shape};
  }
  std::vector<std::byte> scratch(const gpu::Attention& attention) const {
    return std::vector<std::byte>(attention.scratch_bytes(shape, DType::bf16) + 16);
  }

  Random random{3};
  AttentionShape shape;
  Tensor in, dout, out, lse, d;
};

/// A packet's beginning within `bytes`.
void* aligned(std::vector<std::byte>& bytes) {
  return bytes.data() + (16 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 16) % 16;
}

class Cudnn : public ::testing::Test {
 protected:
  void SetUp() override { fake_cudnn::reset({}); }
  std::unique_ptr<gpu::Attention> make() {
    return gpu::make_attention([this](const std::string& why) { told_.push_back(why); });
  }
  void run(gpu::Attention& attention, const Problem& problem) {
    std::vector<std::byte> scratch = problem.scratch(attention);
    attention.forward(problem.forward(), aligned(scratch), nullptr);
    attention.backward(problem.backward(), aligned(scratch), nullptr);
  }
  std::vector<std::string> told_;
};

const AttentionShape usual{2, 36, 4, 2, 16, 0.25F};

TEST_F(Cudnn, ForwardAndBackwardAreTheReference) {
  // Odd lengths, several heads over one, one over one, as many; the scale is not the usual root; windows of one token,
  // of some, and of all but one.
  for (const AttentionShape& s :
       {usual, AttentionShape{3, 37, 3, 1, 8, 0.4F}, AttentionShape{1, 2, 1, 1, 64, 0.2F},
        AttentionShape{2, 67, 2, 2, 24, 0.3F}, AttentionShape{2, 37, 2, 1, 16, 0.3F, 1},
        AttentionShape{1, 67, 4, 2, 16, 0.3F, 13}, AttentionShape{1, 36, 1, 1, 8, 0.4F, 35}}) {
    SCOPED_TRACE(std::to_string(s.sequence) + " tokens, window " + std::to_string(s.window));
    const Problem actual(s), expected(s);
    const auto attention = make();
    run(*attention, actual);
    const gpu::AttentionForward f = expected.forward();
    const gpu::AttentionBackward b = expected.backward();
    reference::attention(f.q, f.k, f.v, f.out, f.lse, s);
    EXPECT_WITHIN(actual.out, expected.out, DType::bf16, false);
    EXPECT_WITHIN(actual.lse, expected.lse, DType::bf16, false);
    reference::attention_backward(b.dout, b.q, b.k, b.v, actual.out, actual.lse, b.dq, b.dk, b.dv, s);
    EXPECT_WITHIN(actual.d, expected.d, DType::bf16, false);
  }
  EXPECT_EQ(fake_cudnn::counters().forwards, 7);
  EXPECT_EQ(fake_cudnn::counters().backwards, 7);
  EXPECT_THAT(told_, ::testing::IsEmpty());
}

TEST_F(Cudnn, EitherBackwardFollowsEitherForward) {
  const Problem library(usual), plain(usual);
  const auto attention = make(), kernels = gpu::make_plain_attention();
  std::vector<std::byte> scratch = library.scratch(*attention);
  attention->forward(library.forward(), aligned(scratch), nullptr);
  kernels->backward(library.backward(), aligned(scratch), nullptr);
  kernels->forward(plain.forward(), aligned(scratch), nullptr);
  attention->backward(plain.backward(), aligned(scratch), nullptr);
  EXPECT_WITHIN(library.lse, plain.lse, DType::bf16, false);
  EXPECT_WITHIN(library.d, plain.d, DType::bf16, true);
}

TEST_F(Cudnn, StatisticsThatNobodyAskedForChangeNothing) {
  const Problem with(usual), without(usual);
  const auto attention = make();
  run(*attention, with);
  std::vector<std::byte> scratch = without.scratch(*attention);
  gpu::AttentionForward call = without.forward();
  call.lse = {};
  attention->forward(call, aligned(scratch), nullptr);
  EXPECT_SAME_BITS(without.out, with.out);
  EXPECT_EQ(fake_cudnn::counters().plans, 2) << "forward's and backward's";
  const fake_cudnn::Slice last = fake_cudnn::counters().slices.back();
  EXPECT_GE(last.workspace, static_cast<float*>(last.operands[gpu::of_lse]) + without.lse.count());
}

TEST_F(Cudnn, APlanIsMadeOnceForEachShape) {
  const auto attention = make();
  const Problem problem(usual);
  for (int i = 0; i < 3; ++i) run(*attention, problem);
  EXPECT_EQ(fake_cudnn::counters().plans, 2);
  AttentionShape other = usual;
  other.scale = 0.5F;
  run(*attention, Problem(other));
  EXPECT_EQ(fake_cudnn::counters().plans, 4);
  other = usual;
  for (const std::int64_t window : {7, 35}) {
    other.window = window;
    run(*attention, Problem(other));
  }
  EXPECT_EQ(fake_cudnn::counters().plans, 8);
}

TEST_F(Cudnn, AWindowOfAllTokensOrMoreIsNone) {
  const auto attention = make();
  const Problem none(usual);
  run(*attention, none);
  for (const std::int64_t longer : {usual.sequence, usual.sequence + 5}) {
    AttentionShape s = usual;
    s.window = longer;
    const Problem all(s);
    run(*attention, all);
    EXPECT_SAME_BITS(all.out, none.out);
    EXPECT_SAME_BITS(all.d, none.d);
    EXPECT_EQ(fake_cudnn::counters().plans, 2);
  }
  AttentionShape all = usual;
  all.window = usual.sequence;
  run(*make(), Problem(all));
  for (const fake_cudnn::Slice& slice : fake_cudnn::counters().slices) EXPECT_FALSE(slice.bounded);
  all.window = usual.sequence - 1;
  run(*make(), Problem(all));
  EXPECT_TRUE(fake_cudnn::counters().slices.back().bounded);
}

TEST_F(Cudnn, ItsWorkspaceIsBookedForWhoAttends) {
  WorkspaceNeeds needs{.tokens = 2 * 4096,
                       .sequence = 4096,
                       .channels = 8,
                       .heads = 32,
                       .kv_heads = 8,
                       .head_dim = 128,
                       .activations = DType::bf16};
  const AttentionShape shape{2, 4096, 32, 8, 128, 1.0F};
  EXPECT_GE(bench().ops().workspace_bytes(needs), gpu::backward_workspace(shape, 1, 1));
  EXPECT_LE(bench().ops().workspace_bytes(needs), gpu::preferred_workspace + (std::size_t{1} << 20));
  needs.activations = DType::f32;
  EXPECT_LE(bench().ops().workspace_bytes(needs), std::size_t{1} << 21);
  EXPECT_LE(bench().ops().workspace_bytes({.tokens = 5, .channels = 8, .activations = DType::bf16}),
            std::size_t{1} << 16);
}

/// Memory that nobody touches, so that calls may be as large as real ones.
template <class T>
T* imagined(int operand) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(operand) << 40);
}

TEST_F(Cudnn, ALargeCallIsMadeSliceBySlice) {
  fake_cudnn::reset({.computes = false});
  const auto attention = make();
  const AttentionShape s{3, 4096, 32, 8, 128, 0.1F};
  const std::int64_t row = 48 * 128, dense = 32 * 128;
  const auto heads = [&](int operand) { return HeadsView{imagined<bf16>(operand), DType::bf16, row}; };
  const auto tensor = [&](int operand, DType dtype) {
    return TensorView{imagined<void>(operand), dtype, {3, 4096, dense}};
  };
  attention->backward({tensor(gpu::of_dout, DType::bf16), heads(gpu::of_q), heads(gpu::of_k), heads(gpu::of_v),
                       tensor(gpu::of_out, DType::bf16), tensor(gpu::of_lse, DType::f32), heads(gpu::of_dq),
                       heads(gpu::of_dk), heads(gpu::of_dv), s},
                      imagined<void>(gpu::of_dv + 1), nullptr);
  const std::vector<fake_cudnn::Slice> slices = fake_cudnn::counters().slices;
  ASSERT_EQ(slices.size(), 3U * 4) << "two key/value heads at a time";
  EXPECT_EQ(fake_cudnn::counters().plans, 1);
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const auto b = static_cast<std::int64_t>(i) / 4, kv = static_cast<std::int64_t>(i) % 4 * 2, h = kv * 4;
    SCOPED_TRACE(i);
    EXPECT_EQ(slices[i].batch, 1);
    EXPECT_EQ(slices[i].heads, 8);
    EXPECT_EQ(slices[i].kv_heads, 2);
    const auto begins = [&](int operand, const void* where) {
      EXPECT_EQ(slices[i].operands[static_cast<std::size_t>(operand)], where) << operand;
    };
    for (const int queries : {gpu::of_q, gpu::of_dq})
      begins(queries, imagined<bf16>(queries) + b * 4096 * row + h * 128);
    for (const int keys : {gpu::of_k, gpu::of_v, gpu::of_dk, gpu::of_dv}) {
      begins(keys, imagined<bf16>(keys) + b * 4096 * row + kv * 128);
    }
    for (const int rows : {gpu::of_out, gpu::of_dout}) begins(rows, imagined<bf16>(rows) + b * 4096 * dense + h * 128);
    begins(gpu::of_lse, imagined<float>(gpu::of_lse) + (b * 32 + h) * 4096);
  }
}

TEST_F(Cudnn, TheStreamIsSetForEachCall) {
  const auto attention = make();
  const Problem problem(usual);
  std::vector<std::byte> scratch = problem.scratch(*attention);
  for (int i = 1; i < 3; ++i) {
    auto* const stream = reinterpret_cast<CUstream_st*>(static_cast<std::uintptr_t>(i) * 64);
    attention->forward(problem.forward(), aligned(scratch), stream);
    EXPECT_EQ(fake_cudnn::counters().stream, stream);
  }
}

TEST_F(Cudnn, WhatItDoesNotTakeRunsInThePlainKernels) {
  const auto attention = make();
  for (const AttentionShape& s : {AttentionShape{1, 9, 2, 1, 5, 0.4F}, AttentionShape{2, 1, 2, 1, 8, 0.4F}}) {
    const Problem actual(s), expected(s);
    run(*attention, actual);
    run(*gpu::make_plain_attention(), expected);
    EXPECT_SAME_BITS(actual.out, expected.out);
    EXPECT_SAME_BITS(actual.d, expected.d);
  }
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_THAT(told_[0], AllOf(HasSubstr("9 tokens with 2 heads of 5 over 1"), HasSubstr("no multiple of 8")));
  told_.clear();
  run(*make(), Problem({1, 9, 2, 1, 5, 0.4F, 4}));
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_THAT(told_[0], HasSubstr("9 tokens in windows of 4 with 2 heads"));
  // A row that is no multiple of 16 bytes, and an operand that begins between two.
  const Problem problem({1, 12, 1, 1, 8, 0.4F});
  std::vector<std::byte> scratch = problem.scratch(*attention);
  gpu::AttentionForward call = problem.forward();
  call.q.row_stride = 20;
  attention->forward(call, aligned(scratch), nullptr);
  call = problem.forward();
  call.k.data = static_cast<bf16*>(call.k.data) + 4;
  attention->forward(call, aligned(scratch), nullptr);
  EXPECT_EQ(fake_cudnn::counters().plans, 0);
  attention->forward(problem.forward(), aligned(scratch), nullptr);
  EXPECT_EQ(fake_cudnn::counters().plans, 1);
}

TEST_F(Cudnn, WhatItRefusesRunsInThePlainKernelsAndIsToldOnce) {
  for (const fake_cudnn::Behaviour& refusal :
       {fake_cudnn::Behaviour{.has_engines = false}, fake_cudnn::Behaviour{.deterministic = false},
        fake_cudnn::Behaviour{.plan_status = CUDNN_STATUS_NOT_SUPPORTED},
        fake_cudnn::Behaviour{.workspace = std::int64_t{1} << 31}}) {
    told_.clear();
    fake_cudnn::reset(refusal);
    const auto attention = make();
    const Problem actual(usual), expected(usual);
    run(*attention, actual);
    run(*attention, actual);
    run(*gpu::make_plain_attention(), expected);
    EXPECT_SAME_BITS(actual.out, expected.out);
    EXPECT_SAME_BITS(actual.d, expected.d);
    EXPECT_EQ(fake_cudnn::counters().forwards + fake_cudnn::counters().backwards, 0);
    ASSERT_EQ(told_.size(), 1U);
    EXPECT_THAT(told_[0], AllOf(HasSubstr("plain kernels"), HasSubstr("cuDNN 9.19.0"), HasSubstr("36 tokens")));
    EXPECT_EQ(told_[0].find('\n'), std::string::npos);
  }
  EXPECT_THAT(told_[0], HasSubstr("asks for 2.00 GiB of workspace"));
}

TEST_F(Cudnn, AFailureIsADeviceErrorThatNamesIt) {
  const Problem problem(usual);
  fake_cudnn::reset({.plan_status = CUDNN_STATUS_INTERNAL_ERROR});
  EXPECT_THAT([&] { run(*make(), problem); },
              ThrowsMessage<DeviceError>(AllOf(HasSubstr("attention: cuDNN failed to plan"), HasSubstr("INTERNAL"))));
  fake_cudnn::reset({.run_status = CUDNN_STATUS_EXECUTION_FAILED});
  EXPECT_THAT(
      [&] { run(*make(), problem); },
      ThrowsMessage<DeviceError>(AllOf(HasSubstr("attention: cuDNN failed to run"), HasSubstr("EXECUTION_FAILED"))));
}

TEST_F(Cudnn, ALostDeviceIsNamedWhereACallReportsIt) {
  const Problem problem(usual);
  for (const fake_cudnn::Behaviour& failing : {fake_cudnn::Behaviour{.plan_status = CUDNN_STATUS_INTERNAL_ERROR},
                                               fake_cudnn::Behaviour{.run_status = CUDNN_STATUS_EXECUTION_FAILED}}) {
    fake_cudnn::reset(failing);
    const auto attention = make();
    emulation::lose_device(true);
    EXPECT_THAT([&] { run(*attention, problem); }, ThrowsMessage<DeviceError>(HasSubstr("device lost")));
    emulation::lose_device(false);
  }
}

TEST_F(Cudnn, NothingElseOfCudaIsLoaded) {
  run(*make(), Problem(usual));
  for (const char* library : {"libcudart.so.12", "libcudart.so.13", "libcuda.so.1"}) {
    EXPECT_EQ(::dlopen(library, RTLD_NOW | RTLD_NOLOAD), nullptr) << library;
  }
}

TEST_F(Cudnn, TheKeyNamesTheVersions) {
  EXPECT_THAT(gpu::attention_key(), AllOf(HasSubstr("cudnn 91900 frontend 1"), EndsWith(" nvrtc 13.1")));
}

/// Run in a process of its own, where the library says that it is older.
TEST_F(Cudnn, ALibraryTooOldIsNotUsed) {
  if (::cudnnGetVersion() == 91900) GTEST_SKIP() << "run by CTest on its own";
  const Problem actual(usual), expected(usual);
  run(*make(), actual);
  run(*gpu::make_plain_attention(), expected);
  EXPECT_SAME_BITS(actual.out, expected.out);
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_THAT(told_[0], HasSubstr("is cuDNN 9.15.1, 9.18.0 or later is needed"));
  EXPECT_EQ(gpu::attention_key(), "plain");
}

/// Run in a process of its own: what was found holds for the process.
TEST_F(Cudnn, ALibraryWithoutItsCompilerIsNotUsed) {
  if (::cudnnGetCudartVersion() != 99000) GTEST_SKIP() << "run by CTest on its own";
  run(*make(), Problem(usual));
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_THAT(told_[0], AllOf(HasSubstr("cuDNN 9.19.0 compiles its kernels by NVRTC: libnvrtc.so.99 is neither in"),
                              HasSubstr("TANDEM_CUDA_LIBS")));
  EXPECT_EQ(gpu::attention_key(), "plain");
}

/// Run in a process of its own: what was found holds for the process.
TEST_F(Cudnn, ALibraryThatDoesNotStartIsNotUsed) {
  if (::cudnnGetVersion() != 92000) GTEST_SKIP() << "run by CTest on its own";
  fake_cudnn::reset({.start_status = CUDNN_STATUS_NOT_INITIALIZED});
  run(*make(), Problem(usual));
  ASSERT_EQ(told_.size(), 1U);
  EXPECT_THAT(told_[0], HasSubstr("cuDNN 9.20.0 does not start: CUDNN_STATUS_NOT_INITIALIZED"));
  EXPECT_EQ(gpu::attention_key(), "plain");
}

}  // namespace
}  // namespace tandem::testing
