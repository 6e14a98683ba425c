#pragma once
// Tensors of random numbers, comparison with a reference, and runs on several thread counts. Loops over elements are in
// op_testing.cpp, which is optimised in every tree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/tensor/tensor.hpp"
#include "cpu_ops/kernels/scratch.hpp"
#include "cpu_ops/threads/parallel.hpp"

namespace tandem::testing {

/// Owner of a tensor's memory. The end is guarded: `intact` says that nothing wrote behind it.
class Tensor {
 public:
  Tensor(DType dtype, Shape shape) : dtype_(dtype), shape_(shape), bytes_(size() + guard, guard_byte) {
    std::fill_n(bytes_.begin(), size(), std::uint8_t{0});
  }

  TensorView view() const { return {const_cast<std::uint8_t*>(bytes_.data()), dtype_, shape_}; }
  operator TensorView() const { return view(); }  // NOLINT: a view of it is meant

  double get(std::int64_t i) const {
    if (dtype_ == DType::bf16) return static_cast<double>(numerics::bf16_to_float(view().as<bf16>()[i]));
    return static_cast<double>(view().as<float>()[i]);
  }
  void set(std::int64_t i, float value) {
    if (dtype_ == DType::bf16) {
      view().as<bf16>()[i] = numerics::round_to_bf16(value);
    } else {
      view().as<float>()[i] = value;
    }
  }
  std::int64_t count() const { return shape_.count(); }
  DType dtype() const { return dtype_; }
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }
  bool intact() const {
    return std::all_of(bytes_.begin() + static_cast<std::ptrdiff_t>(size()), bytes_.end(),
                       [](std::uint8_t b) { return b == guard_byte; });
  }

 private:
  static constexpr std::size_t guard = 64;
  static constexpr std::uint8_t guard_byte = 0xA5;
  std::size_t size() const { return static_cast<std::size_t>(shape_.count()) * size_of(dtype_); }
  DType dtype_;
  Shape shape_;
  std::vector<std::uint8_t> bytes_;
};

/// Values rounded to bf16.
Tensor rounded(const Tensor& sums);

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float normal(float deviation = 1.0F);
  std::int32_t below(std::int32_t n) { return std::uniform_int_distribution<std::int32_t>(0, n - 1)(engine_); }
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }

  Tensor tensor(DType dtype, Shape shape, float deviation = 1.0F);
  Tensor tokens(Shape shape, std::int32_t vocabulary) {
    Tensor t(DType::i32, shape);
    for (std::int64_t i = 0; i < t.count(); ++i) t.view().as<std::int32_t>()[i] = below(vocabulary);
    return t;
  }

 private:
  std::mt19937_64 engine_;
};

/// Aligned memory to lend as workspace, exactly as large as asked for.
class LentWorkspace {
 public:
  explicit LentWorkspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + arena_alignment) {}
  fast::Workspace get() {
    void* at = memory_.data();
    std::size_t space = memory_.size();
    return {static_cast<std::byte*>(std::align(arena_alignment, bytes_, at, space)), bytes_};
  }

 private:
  std::size_t bytes_;
  std::vector<std::byte> memory_;
};

/// Largest difference relative to the largest magnitude of `expected`.
double relative_error(const Tensor& actual, const Tensor& expected);

/// Largest relative error of fp32 sums of a few hundred terms, or of one rounding to bf16.
inline double tolerance(DType dtype) { return dtype == DType::f32 ? 4e-6 : 6e-3; }

#define EXPECT_CLOSE(actual, expected)                                                                               \
  do {                                                                                                               \
    EXPECT_LE(::tandem::testing::relative_error(actual, expected), ::tandem::testing::tolerance((expected).dtype())) \
        << #actual;                                                                                                  \
    EXPECT_TRUE((actual).intact()) << #actual;                                                                       \
  } while (false)

#define EXPECT_SAME_BITS(actual, expected) EXPECT_EQ((actual).bytes(), (expected).bytes()) << #actual

/// Thread counts that every kernel is run with; results must not differ in a bit.
inline const std::vector<std::shared_ptr<Parallel>>& arenas() {
  static const std::vector<std::shared_ptr<Parallel>> all{make_parallel(1), make_parallel(2), make_parallel(5)};
  return all;
}

inline std::string dtype_name(const ::testing::TestParamInfo<DType>& info) { return std::string(name_of(info.param)); }

}  // namespace tandem::testing
