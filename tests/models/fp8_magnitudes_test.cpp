// Magnitudes of factors in a model's step: whoever writes a factor writes that of its elements too, where that spares a
// pass, and each is still true when the factor is quantized, however a run treats its activations.
#include <gtest/gtest.h>

#include <atomic>

#include "core/numerics/fp8_scale.hpp"
#include "cpu_ops/device/host_ops.hpp"
#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

/// Host operations that compare each magnitude with its tensor where it is used, in the order of the stream.
class ComparingOps final : public HostOps {
 public:
  ComparingOps(Device& device, std::shared_ptr<Parallel> parallel, UpdateKernels& kernels)
      : HostOps(std::move(parallel), kernels, after(device)), enqueue_(after(device)) {}

  void quantize(MeasuredView x, const Fp8Matrix& to, StreamView stream) override {
    ++(x.magnitude == nullptr ? found : known);
    if (x.magnitude != nullptr) enqueue_(stream, "compare", [this, x] { compare(x); });
    HostOps::quantize(x, to, stream);
  }
  void measure(MeasuredView x, StreamView stream) override {
    ++measured;
    HostOps::measure(x, stream);
  }

  int known = 0, found = 0, measured = 0;  ///< quantized by a magnitude, and without one; measured alone
  std::atomic<int> wrong = 0;

 private:
  static Enqueue after(Device& device) {
    return [&device](StreamView stream, std::string_view, std::function<void()> work) {
      device.call_after(stream, [work = std::move(work)](const std::exception_ptr& failed) {
        if (!failed) work();
      });
    };
  }
  void compare(const MeasuredView& x) {
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < x.values.count(); ++i) {
      largest = std::max(largest, x.values.dtype == DType::bf16 ? numerics::fp8_magnitude(x.values.as<bf16>()[i])
                                                                : numerics::fp8_magnitude(x.values.as<float>()[i]));
    }
    if (*static_cast<const std::uint32_t*>(x.magnitude) != largest) ++wrong;
  }
  Enqueue enqueue_;
};

/// Quantized factors of one block, in forward and backward.
struct Factors {
  int known, found, measured;
};

class Fp8Magnitudes : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{"fp8/" + GetParam()};
  RunShape shape() const {
    RunShape s = shape_of(fixture, false);
    s.fp8 = Fp8Products{};
    return s;
  }
  /// Counts of a training step; expects that every magnitude is that of its tensor, and the gradients that there are
  /// without this class.
  Factors step(const RunShape& s) {
    Rig rig(fixture, s), plain(fixture, s);
    const std::shared_ptr<Parallel> parallel = make_parallel(2);
    const auto kernels = make_host_update_kernels(parallel);
    ComparingOps ops(rig.device(), parallel, *kernels);
    rig.model().compute_with(ops);
    for (Rig* of : {&rig, &plain}) {
      of->set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
      of->train(fixture.gradient_scale());
    }
    EXPECT_EQ(rig.gradients(), plain.gradients());
    EXPECT_EQ(ops.wrong, 0) << activations_of(fixture.config(), s);
    return {ops.known, ops.found, ops.measured};
  }
};

TEST_P(Fp8Magnitudes, AreThoseOfTheFactorsHoweverActivationsAreKept) {
  for (const bool selective : {false, true}) {
    for (const std::int64_t recomputed : {std::int64_t{0}, std::int64_t{1}, fixture.config().layers}) {
      RunShape s = shape();
      s.selective = selective;
      s.recomputed_blocks = recomputed;
      EXPECT_GT(step(s).known, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Fp8Magnitudes, ::testing::Values("gpt2", "llama", "partly"),
                         [](const auto& instance) { return instance.param; });

/// A pass for the magnitude is left for weights, attention's result, and gradients that no activation's backward made.
TEST(Fp8Passes, AreOfWeightsAndOfWhatNoNormOrActivationMakes) {
  for (const auto& [name, of_block] : {std::pair{"gpt2", Factors{9, 11, 1}}, {"llama", Factors{10, 19, 1}}}) {
    Fixture fixture(std::string("fp8/") + name);
    RunShape s = shape_of(fixture, false);
    s.fp8 = Fp8Products{};
    Rig rig(fixture, s);
    const std::shared_ptr<Parallel> parallel = make_parallel(1);
    const auto kernels = make_host_update_kernels(parallel);
    ComparingOps ops(rig.device(), parallel, *kernels);
    rig.model().compute_with(ops);
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
    rig.train(fixture.gradient_scale());
    const auto layers = static_cast<int>(fixture.config().layers);
    EXPECT_EQ(ops.known, layers * of_block.known) << name;
    EXPECT_EQ(ops.found, layers * of_block.found) << name;
    EXPECT_EQ(ops.measured, layers * of_block.measured) << name;
  }
}

}  // namespace
}  // namespace tandem::testing
