#pragma once
// A trainer with a forward and backward of its own, small enough to be checked by hand, whose bits depend
// on every weight of every layer. Used to show that plans change time and never results.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "api/open_device.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"
#include "offload/engine/engine.hpp"
#include "tests/offload/toy/device.hpp"
#include "tests/offload/toy/work.hpp"

namespace tandem::testing {

struct ToyOptions {
  OffloadOptions offload;
  HostDeviceOptions device;
  MakeToyDevice make_device = make_toy_device;
  int layers = 4;
  std::int64_t width = 3000;           ///< width of the plain layers: padding and odd sizes everywhere
  DType gradient = DType::f32;         ///< type of the gradient of the plain layers' largest parameter
  DType matrices = DType::bf16;        ///< weights of that parameter
  DType vectors = DType::bf16;         ///< weights of biases and norms, and of the frozen ones in their layers
  WeightCode code = WeightCode::none;  ///< format of a frozen matrix that each plain layer then has, too
  bool factors = false;                ///< `w` of the plain layers is a matrix, rounded to e4m3 wherever it is used
  bool frozen_ends = false;            ///< a layer without state in front and another behind
  bool grouped = false;                ///< biases and norms are of group 1, `w` of the last plain layer of group 2
  bool decays = true;                  ///< `w` of that layer decays
  double lr_scale = 1.0;               ///< lr_scale of it
  bool tied = true;                    ///< the last layer shares a parameter of the first
  int steps = 3;
  int micro_batches = 1;
  int at_once = 1;  ///< micro-batches that pass through a layer in one use
  /// Layer h.1 has a second part of its gradient, in the same use or in an earlier one of backward.
  enum class Twice : std::uint8_t { no, in_one_use, in_two };
  Twice twice = Twice::no;
  bool owners_make = false;  ///< both parts of the shared parameter's gradient come in its owner's use
  double lr = 1e-2;
  double max_grad_norm = 1.0;
  std::uint64_t seed = 7;
  int nan_at_step = -1;  ///< a gradient of this step is not a number
  int nan_layer = 1;     ///< layer of that gradient
  bool evaluate_between = false;
  bool uneven = false;  ///< gradients of micro-batches are so apart that the order in which they add up is seen
  /// Parameters that have no gradient in a micro-batch of a step, by their layers and names; layers of which all have
  /// none are not asked for gradients.
  std::function<bool(int step, int micro, const Parameter&)> absent{};
  bool zero_instead = false;                                ///< their gradients are zeros
  enum class Says : std::uint8_t { nothing, begin, last };  ///< calls of begin_micro_batch
  Says says = Says::nothing;
  /// How steps begin and end, where not as usual.
  std::function<void(StepOptions&)> begin{};
  std::function<StepReport(OffloadEngine&)> end{};
  /// Stream of forward and backward, where it is not one of the device's own.
  std::function<Stream(Device&)> make_stream{};
  Trace* trace = nullptr;
  int claimed_rank = -1;  ///< instead of that in the group
};

struct ToyResult {
  std::string digest;
  std::vector<double> norms;
  std::vector<float> losses;    ///< a sum over weights, seen by each micro-batch's forward
  std::vector<double> exposed;  ///< update seconds, of each step
  int skipped = 0;
  EngineCounters counters;
  Plan plan;
  std::size_t device_peak = 0;
};

inline ParameterLayout toy_layout(const ToyOptions& o) {
  ParameterLayout layout;
  const auto add_frozen = [&](const char* name) {
    if (o.frozen_ends) layout.add_layer(name).add("still", {2000}, {.trainable = false});
  };
  add_frozen("stem");
  const int vectors = o.grouped ? 1 : 0;
  layout.add_layer("first")
      .add("table", {7, 901})
      .add("bias", {13}, {.decay = false, .group = vectors, .weight = o.vectors});
  for (int i = 0; i < o.layers; ++i) {
    const bool two_uses = i == 1 && o.twice == ToyOptions::Twice::in_two;
    auto layer = layout.add_layer("h." + std::to_string(i), {.uses = two_uses ? 2 : 1});
    // In this order what is summed lies first, whatever the type of the other's gradient.
    const bool last = i + 1 == o.layers;
    layer.add("b", {33}, {.decay = false, .lr_scale = 0.5, .group = vectors, .weight = o.vectors})
        .add("frozen", {5}, {.trainable = false, .weight = o.vectors})
        .add("w", o.factors ? Shape{4, o.width / 4} : Shape{o.width},
             {.decay = !last || o.decays,
              .lr_scale = last ? o.lr_scale : 1.0,
              .group = last && o.grouped ? 2 : 0,
              .gradient = o.gradient,
              .weight = o.matrices,
              .fp8_factor = o.factors});
    if (o.code != WeightCode::none) layer.add("base", {3, 131, 70}, {.trainable = false, .code = o.code});
  }
  layout.add_layer("last")
      .add("norm", {65}, {.decay = false, .group = vectors, .weight = o.vectors})
      .add("table", {7, 901});
  add_frozen("crown");
  if (o.tied) layout.tie("first.table", "last.table");
  return layout;
}

class ToyTrainer {
 public:
  explicit ToyTrainer(const ToyOptions& o) : ToyTrainer(o, o.make_device(o.device), nullptr) {}
  /// One of a group, whose micro-batches are every so manieth of all. The group outlives it.
  ToyTrainer(const ToyOptions& o, std::shared_ptr<ToyDevice> device, Group* group)
      : o_(o),
        rank_(group == nullptr ? Rank{} : group->rank()),
        layout_(toy_layout(o)),
        toy_device_(std::move(device)),
        device_(&toy_device_->device()) {
    o_.offload.rank = rank_;
    if (o.claimed_rank >= 0) o_.offload.rank.index = o.claimed_rank;
    o_.offload.max_micro_batches = std::max(o_.offload.max_micro_batches, o_.micro_batches);
    o_.offload.micro_batches_at_once = o_.at_once;
    o_.offload.owners_make_gradients = o_.owners_make;
    const PlanningFacts facts{device_->info().capacity, 0};
    plan_ = make_plan(layout_, o_.offload, facts);
    engine_ = std::make_unique<OffloadEngine>(*device_, layout_, o_.offload, plan_, o_.trace, group);
    stream_ = o.make_stream ? o.make_stream(*device_) : device_->make_stream("compute");
    const std::uint64_t seed = o.seed;
    engine_->initialize([seed](const Parameter& p, std::span<float> values) {
      const std::uint64_t key = seed + std::hash<std::string>{}(p.full_name);
      fill_with_noise(key, 0.1F, values);
    });
  }

