// A trainer with a forward and backward of its own that hands the memory problem to tandem.
#include <algorithm>
#include <cmath>
#include <exception>
#include <iostream>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "residual_mlp.hpp"

namespace {

using namespace tandem::literals;

constexpr int layers = 8;
constexpr int steps = 40;
constexpr int most_micro_batches = 3;
constexpr double learning_rate = 1e-3, clip = 1.0;
constexpr std::size_t ceiling = 32_MiB;

/// Groups of parameters, each with hyperparameters of its own in each step.
enum Group : int { matrices, biases, groups };

/// The order in which forward uses the parameters. Biases are few: they are kept in fp32, and do not decay.
tandem::ParameterLayout make_layout() {
  tandem::ParameterLayout layout;
  for (int i = 0; i < layers; ++i) {
    auto layer = layout.add_layer("h." + std::to_string(i));
    layer.add("w1", {mlp::hidden, mlp::width});
    layer.add("b1", {mlp::hidden}, {.group = biases, .weight = tandem::DType::f32});
    layer.add("w2", {mlp::width, mlp::hidden});
  }
  return layout;
}

/// Memory of the trainer itself on the device: inputs and hidden values of every block, the gradient that travels back,
/// and scratch.
struct Activations {
  static constexpr std::size_t narrow = mlp::width * mlp::batch;
  static constexpr std::size_t wide = mlp::hidden * mlp::batch;
  static constexpr std::size_t bytes = ((layers + 2) * narrow + (layers + 1) * wide) * sizeof(float);

  explicit Activations(tandem::Device& device) : block_(device.allocate(bytes, "activations")) {
    tandem::Arena arena(block_.data(), block_.bytes(), "activations");
    auto carve = [&arena](std::size_t count) {
      return static_cast<float*>(arena.carve(count * sizeof(float), "values"));
    };
    for (int i = 0; i <= layers; ++i) inputs.push_back(carve(narrow));
    for (int i = 0; i < layers; ++i) hidden.push_back(carve(wide));
    gradient = carve(narrow);
    scratch = carve(wide);
  }

  std::vector<float*> inputs;  ///< inputs of block i; the last one is the network's output
  std::vector<float*> hidden;
  float* gradient = nullptr;
  float* scratch = nullptr;

 private:
  tandem::MemoryBlock block_;
};

mlp::Weights block_of(const tandem::WeightsGuard& weights) {
  return {weights["w1"].as<tandem::bf16>(), weights["b1"].as<float>(), weights["w2"].as<tandem::bf16>()};
}

mlp::Gradients block_of(const tandem::GradientsGuard& gradients) {
  return {gradients["w1"].as<float>(), gradients["b1"].as<float>(), gradients["w2"].as<float>()};
}

/// One batch of the regression: the target of a column is a fixed shuffle of its values, squashed.
struct Batch {
  std::vector<float> inputs, targets;
  bool damaged = false;
};

std::vector<Batch> make_batches() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<Batch> batches(most_micro_batches);
  for (Batch& batch : batches) {
    for (std::size_t i = 0; i < Activations::narrow; ++i) batch.inputs.push_back(normal(random));
    batch.targets.resize(Activations::narrow);
    const float* input = batch.inputs.data();
    float* target = batch.targets.data();
    for (int f = 0; f < mlp::width; ++f) {
      for (int b = 0; b < mlp::batch; ++b) {
        const int from = (f * 5 + 3) % mlp::width;
        target[f * mlp::batch + b] = std::tanh(2.0F * input[from * mlp::batch + b]);
      }
    }
  }
  return batches;
}

void initialize(tandem::OffloadEngine& engine) {
  std::mt19937 random(42);
  engine.initialize([&random](const tandem::Parameter& parameter, std::span<float> values) {
    const bool matrix = parameter.shape.rank() == 2;
    const float deviation = matrix ? 0.5F / std::sqrt(static_cast<float>(parameter.shape[1])) : 0.0F;
    std::normal_distribution<float> normal;
    for (float& value : values) value = deviation * normal(random);
  });
}

/// The batches of one step, and the block that takes no part in it; -1: all do.
struct StepPlan {
  std::span<const Batch> batches;
  int dropped = -1;
};

class Trainer {
 public:
  Trainer(tandem::Device& device, tandem::OffloadEngine& engine, Activations& activations)
      : device_(device), engine_(engine), a_(activations), stream_(device.make_stream("compute")) {}

  /// Mean loss of one step. Where a batch throws, the step leaves no trace.
  double step(const StepPlan& plan) {
    // How many batches there are turns out on the way, and a block that is dropped has no gradient.
    engine_.begin_step({.micro_batches = most_micro_batches,
                        .open_ended = true,
                        .absent = tandem::Absent::skip,
                        .gradient_scale = 1.0 / static_cast<double>(plan.batches.size())});
    loss_ = 0.0;
    try {
      for (const Batch& batch : plan.batches) {
        engine_.begin_micro_batch(&batch == &plan.batches.back());
        forward(batch, plan.dropped);
        backward(plan.dropped);
      }
    } catch (...) {
      engine_.abort_step();
      throw;
    }
    end_step(1.0 / static_cast<double>(plan.batches.size()));
    device_.synchronize(stream_);
    return loss_ / static_cast<double>(plan.batches.size());
  }

