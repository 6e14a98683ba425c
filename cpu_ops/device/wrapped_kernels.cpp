#include "cpu_ops/device/wrapped_kernels.hpp"

#include <utility>

namespace tandem {
namespace {

class WrappedKernels final : public UpdateKernels {
 public:
  WrappedKernels(std::unique_ptr<UpdateKernels> inner, AroundUpdate around)
      : inner_(std::move(inner)), around_(std::move(around)) {}

  void adamw(const AdamPiece& piece, const AdamCoefficients& c, int most_threads) override {
    around_(piece.count, [&] { inner_->adamw(piece, c, most_threads); });
  }
  std::int64_t speculate(const AdamPiece& piece, const AdamCoefficients& c, const UndoPiece& undo,
                         int most_threads) override {
    std::int64_t updated = 0;
    around_(piece.count, [&] { updated = inner_->speculate(piece, c, undo, most_threads); });
    return updated;
  }
  void settle(const AdamPiece& piece, const AdamCoefficients& speculated, const AdamCoefficients& actual,
              Settling settling, const UndoPiece& undo, int most_threads) override {
    const std::int64_t recorded = recorded_elements(undo, piece.format, piece.count);
    const std::int64_t worked_on = settling == Settling::redo      ? piece.count
                                   : settling == Settling::retract ? recorded
                                                                   : piece.count - recorded;
    around_(worked_on, [&] { inner_->settle(piece, speculated, actual, settling, undo, most_threads); });
  }
  void weights_of_master(const float* master, bf16* weight, std::int64_t count) override {
    inner_->weights_of_master(master, weight, count);
  }
  void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count) override {
    inner_->accumulate(sum, gradient, first, count);
  }
  void accumulate(float* sum, const float* gradient, bool first, std::int64_t count) override {
    inner_->accumulate(sum, gradient, first, count);
  }
  void round(const float* sum, bf16* gradient, std::int64_t count) override { inner_->round(sum, gradient, count); }
  void norm_blocks(const bf16* gradient, std::int64_t count, double* partial) override {
    inner_->norm_blocks(gradient, count, partial);
  }
  void norm_blocks(const float* gradient, std::int64_t count, double* partial) override {
    inner_->norm_blocks(gradient, count, partial);
  }
  int fp8_codes(const bf16* weight, std::int64_t count, int exponent, std::uint8_t* codes, int most_threads) override {
    return inner_->fp8_codes(weight, count, exponent, codes, most_threads);
  }
  Parallel& parallel() noexcept override { return inner_->parallel(); }

 private:
  std::unique_ptr<UpdateKernels> inner_;
  AroundUpdate around_;
};

}  // namespace

std::unique_ptr<UpdateKernels> make_wrapped_kernels(std::unique_ptr<UpdateKernels> inner, AroundUpdate around) {
  return std::make_unique<WrappedKernels>(std::move(inner), std::move(around));
}

}  // namespace tandem
