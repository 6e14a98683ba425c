// Frozen weights in other formats and dropout by GPU kernels: the reference to the bit, at any alignment.
#include "core/tensor/coded_shape.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/cpu_ops/coded_weights.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

class DecodeOp : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

/// Bytes as a tensor that can be put on the device; those behind the last are zero.
Tensor as_tensor(const void* data, std::size_t bytes) {
  Tensor t(DType::f32, {static_cast<std::int64_t>((bytes + 3) / 4)});
  std::memcpy(t.view().data, data, bytes);
  return t;
}

TEST_F(DecodeOp, IsTheReferenceToTheBit) {
  for (const WeightCode code : weight_codes) {
    for (const Shape& shape : coded_shapes()) {
      const RandomCodes random(code, shape, 1);
      const Tensor codes = as_tensor(random.bytes.data(), random.bytes.size());
      const Tensor scales = as_tensor(random.scales.data(), random.scales.size() * sizeof(float));
      Tensor expected(DType::bf16, shape);
      reference::decode(random.view(), expected);
      for (const std::size_t offset : {0U, 4U, 8U}) {
        const auto results = under_all_schedules([&] {
          const Operand c = bench().put(codes, offset), s = bench().put(scales, 4);
          const Operand weight = bench().put(Tensor(DType::bf16, shape), offset % 8);
          bench().ops().decode({code, static_cast<const std::byte*>(c.view().data), s.as<float>()}, weight,
                               bench().stream());
          return std::vector<Tensor>{bench().get(weight)};
        });
        EXPECT_SAME_BITS(results[0], expected) << static_cast<int>(code) << " of " << shape.text() << " at " << offset;
      }
    }
  }
}

class DropoutKernel : public OpsTest {};

TEST_P(DropoutKernel, IsTheReferenceToTheBitAlsoInPlace) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 22}, Shape{5, 11}, Shape{55, 1001}}) {
    for (const std::size_t offset : offsets(dtype())) {
      for (const std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{1} << 32) - 30, std::uint64_t{7}}) {
        Random random(3);
        const Tensor x = random.tensor(dtype(), shape), before = random.tensor(dtype(), shape);
        const Dropout of{0.3F, 42, 5, first};
        Tensor expected(dtype(), shape), sum = before;
        reference::dropout(x, of, expected, false);
        reference::dropout(x, of, sum, true);
        const auto results = under_all_schedules([&] {
          const Operand y = bench().put(x, offset), z = bench().put(before, offset), from = bench().put(x, offset);
          ops().dropout(y, of, y, false, stream());
          ops().dropout(from, of, z, true, stream());
          return std::vector<Tensor>{bench().get(y), bench().get(z)};
        });
        EXPECT_SAME_BITS(results[0], expected) << shape.text() << " from " << first;
        EXPECT_SAME_BITS(results[1], sum) << shape.text() << " from " << first;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, DropoutKernel, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