 private:
  /// Clips by the norm of the mean gradient, and updates matrices with weight decay, biases without.
  void end_step(double scale) {
    const double norm = scale * engine_.end_gradients();
    if (!std::isfinite(norm)) {
      engine_.skip();
      return;
    }
    constexpr tandem::AdamW decaying{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    std::vector<tandem::GroupValues> values(groups, {.lr = learning_rate, .adamw = decaying});
    values[biases].adamw->weight_decay = 0.0;
    engine_.update({.scale = norm > clip ? scale * clip / norm : scale, .groups = values});
  }

  void forward(const Batch& batch, int dropped) {
    if (batch.damaged) throw std::runtime_error("a batch is damaged");
    tandem::enqueue_host(device_, stream_, "input",
                         [this, &batch] { std::copy(batch.inputs.begin(), batch.inputs.end(), a_.inputs.front()); });
    for (int i = 0; i < layers; ++i) {
      if (i == dropped) {
        tandem::enqueue_host(device_, stream_, "skip", [this, i] {
          std::copy_n(a_.inputs[static_cast<std::size_t>(i)], Activations::narrow,
                      a_.inputs[static_cast<std::size_t>(i) + 1]);
        });
        continue;
      }
      const auto weights = engine_.fetch(i, stream_);  // released, after the work queued here, at the end of the scope
      tandem::enqueue_host(device_, stream_, "forward", [this, i, block = block_of(weights)] {
        mlp::forward(block, saved(i), a_.inputs[static_cast<std::size_t>(i) + 1]);
      });
    }
    tandem::enqueue_host(device_, stream_, "loss", [this, &batch] {
      loss_ += mlp::squared_error(a_.inputs.back(), batch.targets.data(), 1.0F, a_.gradient);
    });
  }

  void backward(int dropped) {
    for (int i = layers - 1; i >= 0; --i) {
      if (i == dropped) continue;
      const auto weights = engine_.fetch(i, stream_);
      auto gradients = engine_.gradients(i, stream_);  // zero at first
      tandem::enqueue_host(device_, stream_, "backward",
                           [this, i, block = block_of(weights), sums = block_of(gradients)] {
                             mlp::backward(block, saved(i), sums, a_.gradient, a_.scratch);
                           });
      gradients.commit(stream_);  // complete for this micro-batch
    }
  }

  mlp::Saved saved(int i) const {
    return {a_.inputs[static_cast<std::size_t>(i)], a_.hidden[static_cast<std::size_t>(i)]};
  }

  tandem::Device& device_;
  tandem::OffloadEngine& engine_;
  Activations& a_;
  tandem::Stream stream_;
  double loss_ = 0.0;
};

/// A step whose second batch cannot be had: its exception arrives, and the state is as before.
bool survives_a_damaged_batch(Trainer& trainer, tandem::OffloadEngine& engine, std::vector<Batch> batches) {
  const std::string before = engine.state_digest();
  batches[1].damaged = true;
  try {
    trainer.step({batches});
  } catch (const std::runtime_error& error) {
    std::cout << "step abandoned: " << error.what() << '\n';
    return engine.state_digest() == before;
  }
  return false;
}

int run() {
  const auto device = tandem::open_device("host", {.memory = ceiling});
  const tandem::ParameterLayout layout = make_layout();

  tandem::OffloadOptions options;
  options.device_memory = ceiling;
  options.reserved_device_memory = tandem::align_up(Activations::bytes);
  options.policy = tandem::parse_policy("interleave:3");
  options.max_micro_batches = most_micro_batches;
  options.speculate = tandem::Speculate::off;  // no update runs ahead in steps that are open-ended

  const tandem::Plan plan = tandem::make_plan(layout, options, tandem::profile_of(*device));  // nothing allocated yet
  std::cout << layout.parameter_count() << " parameters\n" << plan.table();

  Activations activations(*device);
  tandem::OffloadEngine engine(*device, layout, options, plan);
  initialize(engine);
  const std::vector<Batch> batches = make_batches();
  Trainer trainer(*device, engine, activations);  // its stream is done with the batches before they go

  double first = 0.0;
  double last = 0.0;
  for (int step = 0; step < steps; ++step) {
    // One to three batches, and every fourth step without one of the blocks.
    const auto count = static_cast<std::size_t>(1 + step % most_micro_batches);
    last = trainer.step({std::span(batches).first(count), step % 4 == 3 ? step % layers : -1});
    if (step == 0) first = last;
    if (step % 5 == 0 || step == steps - 1) std::cout << "step " << step + 1 << "  loss " << last << '\n';
    if (step == steps / 2 && !survives_a_damaged_batch(trainer, engine, batches)) return 1;
  }

  std::cout << "device peak " << tandem::format_bytes(device->peak_bytes()) << " of " << tandem::format_bytes(ceiling)
            << "\nstate digest " << engine.state_digest() << '\n';
  if (!(last < 0.5 * first) || device->peak_bytes() > ceiling) {
    std::cerr << "custom_trainer: the loss did not fall by half, or the ceiling was passed\n";
    return 1;
  }
  return 0;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::cerr << "custom_trainer: " << error.what() << '\n';
    return 1;
  }
}
