// Kernels as C++ on fibers, each run where it is launched. Device memory is host memory, of exactly the size asked for.
#include <cstdlib>
#include <cstring>
#include <new>

#include "gpu_ops/cuda_ops.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "gpu_ops/native_stream.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem {

CUstream_st* native_stream(StreamView) { return nullptr; }

namespace testing {
namespace {

class EmulatedBench final : public Bench {
 public:
  Ops& ops() override { return *ops_; }
  StreamView stream() override { return {}; }
  int schedules() const override { return 3; }
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

  std::unique_ptr<Ops> ops_ = make_cuda_ops();
};

}  // namespace

Bench& bench() {
  static EmulatedBench emulated;
  return emulated;
}

}  // namespace testing
}  // namespace tandem
