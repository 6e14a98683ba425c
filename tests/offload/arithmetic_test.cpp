// Training by an engine beside AdamW in double that knows of no plan, subgroup or format: policies that all agree may
// still agree on something wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::noise;
using testing::toy;
using testing::ToyOptions;

constexpr double learning_rate = 1e-2;
constexpr double largest_norm = 0.75;
/// Constants that are neither the defaults nor an eps too small to be seen.
constexpr AdamW adamw{.beta1 = 0.8, .beta2 = 0.97, .eps = 1e-4, .weight_decay = 0.2};

struct Step {
  int micro_batches = 2;
  double gradient_scale = 1.0;
  double amplitude = 1.0;  ///< scale of the gradients, a power of two
};

/// Clipped, not clipped, clipped; scales differ, since a constant one cancels in AdamW.
const std::vector<Step> three_steps{{2, 0.5, 0x1p-4}, {2, 2.0, 0x1p-8}, {2, 1.0, 0x1p-6}};
const std::vector<Step> fewer_micro_batches{{1, 1.0, 0x1p-5}, {3, 0.5, 0x1p-5},  {2, 2.0, 0x1p-8},
                                            {3, 1.0, 0x1p-6}, {1, 0.25, 0x1p-4}, {2, 1.0, 0x1p-5}};

/// The master is below 1/4, so that each of the two roundings of a step takes 2^-27 at most; the step itself is about
/// lr, after some ten roundings of 2^-24. Of three steps 6.3e-6 lr.
double master_tolerance(std::size_t steps) {
  return static_cast<double>(steps) * (2 * 0x1p-27 + 10 * 0x1p-24 * learning_rate);
}
/// Some fourteen roundings of 2^-24, and three for every step after the first.
double moment_tolerance(std::size_t steps) { return static_cast<double>(11 + 3 * steps) * 0x1p-24; }

ParameterLayout layout_of_odd_sizes() {
  ParameterLayout layout;
  layout.add_layer("first").add("table", {7, 301}).add("bias", {13}, {.decay = false});
  layout.add_layer("middle")
      .add("b", {33}, {.decay = false, .lr_scale = 0.5})
      .add("frozen", {55}, {.trainable = false})
      .add("w", {3001}, {.lr_scale = 0.75});
  layout.add_layer("written").add("one", {1}).add("w", {22, 101}, {.lr_scale = 0.25, .gradient = DType::bf16});
  layout.add_layer("last").add("norm", {1025}, {.decay = false}).add("table", {7, 301});
  layout.tie("first.table", "last.table");
  return layout;
}

float initial(const Parameter& p, std::int64_t i) {
  return 0.1F * noise(static_cast<std::uint64_t>(900 + 10 * p.layer + p.offset / 1024), static_cast<std::uint64_t>(i));
}

/// Contribution of a use to a gradient: a multiple of amplitude / 4096, so that sums in fp32 are exact, with more
/// digits than bf16 has.
double contribution(int layer, int index, int step, int micro, std::int64_t i, double amplitude) {
  std::uint64_t key = 0;
  for (const int part : {step, micro, layer, index}) key = 10 * key + static_cast<std::uint64_t>(part);
  return std::nearbyint(4096.0 * static_cast<double>(noise(key, static_cast<std::uint64_t>(i)))) / 4096.0 * amplitude;
}

/// Rounds to eight significant bits, ties to even.
double to_bf16(double x) {
  if (x == 0.0) return 0.0;
  int exponent = 0;
  (void)std::frexp(x, &exponent);
  const double unit = std::ldexp(1.0, exponent - 8);
  return std::nearbyint(x / unit) * unit;
}

struct Element {
  double w = 0.0, m = 0.0, v = 0.0;
  double m_size = 0.0;  ///< m, had all gradients one sign: what its roundings are relative to
};

