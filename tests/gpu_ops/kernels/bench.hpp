#pragma once
// The device that a test of operations runs on: kernels under emulation (bench_emulated.cpp), or a GPU
// (bench_device.cpp). The tests are the same.
#include <memory>
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "core/ops/ops.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

/// A tensor on the device. Behind its end lie bytes that nothing may write.
class Operand {
 public:
  Operand(MemoryBlock block, std::size_t offset, DType dtype, Shape shape)
      : block_(std::move(block)), offset_(offset), dtype_(dtype), shape_(shape) {}
  TensorView view() const { return {static_cast<std::byte*>(block_.data()) + offset_, dtype_, shape_}; }
  operator TensorView() const { return view(); }  // NOLINT: a view of it is meant
  template <class T>
  T* as() const {
    return view().as<T>();
  }
  const MemoryBlock& block() const { return block_; }
  std::size_t offset() const { return offset_; }
  HeadsView heads(std::int64_t row_stride, std::int64_t first = 0) const {
    return {static_cast<std::byte*>(view().data) + static_cast<std::size_t>(first) * size_of(dtype_), dtype_,
            row_stride};
  }

 private:
  MemoryBlock block_;
  std::size_t offset_;
  DType dtype_;
  Shape shape_;
};

class Bench {
 public:
  virtual ~Bench() = default;
  /// "" where it can be used, else why not.
  virtual std::string why_not() const { return ""; }
  virtual Ops& ops() = 0;
  virtual StreamView stream() = 0;
  /// Ways to run the same work in which what the device leaves open differs.
  virtual int schedules() const = 0;
  virtual void use_schedule(int i) = 0;

  /// A copy of `tensor` and its guard, `offset` bytes behind an aligned address.
  Operand put(const Tensor& tensor, std::size_t offset = 0);
  /// Waits for the stream.
  Tensor get(const Operand& operand);
  /// Lends the operations the workspace that they ask for, exactly.
  void lend(const WorkspaceNeeds& needs);

 private:
  virtual MemoryBlock allocate(std::size_t bytes) = 0;
  virtual void copy_in(void* to, const void* from, std::size_t bytes) = 0;
  virtual void copy_out(void* to, const void* from, std::size_t bytes) = 0;
  MemoryBlock workspace_;
};

/// The one of this program.
Bench& bench();

/// Runs `body`, which returns tensors, under every schedule; all must give the same bits. The first results.
template <class Body>
std::vector<Tensor> under_all_schedules(const Body& body) {
  std::vector<Tensor> first;
  for (int i = 0; i < bench().schedules(); ++i) {
    bench().use_schedule(i);
    std::vector<Tensor> results = body();
    for (std::size_t r = 0; r < first.size(); ++r)
      EXPECT_SAME_BITS(results[r], first[r]) << " result " << r << ", schedule " << i;
    if (first.empty()) first = std::move(results);
  }
  return first;
}

/// Bytes behind an aligned address at which every test of a kernel with 16-byte accesses runs.
inline const std::vector<std::size_t>& offsets(DType dtype) {
  static const std::vector<std::size_t> words{0, 4, 8}, halves{0, 2, 8};
  return dtype == DType::bf16 ? halves : words;
}

// -- tolerances ----------------------------------------------------------------------------------------------------

/// Largest difference between a result and the reference, relative to the reference's largest element.
struct Tolerance {
  DType compute;      ///< type of the activations
  DType result;       ///< type of the result
  bool through_bf16;  ///< whether it is a sum over intermediate values that are rounded to bf16
  double largest;
};
/// fp32 sums of a few hundred terms. A result of bf16 is compared with a rounded one, and sums that differ in their
/// last bits may round to neighbours: these are 2^-8 to 2^-7 of the largest apart where that stands at the end or the
/// beginning of its binade. Where terms of the sums are rounded too, as the probabilities of attention, some lie one
/// further.
constexpr Tolerance tolerances[] = {{DType::f32, DType::f32, false, 4e-6},  {DType::f32, DType::bf16, false, 8e-3},
                                    {DType::bf16, DType::f32, false, 4e-6}, {DType::bf16, DType::bf16, false, 8e-3},
                                    {DType::bf16, DType::f32, true, 3e-3},  {DType::bf16, DType::bf16, true, 1.6e-2}};

inline double tolerance(DType compute, DType result, bool through_bf16) {
  for (const Tolerance& t : tolerances) {
    if (t.compute == compute && t.result == result && t.through_bf16 == (through_bf16 && compute == DType::bf16)) {
      return t.largest;
    }
  }
  throw MisuseError("no tolerance for these types");
}

#define EXPECT_WITHIN(actual, expected, compute, through_bf16)                         \
  do {                                                                                 \
    EXPECT_LE(::tandem::testing::relative_error(actual, expected),                     \
              ::tandem::testing::tolerance(compute, (expected).dtype(), through_bf16)) \
        << #actual;                                                                    \
    EXPECT_TRUE((actual).intact()) << #actual;                                         \
  } while (false)

/// A test of operations for each type of activations; skipped where the device is not there.
class OpsTest : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  }
  Ops& ops() { return bench().ops(); }
  StreamView stream() { return bench().stream(); }
  DType dtype() const { return GetParam(); }
};

}  // namespace tandem::testing
