#include "tests/gpu_ops/kernels/cublaslt/fake_cublaslt.hpp"

#include <cublasLt.h>

#include <cstring>

#include "core/numerics/activation.hpp"
#include "core/numerics/bf16.hpp"
#include "core/numerics/fp8.hpp"

namespace {

using tandem::bf16;

struct Description {
  cublasOperation_t left = CUBLAS_OP_N, right = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;  ///< GELU's input
  std::int64_t aux_stride = 0;
  const float *left_scale = nullptr, *right_scale = nullptr;
  std::int8_t fast = 0;

  bool is(cublasLtEpilogue_t bits) const { return (epilogue & bits) == bits; }
  bool has_aux() const { return is(CUBLASLT_EPILOGUE_GELU_AUX) || is(CUBLASLT_EPILOGUE_DGELU); }
};

struct Matrix {
  cudaDataType type;
  std::uint64_t rows, columns;
  std::int64_t stride;

  float get(const void* data, std::uint64_t r, std::uint64_t c) const {
    const std::uint64_t i = c * static_cast<std::uint64_t>(stride) + r;
    const auto code = [&] { return static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(data)[i]); };
    if (type == CUDA_R_8F_E4M3) return tandem::numerics::fp8_to_float<tandem::numerics::E4m3>(code());
    if (type == CUDA_R_8F_E5M2) return tandem::numerics::fp8_to_float<tandem::numerics::E5m2>(code());
    return type == CUDA_R_32F ? static_cast<const float*>(data)[i]
                              : tandem::numerics::bf16_to_float(static_cast<const bf16*>(data)[i]);
  }
  bool is_fp8() const { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
  void put(void* data, std::uint64_t r, std::uint64_t c, float value) const {
    const std::uint64_t i = c * static_cast<std::uint64_t>(stride) + r;
    if (type == CUDA_R_32F) {
      static_cast<float*>(data)[i] = value;
    } else {
      static_cast<bf16*>(data)[i] = tandem::numerics::round_to_bf16(value);
    }
  }
};

tandem::fake_cublaslt::Counters counted;
tandem::fake_cublaslt::Behaviour behaviour;

template <class To, class From>
To* as(From* opaque) {
  return reinterpret_cast<To*>(opaque);
}

template <class Value>
void read(Value& value, const void* from, std::size_t bytes) {
  if (bytes == sizeof value) std::memcpy(&value, from, bytes);
}

struct Sizes {
  std::uint64_t m, n, k;
  bool fit;
};

/// Rows and columns of the product, and whether everything fits.
Sizes sizes_of(const Description& d, const Matrix& a, const Matrix& b, const Matrix& c) {
  const bool ta = d.left == CUBLAS_OP_T, tb = d.right == CUBLAS_OP_T;
  const std::uint64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns;
  const std::uint64_t other_k = tb ? b.columns : b.rows, n = tb ? b.rows : b.columns;
  bool fit = k == other_k && c.rows == m && c.columns == n;
  for (const Matrix* x : {&a, &b, &c}) fit = fit && x->stride >= static_cast<std::int64_t>(x->rows);
  // Eight-bit factors: their sums over neighbours, both scaled, sizes of 16, and not both of the wider range.
  fit = fit && a.is_fp8() == b.is_fp8();
  if (a.is_fp8()) {
    fit = fit && ta && !tb && m % 16 == 0 && n % 16 == 0 && k % 16 == 0 && d.left_scale != nullptr &&
          d.right_scale != nullptr && (a.type == CUDA_R_8F_E4M3 || b.type == CUDA_R_8F_E4M3) && !d.has_aux();
  }
  if (d.has_aux()) {
    fit = fit && d.aux != nullptr && d.aux_stride % 8 == 0 && d.aux_stride >= static_cast<std::int64_t>(m);
    fit = fit && c.type == CUDA_R_16BF;
  }
  if (d.is(CUBLASLT_EPILOGUE_BIAS)) fit = fit && d.bias != nullptr && c.type == CUDA_R_16BF;
  return {m, n, k, fit};
}

}  // namespace

namespace tandem::fake_cublaslt {

Counters counters() { return counted; }
void reset(Behaviour next) {
  counted = {};
  behaviour = next;
}

}  // namespace tandem::fake_cublaslt

