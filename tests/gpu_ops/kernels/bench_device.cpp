// A CUDA device as it is used: memory allocated on it, copies on a stream of its own. Runs every test twice, which must
// give the same bits.
#include "tests/gpu_ops/device/device_testing.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

class DeviceBench final : public Bench {
 public:
  DeviceBench() : device_(open_test_device(std::size_t{1} << 30)) {
    if (device_) stream_ = device_->make_stream("test");
  }
  std::string why_not() const override { return device_ ? "" : probe_cuda().why_none; }
  Ops& ops() override { return device_->ops(); }
  StreamView stream() override { return stream_; }
  int schedules() const override { return 2; }
  void use_schedule(int) override {}

 private:
  MemoryBlock allocate(std::size_t bytes) override { return device_->allocate(bytes, "operand"); }
  void copy_in(void* to, const void* from, std::size_t bytes) override {
    device_->copy(to, from, bytes, CopyKind::host_to_device, stream_);
    device_->synchronize(stream_);
  }
  void copy_out(void* to, const void* from, std::size_t bytes) override {
    device_->copy(to, from, bytes, CopyKind::device_to_host, stream_);
    device_->synchronize(stream_);
  }

  std::unique_ptr<CudaDevice> device_;
  Stream stream_;
};

}  // namespace

Bench& bench() {
  // Never destroyed: libraries that it has loaded may be gone by then.
  static DeviceBench& on_device = *new DeviceBench;
  return on_device;
}

}  // namespace tandem::testing
