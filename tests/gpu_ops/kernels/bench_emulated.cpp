// Kernels as C++ on fibers, each run where it is launched. Device memory is host memory, of exactly the size asked for.
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "gpu_ops/ops/cuda_ops.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem {

CUstream_st* native_stream(StreamView) { return nullptr; }

namespace testing {
namespace {

/// Three, or $TANDEM_SCHEDULES. One is enough for who looks for memory that is not the kernel's.
int schedules_asked_for() {
  const char* const asked = std::getenv("TANDEM_SCHEDULES");
  const int count = asked == nullptr ? 3 : std::atoi(asked);
  if (count < 1) throw std::invalid_argument("TANDEM_SCHEDULES: a number from 1 on is needed");
  return count;
}

class EmulatedBench final : public Bench {
 public:
  Ops& ops() override { return *ops_; }
  StreamView stream() override { return {}; }
  int schedules() const override { return schedules_; }
  void use_schedule(int i) override { emulation::set_schedule({.seed = static_cast<std::uint64_t>(i) + 1}); }

 private:
  MemoryBlock allocate(std::size_t bytes) override {
    constexpr std::align_val_t alignment{arena_alignment};
    void* const data = ::operator new(bytes == 0 ? 1 : bytes, alignment);
    std::memset(data, 0xFF, bytes);  // NaNs
    return {data, bytes,
            [](void* block, std::size_t) { ::operator delete (block, std::align_val_t{arena_alignment}); }};
  }
  void copy_in(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy_out(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }

  const int schedules_ = schedules_asked_for();
  std::unique_ptr<Ops> ops_ = make_cuda_ops();
};

}  // namespace

Bench& bench() {
  static EmulatedBench emulated;
  return emulated;
}

}  // namespace testing
}  // namespace tandem