extern "C" {

std::size_t cublasLtGetVersion() { return 130000; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = as<std::remove_pointer_t<cublasLtHandle_t>>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete as<int>(handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
  *made = as<cublasLtMatmulDescOpaque_t>(new Description);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  delete as<Description>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t made, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  Description& d = *as<Description>(made);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) read(d.left, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) read(d.right, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE) read(d.epilogue, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER) read(d.bias, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER) read(d.aux, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD) read(d.aux_stride, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) read(d.left_scale, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) read(d.right_scale, value, bytes);
  if (attribute == CUBLASLT_MATMUL_DESC_FAST_ACCUM) read(d.fast, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, std::uint64_t rows,
                                          std::uint64_t columns, std::int64_t stride) {
  *made = as<cublasLtMatrixLayoutOpaque_t>(new Matrix{type, rows, columns, stride});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  delete as<Matrix>(made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = as<cublasLtMatmulPreferenceOpaque_t>(new int(0));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  delete as<int>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, std::size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t results[], int* count) {
  ++counted.choices;
  *count = 0;
  if (!behaviour.has_algorithms) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (behaviour.epilogue_status != 0 && as<Description>(d)->has_aux()) {
    return static_cast<cublasStatus_t>(behaviour.epilogue_status);
  }
  if (!sizes_of(*as<Description>(d), *as<Matrix>(a), *as<Matrix>(b), *as<Matrix>(c)).fit)
    return CUBLAS_STATUS_INVALID_VALUE;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void* alpha, const void* a_data,
                              cublasLtMatrixLayout_t a_layout, const void* b_data, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c_data, cublasLtMatrixLayout_t c_layout, void* d_data,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t*, void*, std::size_t,
                              cudaStream_t) {
  if (behaviour.product_status != 0) return static_cast<cublasStatus_t>(behaviour.product_status);
  const Description& d = *as<Description>(description);
  const Matrix &a = *as<Matrix>(a_layout), &b = *as<Matrix>(b_layout), &c = *as<Matrix>(c_layout);
  const Matrix& result = *as<Matrix>(d_layout);
  const Sizes s = sizes_of(d, a, b, c);
  if (!s.fit) return CUBLAS_STATUS_INVALID_VALUE;
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  for (std::uint64_t i = 0; i < s.m; ++i) {
    for (std::uint64_t j = 0; j < s.n; ++j) {
      double sum = 0.0;
      for (std::uint64_t l = 0; l < s.k; ++l) {
        const float x = d.left == CUBLAS_OP_T ? a.get(a_data, l, i) : a.get(a_data, i, l);
        const float y = d.right == CUBLAS_OP_T ? b.get(b_data, j, l) : b.get(b_data, l, j);
        sum += static_cast<double>(x) * static_cast<double>(y);
      }
      float value = scale * static_cast<float>(sum);
      if (a.is_fp8()) value = value * *d.left_scale * *d.right_scale;
      if (keep != 0.0F) value += keep * c.get(c_data, i, j);
      if (d.is(CUBLASLT_EPILOGUE_BIAS)) value += tandem::numerics::bf16_to_float(static_cast<const bf16*>(d.bias)[i]);
      const Matrix aux{CUDA_R_16BF, s.m, s.n, d.aux_stride};
      if (d.is(CUBLASLT_EPILOGUE_GELU_AUX)) {
        aux.put(d.aux, i, j, value);
        value = tandem::numerics::gelu(value);
      } else if (d.is(CUBLASLT_EPILOGUE_DGELU)) {
        value *= tandem::numerics::gelu_derivative(aux.get(d.aux, i, j));
      }
      result.put(d_data, i, j, value);
    }
  }
  ++counted.products;
  if (a.is_fp8()) ++counted.fp8;
  if (d.fast != 0) ++counted.fast;
  if (d.has_aux()) ++counted.fused;
  const auto ragged = [](const Matrix& x) { return x.rows > 8 && x.rows % 8 != 0; };
  if (ragged(a) || ragged(b) || ragged(c)) ++counted.ragged;
  return CUBLAS_STATUS_SUCCESS;
}
}
