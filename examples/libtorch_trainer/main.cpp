// A libtorch network whose memory problem is tandem's: forward, loss and autograd are libtorch's, weights come layer by
// layer, and AdamW runs where a plan says.
#include <algorithm>
#include <cmath>
#include <exception>
#include <iostream>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lending.hpp"
#include "stages.hpp"

namespace {

using namespace tandem::literals;

constexpr int steps = 40, micro_batches = 2;
constexpr std::int64_t rows = 64;  ///< rows of a micro-batch
constexpr double learning_rate = 1e-3, clip = 1.0;
constexpr std::size_t ceiling = 12_MiB;

struct Batch {
  torch::Tensor inputs, targets;  ///< (rows, inputs) fp32, (rows) classes
};

/// Rows whose class a fixed random matrix tells.
std::vector<Batch> make_batches() {
  torch::manual_seed(7);
  const torch::Tensor teacher = torch::randn({shape::inputs, shape::classes});
  std::vector<Batch> batches;
  for (int i = 0; i < micro_batches; ++i) {
    const torch::Tensor inputs = torch::randn({rows, shape::inputs});
    batches.push_back({inputs, inputs.matmul(teacher).argmax(1)});
  }
  return batches;
}

std::string name_of_layer(std::size_t i) { return "stage." + std::to_string(i); }

tandem::ParameterLayout make_layout(const std::vector<std::shared_ptr<Stage>>& stages) {
  tandem::ParameterLayout layout;
  for (std::size_t i = 0; i < stages.size(); ++i) declare(layout, name_of_layer(i), *stages[i]);
  return layout;
}

/// Gives the engine what libtorch has initialised.
void initialize(tandem::OffloadEngine& engine, const std::vector<std::shared_ptr<Stage>>& stages) {
  std::map<std::string, torch::Tensor> values;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    for (const auto& parameter : stages[i]->named_parameters()) {
      values[name_of_layer(i) + "." + parameter.key()] = parameter.value().detach().contiguous();
    }
  }
  engine.initialize([&values](const tandem::Parameter& parameter, std::span<float> to) {
    std::copy_n(values.at(parameter.full_name).data_ptr<float>(), to.size(), to.begin());
  });
}

class Trainer {
 public:
  Trainer(tandem::Device& device, tandem::OffloadEngine& engine, const std::vector<std::shared_ptr<Stage>>& stages)
      : device_(device),
        engine_(engine),
        stages_(stages),
        inputs_(stages.size()),
        stream_(device.make_stream("torch")) {}

  /// Mean loss of one step; one block may take no part in it (-1: all do).
  double step(const std::vector<Batch>& batches, int dropped) {
    engine_.begin_step({.micro_batches = micro_batches, .absent = tandem::Absent::skip});
    loss_ = 0.0;
    for (const Batch& batch : batches) {
      engine_.begin_micro_batch(&batch == &batches.back());
      forward(batch, dropped);
      turn(batch);
      backward(dropped);
    }
    end_step();
    device_.synchronize(stream_);
    return loss_ / micro_batches;
  }

 private:
  int head() const { return static_cast<int>(stages_.size()) - 1; }

  /// Keeps each stage's input; autograd keeps nothing.
  void forward(const Batch& batch, int dropped) {
    tandem::enqueue_host(device_, stream_, "input", [this, &batch] { inputs_.front() = batch.inputs; });
    for (int i = 0; i < head(); ++i) {
      const auto place = static_cast<std::size_t>(i);
      if (i == dropped) {
        tandem::enqueue_host(device_, stream_, "dropped", [this, place] { inputs_[place + 1] = inputs_[place]; });
        continue;
      }
      const auto weights = engine_.fetch(i, stream_);  // released, after the work queued here, at the end of the scope
      tandem::enqueue_host(device_, stream_, "forward", [this, place, lent = views_of(*stages_[place], weights)] {
        const torch::NoGradGuard no_grad;
        const Lent weights_of(*stages_[place], lent);
        inputs_[place + 1] = stages_[place]->forward(inputs_[place]);
      });
    }
  }

  /// The head: forward, loss and backward in one use of its weights.
  void turn(const Batch& batch) {
    use(head(), "head", [this, &batch](const torch::Tensor& y) {
      const torch::Tensor loss = torch::nn::functional::cross_entropy(y, batch.targets);
      loss_ += loss.item<double>();
      (loss / micro_batches).backward();
    });
  }

