// Matrix products by cuBLASLt, found when the first is asked for. The library is loaded and not linked, so that the
// program starts where it is missing; its header gives the types.
#include <cublasLt.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <compare>
#include <map>
#include <memory>
#include <mutex>

#include "core/base/error.hpp"
#include "gpu_ops/base/matmul.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/device/runtime.hpp"
#include "gpu_ops/device/shared_library.hpp"
#include "gpu_ops/ops/matmul_parts.hpp"

namespace tandem::gpu {
namespace {

/// Compute capability from which cards multiply eight-bit factors.
constexpr int least_fp8_capability = 89;

/// Bytes of workspace that NVIDIA recommends for its largest cards. One size for all cards, as the heuristic's choice
/// of an algorithm depends on it.
constexpr std::size_t workspace_size = cublaslt_workspace;

/// The functions of the library, by their own types.
struct Library {
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;
};

template <class Function>
void take(const SharedLibrary& library, const char* name, Function*& function) {
  function = library.function<Function>(name);
  if (function == nullptr) {
    throw DeviceError("cuBLASLt cannot be used", fmt::format("{} has no {}", library.file(), name),
                      "install the version of this program's CUDA toolkit");
  }
}

Library load() {
  const std::string name = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
  const auto found = SharedLibrary::find({name});
  if (!found) {
    throw DeviceError("cuBLASLt is missing", name + " is neither in the system nor in Python's packages",
                      "install it, or name its folder in TANDEM_CUDA_LIBS");
  }
  Library library{};
  take(*found, "cublasLtGetVersion", library.version);
  take(*found, "cublasLtCreate", library.create);
  take(*found, "cublasLtDestroy", library.destroy);
  take(*found, "cublasLtMatmulDescCreate", library.desc_create);
  take(*found, "cublasLtMatmulDescDestroy", library.desc_destroy);
  take(*found, "cublasLtMatmulDescSetAttribute", library.desc_set);
  take(*found, "cublasLtMatrixLayoutCreate", library.layout_create);
  take(*found, "cublasLtMatrixLayoutDestroy", library.layout_destroy);
  take(*found, "cublasLtMatmulPreferenceCreate", library.preference_create);
  take(*found, "cublasLtMatmulPreferenceDestroy", library.preference_destroy);
  take(*found, "cublasLtMatmulPreferenceSetAttribute", library.preference_set);
  take(*found, "cublasLtMatmulAlgoGetHeuristic", library.heuristic);
  take(*found, "cublasLtMatmul", library.matmul);
  return library;
}

/// Loaded once; another try where it failed.
const Library& library() {
  static const Library loaded = load();
  return loaded;
}

void require(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw DeviceError(fmt::format("matrix product: cuBLASLt failed to {}", what),
                      fmt::format("status {}", static_cast<int>(status)));
  }
}

template <class T>
using Owned = std::unique_ptr<T, cublasStatus_t (*)(T*)>;
using Handle = Owned<std::remove_pointer_t<cublasLtHandle_t>>;
using Descriptor = Owned<cublasLtMatmulDescOpaque_t>;
using Layout = Owned<cublasLtMatrixLayoutOpaque_t>;
using Preference = Owned<cublasLtMatmulPreferenceOpaque_t>;

/// Alignment in bytes of a, b, c, bias, addend, input; 0 for null.
using Alignments = std::array<std::uint32_t, 6>;

/// Key of cached algorithms: everything that the choice depends on.
struct Key {
  std::int64_t m, n, k, a_stride, b_stride, c_stride;
  bool a_transposed, b_transposed, wide_c;
  Epilogue epilogue;
  Alignments alignment;
  auto operator<=>(const Key&) const = default;
};

std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address);
  if (bits == 0) return 0;
  return static_cast<std::uint32_t>(std::min<std::uintptr_t>(16, bits & (~bits + 1)));
}

