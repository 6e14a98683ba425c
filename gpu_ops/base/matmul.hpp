#pragma once
// Matrix products. Two implementations: cuBLASLt's (matmul_cublaslt.cpp), and a plain kernel
// (kernels/matmul.cu) that is the reference, serves the emulated build, and takes what the library does not.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/device/device.hpp"
#include "core/numerics/bf16.hpp"
#include "core/ops/ops.hpp"
#include "core/tensor/dtype.hpp"

struct CUstream_st;

namespace tandem::gpu {

/// A row-major matrix whose rows are `stride` elements apart; where `transposed`, the operand is the transpose of
/// what is stored.
struct Factor {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  std::int64_t stride = 0;
  bool transposed = false;
};

/// Function applied to a b + bias before it is rounded and stored.
enum class Epilogue : std::uint8_t {
  none,
  gelu,           ///< c = gelu(a b + bias), `input` = a b + bias
  gelu_gradient,  ///< c = (a b) gelu'(input)
};

/// c (m, n) = a (m, k) b (k, n) + bias + addend, rounded once. Sums are fp32.
/// Types a, b -> c: bf16, bf16 -> bf16 or f32; f32, bf16 -> f32; f32, f32 -> f32 or bf16.
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  Factor a, b;
  const bf16* bias = nullptr;    ///< (n), added to every row; null for none
  const void* addend = nullptr;  ///< (m, n), dtype and stride of c, which it may be; null for none
  void* c = nullptr;             ///< (m, n) row-major
  DType c_dtype = DType::bf16;
  std::int64_t c_stride = 0;           ///< elements from one row of c to the next
  Epilogue epilogue = Epilogue::none;  ///< others without addend, and only where fuses() says so
  void* input = nullptr;               ///< (m, n), dtype and stride of c: input of GELU
};

/// A row-major matrix of codes of eight-bit floating point, whose rows are dense.
struct Fp8Factor {
  const std::uint8_t* codes = nullptr;
  const float* scale = nullptr;  ///< one number on the device, by which all are multiplied
  Fp8Format format = Fp8Format::e4m3;
};

/// c (m, n) = a b^T + bias + addend, rounded once, with a (m, k) and b (n, k): what is summed are neighbours in both, as
/// tensor cores take them. One of the formats is e4m3; m, n and k are multiples of fp8_multiple.
struct Fp8Product {
  std::int64_t m = 0, n = 0, k = 0;
  Fp8Factor a, b;
  Fp8Accumulation sums = Fp8Accumulation::full;
  const bf16* bias = nullptr;    ///< (n), added to every row; null for none
  const void* addend = nullptr;  ///< (m, n) of c's type, which it may be; null for none
  void* c = nullptr;             ///< (m, n) row-major, dense, bf16 or f32
  DType c_dtype = DType::bf16;
};

class Matmul {
 public:
  virtual ~Matmul() = default;
  /// Device memory that every call may use as scratch: the same for every shape.
  virtual std::size_t workspace_bytes() const noexcept = 0;
  /// Whether run() takes the product's epilogue: a function of the card, types, sizes, strides and alignments.
  virtual bool fuses(const Product&) { return false; }
  /// Whether there may be a product of which it does.
  virtual bool fuses_any() const noexcept { return false; }
  /// Asynchronous on `stream`. `workspace` (device, `workspace_bytes()`) is used until the stream has passed
  /// the call. The same bits for the same shapes and operands. Throws DeviceError; MisuseError for types
  /// other than above.
  virtual void run(const Product& product, void* workspace, CUstream_st* stream) = 0;
  /// Whether the card multiplies eight-bit factors.
  virtual bool has_fp8() const noexcept { return true; }
  /// Queues a product of eight-bit factors; throws DeviceError without has_fp8().
  virtual void run(const Fp8Product& product, void* workspace, CUstream_st* stream) = 0;
};

/// The implementation of this build, for a card of `compute_capability` (90 is 9.0). cuBLASLt's throws DeviceError
/// where the library is not found. Products of bf16 for which it offers no algorithm run in the plain kernel; `slower`,
/// which may be empty, is told once, by the first.
std::unique_ptr<Matmul> make_matmul(int compute_capability, Notice slower = {});
/// "cublaslt 130100", "plain": what of it enters the compute key. Same exceptions.
std::string matmul_key();

/// The plain kernel. Asynchronous, no workspace. Throws as Matmul::run.
void plain_matmul(const Product& product, CUstream_st* stream);
void plain_matmul(const Fp8Product& product, CUstream_st* stream);

}  // namespace tandem::gpu
