// Launches by which matrices are quantized: one, where whoever wrote the matrix has found its largest magnitude.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gpu_ops/base/fp8_matrix.hpp"
#include "gpu_ops/base/kernels.hpp"
#include "tests/gpu_ops/kernels/launch/counted.hpp"

namespace tandem::testing {
namespace {

using ::testing::Pair;
using ::testing::UnorderedElementsAre;

TEST(QuantizeLaunches, AMagnitudeSparesTheFirst) {
  gpu::Largest magnitude;
  std::byte memory;
  const TensorView x{&memory, DType::bf16, {64, 128}}, rows{nullptr, DType::f32, {64}};
  for (const auto& [sums, codes] : {std::pair{Fp8Sums::columns, "fp8_codes"}, {Fp8Sums::both, "fp8_transposed"}}) {
    const Fp8Matrix to{&memory, 64, 128, sums};
    launches().clear();
    gpu::rms_norm(x, {x, 0.0F}, x, rows, 1e-5F, nullptr);
    gpu::quantize(x, to, nullptr);
    EXPECT_THAT(launches(), UnorderedElementsAre(Pair(codes, 1), Pair("fp8_maximum", 1), Pair("rms_norm", 1)));
    launches().clear();
    gpu::rms_norm(x, {x, 0.0F}, {x, &magnitude}, rows, 1e-5F, nullptr);
    gpu::quantize({x, &magnitude}, to, nullptr);
    EXPECT_THAT(launches(), UnorderedElementsAre(Pair(codes, 1), Pair("rms_norm", 1)));
  }
  launches().clear();
  gpu::measure({x, &magnitude}, nullptr);
  gpu::swiglu_backward(x, x, x, {x, &magnitude}, {x, &magnitude}, nullptr);
  EXPECT_THAT(launches(), UnorderedElementsAre(Pair("fp8_maximum", 1), Pair("swiglu_backward", 1)));
}

}  // namespace
}  // namespace tandem::testing