class Doubles {
 public:
  explicit Doubles(const ParameterLayout& layout) : layout_(layout) {
    for (const Parameter* p : layout.owned_parameters()) {
      std::vector<Element>& elements = elements_[p];
      for (std::int64_t i = 0; i < p->count; ++i) elements.push_back({.w = static_cast<double>(initial(*p, i))});
    }
  }

  /// Returns the norm.
  double step(const Step& s, double max_norm) {
    const std::map<const Parameter*, std::vector<double>> gradients = gradients_of(s);
    ++steps_;
    double squares = 0.0;
    for (const auto& [p, gradient] : gradients) {
      for (const double g : gradient) squares += g * g;
    }
    const double norm = s.gradient_scale * std::sqrt(squares);
    const double scale = s.gradient_scale * (max_norm > 0.0 ? std::min(1.0, max_norm / norm) : 1.0);
    for (const auto& [p, gradient] : gradients) {
      for (std::size_t i = 0; i < gradient.size(); ++i) update(*p, elements_[p][i], scale * gradient[i]);
    }
    return norm;
  }

  const std::vector<Element>& of(const Parameter& p) const { return elements_.at(&layout_.parameter(p.full_name)); }

 private:
  /// Gradients of a step: a micro-batch's is summed over its uses and rounded, then the sum of all micro-batches is
  /// rounded.
  std::map<const Parameter*, std::vector<double>> gradients_of(const Step& s) const {
    std::map<const Parameter*, std::vector<double>> sums;
    for (int micro = 0; micro < s.micro_batches; ++micro) {
      std::map<const Parameter*, std::vector<double>> filled;
      for (int l = 0; l < layout_.layer_count(); ++l) {
        const Layer& layer = layout_.layer(l);
        for (const Parameter& p : layer.parameters) {
          if (!p.options.trainable) continue;
          std::vector<double>& values = filled[&layout_.parameter(p.full_name)];
          values.resize(static_cast<std::size_t>(p.count));
          for (std::int64_t i = 0; i < p.count; ++i) {
            values[static_cast<std::size_t>(i)] += contribution(l, layer.find(p.name), steps_, micro, i, s.amplitude);
          }
        }
      }
      for (const auto& [p, values] : filled) {
        sums[p].resize(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) sums[p][i] += to_bf16(values[i]);
      }
    }
    for (auto& [p, values] : sums) {
      for (double& value : values) value = to_bf16(value);
    }
    return sums;
  }

  void update(const Parameter& p, Element& e, double g) const {
    e.m = adamw.beta1 * e.m + (1.0 - adamw.beta1) * g;
    e.m_size = adamw.beta1 * e.m_size + (1.0 - adamw.beta1) * std::abs(g);
    e.v = adamw.beta2 * e.v + (1.0 - adamw.beta2) * g * g;
    const double m = e.m / (1.0 - std::pow(adamw.beta1, steps_));
    const double v = e.v / (1.0 - std::pow(adamw.beta2, steps_));
    const double decay = p.options.decay ? adamw.weight_decay * e.w : 0.0;
    e.w -= learning_rate * p.options.lr_scale * (m / (std::sqrt(v) + adamw.eps) + decay);
    EXPECT_LT(std::abs(e.w), 0.25) << "the tolerance is for smaller ones";
  }

  const ParameterLayout& layout_;
  std::map<const Parameter*, std::vector<Element>> elements_;
  int steps_ = 0;
};

/// Trains one engine and the doubles beside it, and compares what there is to see.
class Comparison {
 public:
  Comparison(ToyOptions o, int planned_micro_batches, int at_once)
      : layout_(layout_of_odd_sizes()), doubles_(layout_), toy_device_(o.make_device(o.device)), at_once_(at_once) {
    o.offload.adamw = adamw;
    o.offload.subgroup_size = 1024;
    o.offload.max_micro_batches = planned_micro_batches;
    o.offload.micro_batches_at_once = at_once;
    Device& device = toy_device_->device();
    const Plan plan = make_plan(layout_, o.offload, {device.info().capacity, 0});
    engine_ = std::make_unique<OffloadEngine>(device, layout_, o.offload, plan);
    stream_ = device.make_stream("compute");
    engine_->initialize([](const Parameter& p, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = initial(p, static_cast<std::int64_t>(i));
    });
  }