Key key_of(const Product& p) {
  return {p.m,
          p.n,
          p.k,
          p.a.stride,
          p.b.stride,
          p.c_stride,
          p.a.transposed,
          p.b.transposed,
          p.c_dtype == DType::f32,
          p.epilogue,
          {alignment_of(p.a.data), alignment_of(p.b.data), alignment_of(p.c), alignment_of(p.bias),
           alignment_of(p.addend), alignment_of(p.input)}};
}

/// Key of cached algorithms of products of eight-bit factors, whose codes lie at whole packets.
struct Fp8Key {
  std::int64_t m, n, k;
  Fp8Format a, b;
  Fp8Accumulation sums;
  bool wide_c;
  Alignments alignment;
  auto operator<=>(const Fp8Key&) const = default;
};

Fp8Key key_of(const Fp8Product& p) {
  return {p.m,
          p.n,
          p.k,
          p.a.format,
          p.b.format,
          p.sums,
          p.c_dtype == DType::f32,
          {alignment_of(p.a.codes), alignment_of(p.b.codes), alignment_of(p.c), alignment_of(p.bias),
           alignment_of(p.addend), 0}};
}

/// A product as the library wants it. It counts columns first: row-major c = a b is its c' = b' a', so that b is the
/// left factor, and the bias runs along the rows of c'.
struct Prepared {
  Descriptor descriptor;
  Layout left, right, result;
  cublasLtMatmulAlgo_t algorithm;
  bool found;  ///< whether the library has an algorithm at all
};

template <class T>
void set(const Descriptor& descriptor, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  // NOLINTNEXTLINE(bugprone-sizeof-expression): a pointer is a value too
  require(library().desc_set(descriptor.get(), attribute, &value, sizeof value), "describe a product");
}

template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  require(library().preference_set(preference.get(), attribute, &value, sizeof value), "describe a preference");
}

Layout layout(cudaDataType type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  cublasLtMatrixLayout_t made = nullptr;
  require(library().layout_create(&made, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns),
                                  stride),
          "describe a matrix");
  return {made, library().layout_destroy};
}
Layout layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
  return layout(dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF, rows, columns, stride);
}
Layout layout(Fp8Format format, std::int64_t rows, std::int64_t columns) {
  return layout(format == Fp8Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2, rows, columns, rows);
}

/// A factor as it is stored, seen with columns first: (k, n) row-major is (n, k).
Layout layout(const Factor& factor, std::int64_t rows, std::int64_t columns) {
  return factor.transposed ? layout(factor.dtype, rows, columns, factor.stride)
                           : layout(factor.dtype, columns, rows, factor.stride);
}