  ToyResult run() {
    ToyResult result;
    for (int s = 0; s < o_.steps; ++s) {
      step(s, result);
      if (o_.evaluate_between) evaluate();
    }
    result.digest = engine_->state_digest();
    result.counters = engine_->counters();
    result.plan = plan_;
    result.device_peak = device_->peak_bytes();
    return result;
  }

  void begin_step() {
    StepOptions options{.lr = o_.lr, .max_grad_norm = o_.max_grad_norm, .micro_batches = o_.micro_batches};
    if (o_.begin) o_.begin(options);
    engine_->begin_step(options);
    losses_.assign(static_cast<std::size_t>(o_.micro_batches), 0.0F);
  }

  void step(int s, ToyResult& result) {
    begin_step();
    for (int first = 0; first < o_.micro_batches; first += o_.at_once) {
      const int end = std::min(first + o_.at_once, o_.micro_batches);
      if (o_.says != ToyOptions::Says::nothing) {
        engine_->begin_micro_batch(o_.says == ToyOptions::Says::last && end == o_.micro_batches);
      }
      for (int l = 0; l < layout_.layer_count(); ++l) forward(l, first, end);
      for (int l = layout_.layer_count() - 1; l >= 0; --l) backward(l, s, first, end);
    }
    const StepReport report = o_.end ? o_.end(*engine_) : engine_->end_step();
    device_->synchronize(stream_);
    result.norms.push_back(report.gradient_norm);
    result.exposed.push_back(report.exposed_update_seconds);
    result.losses.insert(result.losses.end(), losses_.begin(), losses_.end());
    result.skipped += report.skipped ? 1 : 0;
  }

  void evaluate() {
    for (int pass = 0; pass < 2; ++pass) {
      const auto scope = engine_->evaluation();
      for (int l = 0; l < layout_.layer_count(); ++l) forward(l);
      device_->synchronize(stream_);
    }
    {
      const auto scope = engine_->evaluation();  // a forward that stops half-way leaves nothing held
      forward(0);
      forward(1);
      device_->synchronize(stream_);
    }
  }