  void train(const std::vector<Step>& steps, double max_norm) {
    for (const Step& s : steps) step(s, max_norm);
    {
      const auto scope = engine_->evaluation();
      for (int l = 0; l < layout_.layer_count(); ++l) look_at_weights(l);
      toy_device_->device().synchronize(stream_);
    }
    compare_weights();
    compare_state();
  }

  std::string digest() { return engine_->state_digest(); }
  const std::vector<double>& norms() const { return norms_; }

 private:
  void step(const Step& s, double max_norm) {
    engine_->begin_step({.lr = learning_rate,
                         .max_grad_norm = max_norm,
                         .micro_batches = s.micro_batches,
                         .gradient_scale = s.gradient_scale});
    for (int first = 0; first < s.micro_batches; first += at_once_) {
      const int end = std::min(first + at_once_, s.micro_batches);
      for (int l = 0; l < layout_.layer_count(); ++l) look_at_weights(l);
      for (int l = layout_.layer_count() - 1; l >= 0; --l) {
        const WeightsGuard weights = engine_->fetch(l, stream_);
        for (int micro = first; micro < end; ++micro) fill_gradients(l, micro, weights, s.amplitude);
      }
    }
    const StepReport report = engine_->end_step();
    toy_device_->device().synchronize(stream_);
    compare_weights();
    norms_.push_back(doubles_.step(s, max_norm));
    EXPECT_NEAR(report.gradient_norm / norms_.back(), 1.0, 1e-12);
    ++steps_;
    EXPECT_EQ(report.step, steps_);
  }

  void fill_gradients(int l, int micro, const WeightsGuard& weights, double amplitude) {
    GradientsGuard gradients = engine_->gradients(l, stream_);
    const Layer& layer = layout_.layer(l);
    for (const Parameter& p : layer.parameters) {
      const TensorView g = gradients[p.name];
      EXPECT_EQ(static_cast<bool>(g), p.options.trainable) << p.full_name;
      if (!g) continue;
      const int index = layer.find(p.name), step = steps_;
      toy_device_->enqueue(stream_, "fill", weights[p.name], g, [=](const bf16*, void* out) {
        for (std::int64_t i = 0; i < g.count(); ++i) {
          testing::add_gradient(g.dtype, out, i, static_cast<float>(contribution(l, index, step, micro, i, amplitude)));
        }
      });
    }
    gradients.commit(stream_);
  }

  void look_at_weights(int l) {
    const WeightsGuard weights = engine_->fetch(l, stream_);
    for (const Parameter& p : layout_.layer(l).parameters) {
      const TensorView w = weights[p.name];
      std::vector<bf16>* seen = &seen_[&p];  // stays where it is
      toy_device_->enqueue(stream_, "look", w, {},
                           [w, seen](const bf16* values, void*) { seen->assign(values, values + w.count()); });
    }
  }

  /// Compares the weights that layers were computed with: half a unit of bf16 from the double.
  void compare_weights() const {
    for (const auto& [p, seen] : seen_) {
      const std::vector<Element>& expected = doubles_.of(*p);
      ASSERT_EQ(seen.size(), expected.size()) << p->full_name;
      for (std::size_t i = 0; i < seen.size(); ++i) {
        const double most = 0x1p-8 * std::abs(expected[i].w) + master_tolerance(6);
        ASSERT_NEAR(numerics::bf16_to_float(seen[i]), expected[i].w, most) << p->full_name << " " << i;
      }
    }
  }

