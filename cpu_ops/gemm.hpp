#pragma once
// The one matrix product that all kernels are made of. oneDNN is behind it and nowhere else.
#include <cstdint>

namespace tandem::fast {

enum class Op : char { plain = 'N', transposed = 'T' };

/// c (m, n) = alpha op(a) op(b) + beta c, fp32, row-major; op(a) is (m, k), op(b) is (k, n); ld* are the
/// distances of rows as stored. Runs on the calling thread alone. Bits are a function of the arguments.
/// Throws DeviceError when the library refuses.
void gemm(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a,
          std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc);

}  // namespace tandem::fast