  void backward(int dropped) {
    for (int i = head() - 1; i >= 0; --i) {
      if (i != dropped) use(i, "backward", [this](const torch::Tensor& y) { y.backward(gradient_); });
    }
  }

  /// Computes a stage again, for autograd, and has `begin` start backward from its output.
  template <class Begin>
  void use(int layer, const char* what, Begin begin) {
    const auto place = static_cast<std::size_t>(layer);
    Stage& stage = *stages_[place];
    const auto weights = engine_.fetch(layer, stream_);
    auto gradients = engine_.gradients(layer, stream_);
    tandem::enqueue_host(
        device_, stream_, what,
        [this, place, &stage, begin, lent = views_of(stage, weights), sums = views_of(stage, gradients)] {
          const Lent weights_of(stage, lent);
          const torch::Tensor x = inputs_[place].detach().requires_grad_();
          begin(stage.forward(x));
          gradient_ = x.grad();
          weights_of.add_gradients_to(sums);
        });
    gradients.commit(stream_);
  }

  /// Clips by the norm, and updates matrices with weight decay, vectors without.
  void end_step() {
    const double norm = engine_.end_gradients();
    if (!std::isfinite(norm)) {
      engine_.skip();
      return;
    }
    std::vector<tandem::GroupValues> values(groups, {.lr = learning_rate, .adamw = tandem::AdamW{.weight_decay = 0.1}});
    values[vectors].adamw->weight_decay = 0.0;
    engine_.update({.scale = norm > clip ? clip / norm : 1.0, .groups = values});
  }

  tandem::Device& device_;
  tandem::OffloadEngine& engine_;
  const std::vector<std::shared_ptr<Stage>>& stages_;
  std::vector<torch::Tensor> inputs_;  ///< inputs of each stage
  torch::Tensor gradient_;             ///< gradient of the loss by the output of the stage that is next in backward
  double loss_ = 0.0;
  tandem::Stream stream_;  ///< last: its work uses the others
};

struct Result {
  double first = 0.0, last = 0.0;
  std::string digest;
};

Result train(const char* policy) {
  torch::manual_seed(42);
  const std::vector<std::shared_ptr<Stage>> stages = make_stages();
  const tandem::ParameterLayout layout = make_layout(stages);
  const auto device = tandem::open_device("host", {.memory = ceiling, .threads = 1, .update_threads = 1});

  tandem::OffloadOptions options;
  options.device_memory = ceiling;
  options.policy = tandem::parse_policy(policy);
  options.max_micro_batches = micro_batches;
  options.speculate = tandem::Speculate::off;  // no update runs ahead in steps that may lack gradients
  const tandem::Plan plan = tandem::make_plan(layout, options, tandem::profile_of(*device));  // nothing allocated yet
  tandem::OffloadEngine engine(*device, layout, options, plan);
  initialize(engine, stages);

  Result result;
  const std::vector<Batch> batches = make_batches();
  Trainer trainer(*device, engine, stages);
  for (int step = 0; step < steps; ++step) {
    const int dropped = step % 4 == 3 ? 1 + step / 4 % shape::blocks : -1;  // a block of every fourth step
    result.last = trainer.step(batches, dropped);
    if (step == 0) result.first = result.last;
    if (step % 10 == 0 || step == steps - 1) std::cout << "step " << step + 1 << "  loss " << result.last << '\n';
  }
  result.digest = engine.state_digest();
  std::cout << policy << ": " << layout.parameter_count() << " parameters, device peak "
            << tandem::format_bytes(device->peak_bytes()) << ", state digest " << result.digest << '\n';
  return result;
}

int run() {
  torch::set_num_threads(1);
  const Result streamed = train("host"), mixed = train("interleave:2");
  const bool learnt = streamed.last < 0.5 * streamed.first;
  if (learnt && streamed.digest == mixed.digest) return 0;
  std::cerr << "libtorch_trainer: " << (learnt ? "two policies gave two digests\n" : "the loss did not fall by half\n");
  return 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::cerr << "libtorch_trainer: " << error.what() << '\n';
    return 1;
  }
}