  void compare_state() {
    const auto steps = static_cast<std::size_t>(steps_);
    for (const Parameter* p : layout_.owned_parameters()) {
      if (!p->options.trainable) continue;
      const auto read = [&](StateArray array) {
        std::vector<float> values(static_cast<std::size_t>(p->count));
        engine_->read(*p, array, values);
        return values;
      };
      const std::vector<float> master = read(StateArray::master), m = read(StateArray::m), v = read(StateArray::v);
      const std::vector<Element>& expected = doubles_.of(*p);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const Element& e = expected[i];
        ASSERT_NEAR(master[i], e.w, master_tolerance(steps)) << p->full_name << " " << i;
        ASSERT_NEAR(m[i], e.m, moment_tolerance(steps) * e.m_size) << p->full_name << " " << i;
        ASSERT_NEAR(v[i], e.v, moment_tolerance(steps) * e.v) << p->full_name << " " << i;
      }
    }
  }

  ParameterLayout layout_;
  Doubles doubles_;
  std::unique_ptr<testing::ToyDevice> toy_device_;
  std::map<const Parameter*, std::vector<bf16>> seen_;  ///< queued work writes it: outlives the stream
  std::unique_ptr<OffloadEngine> engine_;
  Stream stream_;
  std::vector<double> norms_;
  int at_once_;
  int steps_ = 0;
};

class EngineArithmetic : public ::testing::TestWithParam<std::tuple<std::string, StateFormat>> {
 protected:
  static ToyOptions options(std::optional<int> resident_layers = std::nullopt) {
    ToyOptions o = toy(std::get<0>(GetParam()));
    o.offload.state = std::get<1>(GetParam());
    if (o.offload.policy.kind != Policy::Kind::device) o.offload.resident_layers = resident_layers;
    return o;
  }
};

TEST_P(EngineArithmetic, AgreesWithDoubles) {
  for (const std::optional<int> resident : {std::optional<int>(), std::optional(0)}) {
    Comparison comparison(options(resident), 2, 1);
    comparison.train(three_steps, largest_norm);
    const std::vector<double>& norms = comparison.norms();
    EXPECT_GT(norms[0], 1.5 * largest_norm);  // or else nothing was clipped
    EXPECT_LT(norms[1], 0.9 * largest_norm);
    EXPECT_GT(norms[2], 1.1 * largest_norm);
  }
}

TEST_P(EngineArithmetic, AgreesWithDoublesWhereMicroBatchesPassThroughALayerAtOnce) {
  Comparison(options(), 2, 2).train(three_steps, largest_norm);
}

TEST_P(EngineArithmetic, AgreesWithDoublesWithoutClipping) { Comparison(options(), 2, 1).train(three_steps, 0.0); }

TEST_P(EngineArithmetic, AgreesWithDoublesWhereUpdatesRunInBackward) {
  ToyOptions o = options(0);
  o.offload.on_nonfinite = OnNonfinite::stop;
  Comparison(o, 2, 1).train(three_steps, 0.0);
}

TEST_P(EngineArithmetic, StepsOfFewerMicroBatchesThanPlannedAgreeWithDoubles) {
  static const std::string plain = [] {
    Comparison comparison(toy("device"), 3, 1);
    comparison.train(fewer_micro_batches, largest_norm);
    return comparison.digest();
  }();
  for (const int at_once : {1, 3}) {
    for (const std::optional<int> resident : {std::optional<int>(), std::optional(0)}) {
      Comparison comparison(options(resident), 3, at_once);
      comparison.train(fewer_micro_batches, largest_norm);
      EXPECT_EQ(comparison.digest(), plain) << at_once << " at once, " << resident.value_or(-1) << " resident";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, EngineArithmetic,
                         ::testing::Combine(::testing::Values("host", "stream", "device", "interleave:2", "static:0.5",
                                                              "auto"),
                                            ::testing::Values(StateFormat::fp32, StateFormat::split)));

}  // namespace
}  // namespace tandem
