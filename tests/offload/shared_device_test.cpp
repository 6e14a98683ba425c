// Engines that share a device know nothing of each other: each trains as it does alone.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyDevice;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

/// Device of all trainers that are made while the object lives.
class SharedDevice {
 public:
  explicit SharedDevice(const HostDeviceOptions& options) : device_(testing::make_toy_device(options)) {
    lent = device_.get();
  }
  ~SharedDevice() { lent = nullptr; }
  SharedDevice(const SharedDevice&) = delete;
  SharedDevice& operator=(const SharedDevice&) = delete;

  static std::unique_ptr<ToyDevice> borrow(const HostDeviceOptions&) { return std::make_unique<Borrowed>(*lent); }
  Device& device() { return device_->device(); }

 private:
  class Borrowed final : public ToyDevice {
   public:
    explicit Borrowed(ToyDevice& from) : from_(from) {}
    Device& device() override { return from_.device(); }
    void enqueue(StreamView stream, std::string_view name, TensorView weights, TensorView gradients,
                 testing::ToyWork work) override {
      from_.enqueue(stream, name, weights, gradients, std::move(work));
    }

   private:
    ToyDevice& from_;
  };

  std::unique_ptr<ToyDevice> device_;
  inline static ToyDevice* lent = nullptr;
};

/// Two that differ in all that an engine holds.
std::pair<ToyOptions, ToyOptions> two(const std::string& first_policy, const std::string& second_policy) {
  ToyOptions first = toy(first_policy), second = toy(second_policy);
  first.offload.subgroup_size = 2048;
  second.seed = 8;
  second.lr = 3e-3;
  second.width = 5003;
  second.layers = 3;
  second.max_grad_norm = 0.3;
  second.offload.state = StateFormat::bf16_moments;
  second.offload.seed = 11;
  return {first, second};
}

/// Trains both on one device, taking their steps as `take_steps` says, and compares with each alone.
template <class TakeSteps>
void expect_as_alone(const ToyOptions& a, const ToyOptions& b, TakeSteps take_steps) {
  ToyResult of_a, of_b;
  {
    SharedDevice shared(a.device);
    ToyOptions on_a = a, on_b = b;
    on_a.make_device = on_b.make_device = SharedDevice::borrow;
    ToyTrainer first(on_a), second(on_b);
    EXPECT_EQ(shared.device().allocated_bytes(),
              first.engine().plan().memory.device_bytes() + second.engine().plan().memory.device_bytes());
    for (int s = 0; s < a.steps; ++s) take_steps(s, first, of_a, second, of_b);
    of_a.digest = first.engine().state_digest();
    of_b.digest = second.engine().state_digest();
  }
  const ToyResult alone_a = testing::train_toy(a), alone_b = testing::train_toy(b);
  EXPECT_EQ(of_a.digest, alone_a.digest);
  EXPECT_EQ(of_b.digest, alone_b.digest);
  EXPECT_EQ(of_a.norms, alone_a.norms);
  EXPECT_EQ(of_b.norms, alone_b.norms);
  EXPECT_EQ(of_b.losses, alone_b.losses);
}

class TwoEngines : public ::testing::TestWithParam<std::pair<std::string, std::string>> {};

TEST_P(TwoEngines, TrainedAlternatelyOnOneDeviceGiveTheBitsOfEachAlone) {
  const auto [a, b] = two(GetParam().first, GetParam().second);
  expect_as_alone(a, b, [](int s, ToyTrainer& first, ToyResult& of_first, ToyTrainer& second, ToyResult& of_second) {
    first.step(s, of_first);
    second.step(s, of_second);
  });
}

TEST_P(TwoEngines, OfWhichOneStepsAmidAStepOfTheOtherGiveTheBitsOfEachAlone) {
  const auto [a, b] = two(GetParam().first, GetParam().second);
  const ToyOptions& of_steps = a;
  expect_as_alone(a, b, [&](int s, ToyTrainer& first, ToyResult& of_first, ToyTrainer& second, ToyResult& of_second) {
    const int layers = first.layout().layer_count();
    first.engine().begin_step({.lr = of_steps.lr, .max_grad_norm = of_steps.max_grad_norm});
    for (int l = 0; l < layers; ++l) first.forward(l);
    for (int l = layers - 1; l >= 0; --l) {
      first.backward(l, s, 0);
      if (l == layers / 2) second.step(s, of_second);
    }
    of_first.norms.push_back(first.engine().end_step().gradient_norm);
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, TwoEngines,
                         ::testing::Values(std::pair{"interleave:2", "interleave:2"}, std::pair{"host", "host"},
                                           std::pair{"stream", "stream"}, std::pair{"device", "host"},
                                           std::pair{"stream", "static:0.5"}));

}  // namespace
}  // namespace tandem