  /// One array of a parameter's state.
  std::vector<float> array(std::string_view name, StateArray array) {
    const Parameter& p = layout_.parameter(name);
    std::vector<float> values(static_cast<std::size_t>(p.count));
    engine_->read(p, array, values);
    return values;
  }

  OffloadEngine& engine() { return *engine_; }
  void end_engine() { engine_.reset(); }
  Device& device() { return *device_; }
  ToyDevice& toy_device() { return *toy_device_; }
  const ParameterLayout& layout() const { return layout_; }
  StreamView stream() const { return stream_; }

  void forward(int l, int first = 0, int end = 1) {
    const WeightsGuard weights = engine_->fetch(l, stream_);
    for (int micro = first; micro < end; ++micro) forward_one(l, weights, losses_[static_cast<std::size_t>(micro)]);
  }

  void backward(int l, int s, int micro) { backward(l, s, micro, micro + 1); }
  void backward(int l, int s, int first, int end) {
    using Twice = ToyOptions::Twice;
    const int twice = layer_used_twice();
    if (o_.twice == Twice::in_two && l == twice + 2) {
      const WeightsGuard weights = engine_->fetch(twice, stream_);
      for (int micro = first; micro < end; ++micro) {
        GradientsGuard gradients = engine_->gradients(twice, stream_);
        add_second_part(twice, s, micro, weights, gradients);
        gradients.commit(stream_);
      }
    }
    const WeightsGuard weights = engine_->fetch(l, stream_);
    for (int micro = first; micro < end; ++micro) backward_one(l, s, micro, weights);
  }

 private:
  void forward_one(int l, const WeightsGuard& weights, float& loss) {
    float* out = &loss;
    for (const Parameter& p : layout_.layer(l).parameters) {
      const TensorView w = weights[p.name];
      const bool factor = p.options.fp8_factor;
      toy_device_->enqueue(stream_, "toy forward", w, {},
                           [w, out, factor](const bf16* values, void*) { *out += weighted_sum(w, values, factor); });
    }
  }

  /// Gradients of a layer by one micro-batch, which has targets of its own.
  void backward_one(int l, int s, int micro, const WeightsGuard& weights) {
    const std::vector<Parameter>& parameters = layout_.layer(l).parameters;
    const auto absent = [&](const Parameter& p) {
      return !p.options.trainable || (o_.absent && !o_.zero_instead && o_.absent(s, micro, p));
    };
    if (o_.absent && !o_.zero_instead && std::ranges::all_of(parameters, absent)) return;
    GradientsGuard gradients = engine_->gradients(l, stream_);
    if (o_.twice == ToyOptions::Twice::in_one_use && l == layer_used_twice()) {
      add_second_part(l, s, micro, weights, gradients);
    }
    for (const Parameter& p : parameters) {
      if (o_.owners_make && p.tied()) continue;
      if (p.options.trainable && absent(p)) {
        gradients.leave_out(p.name);
        continue;
      }
      if (o_.absent && o_.absent(s, micro, p)) {
        add_zeros(gradients[p.name], weights[p.name]);
        continue;
      }
      if (o_.owners_make && p.name == "table")
        add_part(layout_.layer_count() - 1, s, micro, weights[p.name], gradients[p.name]);
      add_part(l, s, micro, weights[p.name], gradients[p.name], p.options.fp8_factor);
    }
    gradients.commit(stream_);
  }

  int layer_used_twice() const { return o_.frozen_ends ? 3 : 2; }

  void add_second_part(int l, int s, int micro, const WeightsGuard& weights, GradientsGuard& gradients) {
    for (const Parameter& p : layout_.layer(l).parameters) {
      add_part(l + 50, s, micro, weights[p.name], gradients[p.name], p.options.fp8_factor);
    }
  }

  void add_zeros(TensorView g, TensorView w) {
    if (!g) return;
    toy_device_->enqueue(stream_, "toy backward", w, g, [g](const bf16*, void* out) {
      for (std::int64_t i = 0; g.dtype == DType::bf16 && i < g.count(); ++i) add_gradient(g.dtype, out, i, 0.0F);
    });
  }