cublasLtEpilogue_t epilogue_of(const Product& p) {
  switch (p.epilogue) {
    case Epilogue::gelu:
      return p.bias != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::gelu_gradient:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::none:
      break;
  }
  return p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

Descriptor new_descriptor() {
  cublasLtMatmulDesc_t made = nullptr;
  require(library().desc_create(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe a product");
  return {made, library().desc_destroy};
}

Descriptor describe(const Product& p) {
  Descriptor descriptor = new_descriptor();
  const auto operation = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  set(descriptor, CUBLASLT_MATMUL_DESC_TRANSA, operation(p.b.transposed));
  set(descriptor, CUBLASLT_MATMUL_DESC_TRANSB, operation(p.a.transposed));
  set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
  if (p.bias != nullptr) set(descriptor, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
  if (p.input != nullptr) set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.c_stride);
  return descriptor;
}

Descriptor describe(const Fp8Product& p) {
  Descriptor descriptor = new_descriptor();
  set(descriptor, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(descriptor, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(descriptor, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(p.sums == Fp8Accumulation::fast ? 1 : 0));
  set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE,
      p.bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
  if (p.bias != nullptr) set(descriptor, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
  return descriptor;
}

void point_at_operands(const Descriptor& descriptor, const Fp8Product& p) {
  set(descriptor, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b.scale);
  set(descriptor, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a.scale);
  if (p.bias != nullptr) set(descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
}

/// Vectors and matrices of the epilogue. The heuristic, too, looks at where they lie.
void point_at_operands(const Descriptor& descriptor, const Product& p) {
  if (p.bias != nullptr) set(descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.input != nullptr) set(descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.input);
}

/// Whether the library's kernels for a card gain by an epilogue: on the large cards of Hopper and Blackwell. Elsewhere
/// it is offered, too, and slower than a kernel of its own (docs/design/0010).
bool gains_by_epilogues(int compute_capability) {
  const int major = compute_capability / 10;
  return major == 9 || major == 10;
}

/// Asks the library's heuristic: never a measurement, so that the choice is a function of the key. What it says.
cublasStatus_t choose(cublasLtHandle_t handle, const Alignments& alignment, Prepared& prepared) {
  cublasLtMatmulPreference_t made = nullptr;
  require(library().preference_create(&made), "describe a preference");
  const Preference preference(made, library().preference_destroy);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_size);
  // Split sums are added in fp32 and in order.
  const std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment[1]);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment[0]);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment[alignment[4] != 0 ? 4 : 2]);
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment[2]);
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  const cublasStatus_t status =
      library().heuristic(handle, prepared.descriptor.get(), prepared.left.get(), prepared.right.get(),
                          prepared.result.get(), prepared.result.get(), preference.get(), 1, &result, &count);
  prepared.found = status == CUBLAS_STATUS_SUCCESS && count == 1 && result.state == CUBLAS_STATUS_SUCCESS;
  prepared.algorithm = result.algo;
  return status;
}

class CublasLtMatmul final : public Matmul {
 public:
  CublasLtMatmul(int compute_capability, Notice slower)
      : handle_(nullptr, library().destroy),
        epilogues_(gains_by_epilogues(compute_capability)),
        fp8_(compute_capability >= least_fp8_capability),
        slower_(std::move(slower)) {
    cublasLtHandle_t made = nullptr;
    require(library().create(&made), "start");
    handle_.reset(made);
  }

  std::size_t workspace_bytes() const noexcept override { return workspace_size; }

  bool fuses_any() const noexcept override { return epilogues_; }
  bool fuses(const Product& p) override {
    if (!epilogues_ || p.m == 0 || p.n == 0 || !takes(p)) return false;
    const std::lock_guard lock(mutex_);
    return prepared_for(p).found;
  }

  void run(const Product& p, void* workspace, CUstream_st* stream) override {
    if (p.m == 0 || p.n == 0) return;
    if (!takes(p)) return plain_matmul(p, stream);
    if (const auto parts = parts_of(p)) {
      run(parts->first, workspace, stream);
      return run(parts->second, workspace, stream);
    }
    const std::lock_guard lock(mutex_);
    Prepared& prepared = prepared_for(p);
    if (!prepared.found) return run_plain(p, stream);
    point_at_operands(prepared.descriptor, p);
    multiply(prepared, {p.a.data, p.b.data, p.addend, p.c}, workspace, stream);
  }

  bool has_fp8() const noexcept override { return fp8_; }
  void run(const Fp8Product& p, void* workspace, CUstream_st* stream) override {
    if (!fp8_) throw DeviceError("a product of eight-bit factors", "this card has none", "--compute bf16");
    if (p.c_dtype == DType::f32 && p.bias != nullptr) return plain_matmul(p, stream);
    const std::lock_guard lock(mutex_);
    Prepared& prepared = prepared_for(p);
    if (!prepared.found) {
      tell_of_plain(p.m, p.n, p.k);
      return plain_matmul(p, stream);
    }
    point_at_operands(prepared.descriptor, p);
    multiply(prepared, {p.a.codes, p.b.codes, p.addend, p.c}, workspace, stream);
  }

 private:
  /// bf16 factors; bias and epilogue only where the result is bf16 as it is, and GELU's input only in whole packets.
  /// The rest is the plain kernel's.
  static bool takes(const Product& p) {
    if (p.a.dtype != DType::bf16 || p.b.dtype != DType::bf16 || p.k == 0) return false;
    if (p.epilogue != Epilogue::none && (p.addend != nullptr || p.c_stride % 8 != 0 || alignment_of(p.input) < 16))
      return false;
    const bool wide = p.c_dtype == DType::f32 && p.bias == nullptr && p.epilogue == Epilogue::none;
    return wide || p.c_dtype == DType::bf16;
  }

  struct Operands {
    const void *a, *b, *addend;
    void* c;
  };
  void multiply(const Prepared& prepared, const Operands& of, void* workspace, CUstream_st* stream) {
    const float alpha = 1.0F, beta = of.addend != nullptr ? 1.0F : 0.0F;
    const void* const addend = of.addend != nullptr ? of.addend : of.c;
    const cublasStatus_t status =
        library().matmul(handle_.get(), prepared.descriptor.get(), &alpha, of.b, prepared.left.get(), of.a,
                         prepared.right.get(), &beta, addend, prepared.result.get(), of.c, prepared.result.get(),
                         &prepared.algorithm, workspace, workspace_size, stream);
    if (status != CUBLAS_STATUS_SUCCESS) runtime::require_alive(stream, "launching a matrix product");
    require(status, "multiply");
  }

  void run_plain(const Product& p, CUstream_st* stream) {
    tell_of_plain(p.m, p.n, p.k);
    plain_matmul(p, stream);
  }
  void tell_of_plain(std::int64_t m, std::int64_t n, std::int64_t k) {
    if (const Notice tell = std::exchange(slower_, {})) {
      tell(
          fmt::format("a matrix product ({} x {} of {} products) runs in a plain kernel, which is slower: cuBLASLt {} "
                      "offers no algorithm for it",
                      m, n, k, library().version()));
    }
  }

  Prepared& prepared_for(const Fp8Product& p) {
    const Fp8Key key = key_of(p);
    const auto known = prepared_fp8_.find(key);
    if (known != prepared_fp8_.end()) return known->second;
    Prepared prepared{.descriptor = describe(p),
                      .left = layout(p.b.format, p.k, p.n),
                      .right = layout(p.a.format, p.k, p.m),
                      .result = layout(p.c_dtype, p.n, p.m, p.n),
                      .algorithm = {},
                      .found = false};
    point_at_operands(prepared.descriptor, p);
    const cublasStatus_t status = choose(handle_.get(), key.alignment, prepared);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) require(status, "choose an algorithm");
    return prepared_fp8_.emplace(key, std::move(prepared)).first->second;
  }

  Prepared& prepared_for(const Product& p) {
    const Key key = key_of(p);
    const auto known = prepared_.find(key);
    if (known != prepared_.end()) return known->second;
    Prepared prepared{.descriptor = describe(p),
                      .left = layout(p.b, p.k, p.n),
                      .right = layout(p.a, p.m, p.k),
                      .result = layout(p.c_dtype, p.n, p.m, p.c_stride),
                      .algorithm = {},
                      .found = false};
    point_at_operands(prepared.descriptor, p);
    const cublasStatus_t status = choose(handle_.get(), key.alignment, prepared);
    if (status == CUBLAS_STATUS_INVALID_VALUE && p.epilogue != Epilogue::none) {
      // Some versions refuse an epilogue in this way. Arguments that are wrong without it, too, are wrong.
      Product bare = p;
      bare.epilogue = Epilogue::none;
      bare.input = nullptr;
      static_cast<void>(prepared_for(bare));
    } else if (status != CUBLAS_STATUS_NOT_SUPPORTED) {
      require(status, "choose an algorithm");
    }
    return prepared_.emplace(key, std::move(prepared)).first->second;
  }

  Handle handle_;
  bool epilogues_, fp8_;
  Notice slower_;
  std::mutex mutex_;  ///< guards the cache, and the descriptor that a call points at its bias
  std::map<Key, Prepared> prepared_;
  std::map<Fp8Key, Prepared> prepared_fp8_;
};

}  // namespace

std::unique_ptr<Matmul> make_matmul(int compute_capability, Notice slower) {
  return std::make_unique<CublasLtMatmul>(compute_capability, std::move(slower));
}

std::string matmul_key() { return fmt::format("cublaslt {}", library().version()); }

}  // namespace tandem::gpu
