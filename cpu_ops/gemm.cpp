#include "cpu_ops/gemm.hpp"

#include <dnnl.h>
#include <dnnl_debug.h>
#include <omp.h>

#include "core/error.hpp"

namespace tandem::fast {
namespace {

/// oneDNN as distributed starts OpenMP threads of its own. Threads are the caller's business here (one
/// tile each), so OpenMP is held to one on every thread that comes by; the setting is per thread.
void hold_openmp_to_one_thread() {
  thread_local const bool held = [] {
    omp_set_num_threads(1);
    return true;
  }();
  static_cast<void>(held);
}

}  // namespace

void gemm(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const float* a,
          std::int64_t lda, const float* b, std::int64_t ldb, float beta, float* c, std::int64_t ldc) {
  hold_openmp_to_one_thread();
  const dnnl_status_t status =
      dnnl_sgemm(static_cast<char>(op_a), static_cast<char>(op_b), m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  if (status != dnnl_success) throw DeviceError("matrix product failed in oneDNN", dnnl_status2str(status));
}

}  // namespace tandem::fast
