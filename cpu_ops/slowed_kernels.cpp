#include "cpu_ops/slowed_kernels.hpp"

#include <utility>

#include "cpu_ops/pacer.hpp"

namespace tandem {
namespace {

class SlowedKernels final : public UpdateKernels {
 public:
  SlowedKernels(std::unique_ptr<UpdateKernels> inner, double rate)
      : inner_(std::move(inner)), pacer_("the emulated CPU update", rate) {}

  void adamw(const AdamPiece& piece, const AdamCoefficients& c) override {
    pacer_.run(static_cast<double>(piece.count), [&] { inner_->adamw(piece, c); });
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
  Pacer pacer_;
};

}  // namespace

std::unique_ptr<UpdateKernels> make_slowed_kernels(std::unique_ptr<UpdateKernels> inner, double parameters_per_second) {
  return std::make_unique<SlowedKernels>(std::move(inner), parameters_per_second);
}

}  // namespace tandem
