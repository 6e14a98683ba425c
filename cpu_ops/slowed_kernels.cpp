#include "cpu_ops/slowed_kernels.hpp"

#include <chrono>
#include <thread>
#include <utility>

namespace tandem {
namespace {

class SlowedKernels final : public UpdateKernels {
 public:
  SlowedKernels(std::unique_ptr<UpdateKernels> inner, double rate) : inner_(std::move(inner)), rate_(rate) {}

  void adamw(const AdamPiece& piece, const AdamCoefficients& c) override {
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::nanoseconds>(
                         std::chrono::duration<double>(static_cast<double>(piece.count) / rate_));
    inner_->adamw(piece, c);
    std::this_thread::sleep_until(end);
  }
  void weights_of_master(const float* master, bf16* weight, std::int64_t count) override {
    inner_->weights_of_master(master, weight, count);
  }
  void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count) override {
    inner_->accumulate(sum, gradient, first, count);
  }
  void round(const float* sum, bf16* gradient, std::int64_t count) override { inner_->round(sum, gradient, count); }
  void norm_blocks(const bf16* gradient, std::int64_t count, double* partial) override {
    inner_->norm_blocks(gradient, count, partial);
  }
  int threads() const noexcept override { return inner_->threads(); }

 private:
  std::unique_ptr<UpdateKernels> inner_;
  double rate_;
};

}  // namespace

std::unique_ptr<UpdateKernels> make_slowed_kernels(std::unique_ptr<UpdateKernels> inner, double parameters_per_second) {
  return std::make_unique<SlowedKernels>(std::move(inner), parameters_per_second);
}

}  // namespace tandem