  /// Adds the part of layer `l` to a gradient; nothing where it is empty.
  void add_part(int l, int s, int local, TensorView w, TensorView g, bool factor = false) {
    if (!g) return;
    const int micro = local * rank_.count + rank_.index;
    // Two of three cancel each other, and take away from what they are added to.
    const float instead = !o_.uneven || micro % 3 == 0 ? 0.0F : micro % 3 == 1 ? 0x1p20F : -0x1p20F;
    const GradientPart part{.key = o_.seed + static_cast<std::uint64_t>(s * 1000 + micro * 100 + l),
                            .instead = instead,
                            .poison = s == o_.nan_at_step && l == o_.nan_layer && micro == 0,
                            .factor = factor};
    const auto work = [part, w, g](const bf16* values, void* out) { add_gradient_of(part, w, values, g, out); };
    toy_device_->enqueue(stream_, "toy backward", w, g, work);
  }

  ToyOptions o_;
  Rank rank_;
  ParameterLayout layout_;
  std::shared_ptr<ToyDevice> toy_device_;
  Device* device_;
  Plan plan_;
  std::unique_ptr<OffloadEngine> engine_;
  std::vector<float> losses_{0.0F};  ///< queued work writes them: outlive the stream
  Stream stream_;
};

/// Options of a toy run with the given policy on a roomy device.
inline ToyOptions toy(const std::string& policy) {
  ToyOptions o;
  o.device.capacity = std::size_t{64} << 20;
  o.device.threads = 1;
  o.device.update_threads = 1;
  o.device.poison_memory = true;
  o.offload.policy = parse_policy(policy);
  o.offload.watchdog_seconds = 30.0;
  return o;
}

/// Options `o` with `share` of the state on the host in a file instead: the host has no more room for it.
inline ToyOptions with_state_in_file(ToyOptions o, double share) {
  o.offload.subgroup_size = o.offload.subgroup_size.value_or(1024);
  o.offload.max_micro_batches = std::max(o.offload.max_micro_batches, o.micro_batches);
  o.offload.micro_batches_at_once = o.at_once;
  o.offload.owners_make_gradients = o.owners_make;
  o.offload.state_folder = ::testing::TempDir();
  o.offload.host_memory = std::nullopt;
  const Plan roomy = make_plan(toy_layout(o), o.offload, {o.device.capacity, 0});
  std::size_t state = 0;
  for (const Subgroup& s : roomy.subgroups) {
    if (s.tier == Tier::host) state += booked_state_bytes(s.count(), roomy.state);
  }
  constexpr std::size_t buffers = 6;
  o.offload.host_memory = roomy.memory.host_bytes() - static_cast<std::size_t>(share * static_cast<double>(state)) +
                          buffers * file_state_bytes(roomy.piece_elements, roomy.state);
  return o;
}

inline ToyResult train_toy(const ToyOptions& options) { return ToyTrainer(options).run(); }

/// A training in which some update runs ahead, unless none may: a step does not end before the first one has, since a
/// step that ends while the CPU's thread is not scheduled leaves it none.
inline ToyResult train_toy_ahead(ToyOptions o) {
  const auto end = o.end;
  o.end = [end](OffloadEngine& engine) {
    const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (engine.counters().parameters_speculated == 0 && std::chrono::steady_clock::now() < latest) {
      std::this_thread::yield();
    }
    return end ? end(engine) : engine.end_step();
  };
  return train_toy(o);
}

/// Result of such work with everything on the device, trained once in a program for all work whose bits are the same.
/// Takes from `work` what bits depend on, and neither its policy nor faults.
inline const ToyResult& reference_of(const ToyOptions& work) {
  using Key =
      std::tuple<int, int, bool, bool, bool, int, std::int64_t, double, std::uint64_t, StateFormat, std::uint64_t>;
  static std::map<Key, ToyResult> results;
  const auto [found, first] =
      results.try_emplace({work.steps, work.micro_batches, work.frozen_ends, work.tied, work.uneven, work.nan_at_step,
                           work.width, work.max_grad_norm, work.seed, work.offload.state, work.offload.seed});
  if (first) {
    ToyOptions o = toy("device");
    o.steps = work.steps;
    o.micro_batches = work.micro_batches;
    o.frozen_ends = work.frozen_ends;
    o.tied = work.tied;
    o.uneven = work.uneven;
    o.nan_at_step = work.nan_at_step;
    o.width = work.width;
    o.max_grad_norm = work.max_grad_norm;
    o.seed = work.seed;
    o.offload.state = work.offload.state;
    o.offload.seed = work.offload.seed;
    found->second = train_toy(o);
  }
  return found->second;
}

}  // namespace tandem::testing
