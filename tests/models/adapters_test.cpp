// Adapters beside a frozen matrix compute what one matrix does that is the sum of both.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "core/numerics/random.hpp"
#include "models/transformer/adapter_modules.hpp"
#include "tests/models/rig.hpp"

namespace tandem::testing {
namespace {

constexpr std::int64_t rank = 5;
constexpr double alpha = 2.5;  // the scale is 1/2
constexpr double bar = 5e-5;   // the order of sums alone moves gradients before a norm of all heads by 2e-5

/// Every module of every block has an adapter, or of the blocks with an odd number alone. `apart`: gate and up of
/// experts do not share A.
ModelConfig adapted(ModelConfig config, bool odd_alone = false, bool apart = false) {
  LoraConfig lora{.rank = rank, .alpha = alpha};
  lora.modules.resize(static_cast<std::size_t>(config.layers));
  for (std::size_t block = odd_alone ? 1 : 0; block < lora.modules.size(); block += odd_alone ? 2 : 1) {
    for (const AdapterModule& module : adapter_modules(config)) {
      const bool is_both = module.name == "mlp.experts.gate_up_proj";
      const bool is_half = module.name == "mlp.experts.gate_proj" || module.name == "mlp.experts.up_proj";
      if (apart ? !is_both : !is_half) lora.adapt(block, {module.name});
    }
  }
  config.lora = lora;
  return config;
}

void leave_out_experts(LoraConfig& lora) {
  for (auto& modules : lora.modules) {
    std::erase_if(modules, [](const LoraModule& m) { return m.name.find("experts") != m.name.npos; });
  }
}

/// Linear layers of every block, with a mixture's router.
std::vector<LinearLayer> layers_of(const ModelConfig& config) {
  std::vector<LinearLayer> layers = linear_layers(config);
  if (config.experts > 0) layers.push_back({router_module, config.experts, config.width});
  return layers;
}

/// The module that a linear layer's adapter belongs to; null: none has one.
const AdapterModule* module_of(const std::vector<AdapterModule>& modules, const ModelConfig& config, std::int64_t block,
                               const LinearLayer& of) {
  for (const AdapterModule& module : modules) {
    const auto is_it = [&](const LinearLayer& layer) { return layer.module == of.module; };
    if (config.lora->adapts(block, module.name) && std::ranges::any_of(module.layers, is_it)) return &module;
  }
  return nullptr;
}

/// A whole number from -most to most that depends on name and index alone.
float whole(const std::string& name, std::size_t i, std::int64_t most) {
  const std::uint32_t word = numerics::philox_block(7, std::hash<std::string>{}(name), i).word[0];
  return static_cast<float>(static_cast<std::int64_t>(word % static_cast<std::uint64_t>(2 * most + 1)) - most);
}

/// Values such that W, A, B and W + scale B A are all exact in bf16: multiples of 1/256 below 1/2 where A and B are
/// thin.
std::vector<float> exact_values(const Parameter& p) {
  std::vector<float> values(static_cast<std::size_t>(p.count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_adapter(p)) {
      values[i] = i % 7 == 0 ? whole(p.full_name, i, 1) / 8.0F : 0.0F;
    } else if (p.shape.rank() > 1) {
      values[i] = whole(p.full_name, i, 40) / 256.0F;
    } else {
      values[i] = 1.0F + whole(p.full_name, i, 3) / 64.0F;
    }
  }
  return values;
}

/// The matrices of a linear layer in one block.
struct Matrices {
  std::vector<float> a, b;  ///< (E, r, I), (E, r, O)
};

/// scale B A, (E, O, I).
std::vector<float> product_of(const LinearLayer& of, const Matrices& m) {
  const std::int64_t experts = std::max<std::int64_t>(1, of.experts);
  std::vector<float> sum(static_cast<std::size_t>(experts * of.outputs * of.inputs));
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t k = 0; k < rank; ++k) {
      const float* const a = m.a.data() + (e * rank + k) * of.inputs;
      const float* const b = m.b.data() + (e * rank + k) * of.outputs;
      for (std::int64_t o = 0; o < of.outputs; ++o) {
        float* const row = sum.data() + (e * of.outputs + o) * of.inputs;
        for (std::int64_t i = 0; i < of.inputs; ++i) row[i] += static_cast<float>(alpha / rank) * b[o] * a[i];
      }
    }
  }
  return sum;
}

/// Gradients of A and B from that of the sum of both matrices.
Matrices gradients_of(const LinearLayer& of, const Matrices& m, const std::vector<float>& dsum) {
  const std::int64_t experts = std::max<std::int64_t>(1, of.experts);
  std::vector<double> a(m.a.size()), b(m.b.size());
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t k = 0; k < rank; ++k) {
      const auto at_a = static_cast<std::size_t>((e * rank + k) * of.inputs);
      const auto at_b = static_cast<std::size_t>((e * rank + k) * of.outputs);
      for (std::int64_t o = 0; o < of.outputs; ++o) {
        const float* const row = dsum.data() + (e * of.outputs + o) * of.inputs;
        for (std::int64_t i = 0; i < of.inputs; ++i) {
          const auto in = static_cast<std::size_t>(i), out = static_cast<std::size_t>(o);
          a[at_a + in] += alpha / rank * static_cast<double>(m.b[at_b + out]) * static_cast<double>(row[i]);
          b[at_b + out] += alpha / rank * static_cast<double>(m.a[at_a + in]) * static_cast<double>(row[i]);
        }
      }
    }
  }
  return {{a.begin(), a.end()}, {b.begin(), b.end()}};
}

double relative_distance(const std::vector<float>& ours, const std::vector<float>& expected) {
  double most = 0.0, off = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(expected[i])));
    off = std::max(off, std::abs(static_cast<double>(ours.at(i)) - static_cast<double>(expected[i])));
  }
  return most == 0.0 ? off : off / most;
}

class AdaptersOf : public ::testing::TestWithParam<std::string> {
 protected:
  Fixture fixture{GetParam()};
  RunShape shape = shape_of(fixture, false);

  void set_batch(Rig& rig) {
    rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
  }
  static void load(Rig& rig) {
    for (const Parameter* p : rig.parameters().layout().owned_parameters()) rig.parameters().set(*p, exact_values(*p));
  }
  /// The matrices of a layer in one block, as exact_values() has them.
  static Matrices matrices(const ParameterLayout& layout, std::int64_t block, const AdapterModule& module,
                           const LinearLayer& of) {
    const std::string name = "block." + std::to_string(block) + ".";
    return {exact_values(layout.parameter(name + a_of(module))), exact_values(layout.parameter(name + b_of(of)))};
  }
  /// A model without adapters whose matrices are the sums.
  std::unique_ptr<Rig> merged(const ModelConfig& config) {
    ModelConfig plain = config;
    plain.lora.reset();
    auto rig = std::make_unique<Rig>(plain, shape);
    load(*rig);
    const ParameterLayout layout = layout_of(config);
    const std::vector<AdapterModule> modules = adapter_modules(config);
    for (std::int64_t block = 0; block < config.layers; ++block) {
      for (const LinearLayer& of : layers_of(config)) {
        const AdapterModule* const module = module_of(modules, config, block, of);
        if (module == nullptr) continue;
        const Parameter& p = rig->parameters().layout().parameter(weight_name(block, of));
        std::vector<float> sum = exact_values(p);
        const std::vector<float> added = product_of(of, matrices(layout, block, *module, of));
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += added[i];
        rig->parameters().set(p, sum);
      }
    }
    return rig;
  }
  static std::string weight_name(std::int64_t block, const LinearLayer& of) {
    return "block." + std::to_string(block) + "." + of.module + ".weight";
  }
  /// Values of `from` as `to`, (r, columns) or (E, r, columns) of a larger r, with zeros in the rows that it lacks.
  static std::vector<float> padded(const std::vector<float>& values, const Parameter& from, const Parameter& to) {
    const int last = to.shape.rank() - 1;
    const std::int64_t columns = to.shape[last], rows = from.shape[last - 1] * columns,
                       wide = to.shape[last - 1] * columns;
    std::vector<float> all(static_cast<std::size_t>(to.count));
    for (std::int64_t i = 0; i < from.count; ++i) {
      all[static_cast<std::size_t>(i / rows * wide + i % rows)] = values[static_cast<std::size_t>(i)];
    }
    return all;
  }

  void expect_gradients_of_the_sum(const ModelConfig& config);
};

void AdaptersOf::expect_gradients_of_the_sum(const ModelConfig& config) {
  const std::unique_ptr<Rig> expected = merged(config);
  Rig ours(config, shape);
  load(ours);
  set_batch(*expected);
  set_batch(ours);
  EXPECT_LE(relative_distance(ours.train(1.0F), expected->train(1.0F)), bar);
  const ParameterLayout& layout = ours.parameters().layout();
  const auto gradient = [&](const std::string& name) { return ours.parameters().gradient(layout.parameter(name)); };
  double smallest = 1.0;
  const std::vector<AdapterModule> modules = adapter_modules(config);
  for (std::int64_t block = 0; block < config.layers; ++block) {
    const std::string in_block = "block." + std::to_string(block) + ".";
    std::map<std::string, std::vector<float>> of_a;  // gradients of A, each summed over the layers that share it
    for (const LinearLayer& of : layers_of(config)) {
      const std::string name = weight_name(block, of);
      const std::vector<float> dsum = expected->parameters().gradient(expected->parameters().layout().parameter(name));
      EXPECT_LE(relative_distance(gradient(name), dsum), bar) << name;
      const AdapterModule* const module = module_of(modules, config, block, of);
      if (module == nullptr) continue;
      const Matrices of_sum = gradients_of(of, matrices(layout, block, *module, of), dsum);
      EXPECT_LE(relative_distance(gradient(in_block + b_of(of)), of_sum.b), bar) << name;
      std::vector<float>& a = of_a[in_block + a_of(*module)];
      a.resize(of_sum.a.size());
      std::ranges::transform(a, of_sum.a, a.begin(), std::plus<>());
    }
    for (const auto& [name, a] : of_a) {
      EXPECT_LE(relative_distance(gradient(name), a), bar) << name;
      smallest = std::min(smallest, relative_distance(a, std::vector<float>(a.size())));
    }
  }
  EXPECT_GT(smallest, 0.0) << "a gradient that is all zeros proves nothing";
}

TEST_P(AdaptersOf, LossesAndGradientsAreThoseOfTheSumOfBothMatrices) {
  for (const bool odd_alone : {false, true}) expect_gradients_of_the_sum(adapted(fixture.config(), odd_alone));
  if (fixture.config().experts > 0) expect_gradients_of_the_sum(adapted(fixture.config(), false, /*apart=*/true));
}

/// Blocks may differ in rank and scale.
TEST_P(AdaptersOf, AnotherRankOfABlockIsPaddingOfZeros) {
  const ModelConfig narrow = adapted(fixture.config());
  ModelConfig wide = narrow;
  for (LoraModule& module : wide.lora->modules.at(0)) {
    module.rank = rank + 2;
    module.alpha = alpha * (rank + 2) / rank;  // alpha for the same scale
  }
  Rig expected(narrow, shape), ours(wide, shape);
  load(expected);
  load(ours);
  for (const Parameter* p : ours.parameters().layout().owned_parameters()) {
    const Parameter& from = expected.parameters().layout().parameter(p->full_name);
    if (from.count != p->count) ours.parameters().set(*p, padded(exact_values(from), from, *p));
  }
  set_batch(expected);
  set_batch(ours);
  EXPECT_LE(relative_distance(ours.train(1.0F), expected.train(1.0F)), bar);
}

TEST_P(AdaptersOf, RecomputeChangesNoBit) {
  const ModelConfig config = adapted(fixture.config());
  const auto run = [&](const RunShape& of) {
    Rig rig(config, of);
    load(rig);
    set_batch(rig);
    rig.train(1.0F);
    return rig.gradients();
  };
  const Gradients expected = run(shape);
  for (const bool selective : {false, true}) {
    RunShape other = shape;
    other.selective = selective;
    for (other.recomputed_blocks = 0; other.recomputed_blocks <= config.layers; ++other.recomputed_blocks) {
      EXPECT_EQ(run(other), expected) << activations_of(config, other);
    }
  }
}

TEST_P(AdaptersOf, DecodingSeesTheSameModel) {
  const ModelConfig config = adapted(fixture.config());
  RunShape forward{.batch = 1, .sequence = 6, .training = false}, cached = forward;
  cached.batch = 2;
  cached.cached = 6;
  Rig whole_sequence(config, forward), decoding(config, cached);
  load(whole_sequence);
  load(decoding);
  const std::vector<std::int32_t> tokens = ramp(6, 3);
  whole_sequence.set_batch(tokens, std::vector<std::int32_t>(6, -1));
  const std::vector<float> expected = whole_sequence.logits(5);
  const std::vector<CachedPart> prompt{{.tokens = 5}}, next{{.tokens = 1, .decodes = true}};
  decoding.decode({{tokens.begin(), tokens.begin() + 5}, {0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}}, prompt);
  const std::vector<float> last = decoding.decode({{tokens[5]}, {-5}, {0}}, next);
  ASSERT_GE(last.size(), expected.size());
  EXPECT_LE(relative_distance({last.begin(), last.begin() + std::ssize(expected)}, expected), bar);
}

/// Losses and gradients of the micro-batch with that number, with dropout.
std::pair<std::vector<float>, Gradients> dropped(const Fixture& fixture, ModelConfig config, const RunShape& shape,
                                                 std::uint64_t draw) {
  leave_out_experts(*config.lora);
  config.lora->dropout = 0.25;
  config.lora->seed = 9;
  Rig rig(config, shape);
  for (const Parameter* p : rig.parameters().layout().owned_parameters()) rig.parameters().set(*p, exact_values(*p));
  rig.set_batch(fixture["tokens"].as<std::int32_t>(), fixture["targets"].as<std::int32_t>());
  rig.model().set_draw(0, draw);
  std::vector<float> losses = rig.train(1.0F);
  return {std::move(losses), rig.gradients()};
}

TEST_P(AdaptersOf, DropoutIsAFunctionOfTheMicroBatch) {
  const ModelConfig config = adapted(fixture.config());
  const auto expected = dropped(fixture, config, shape, 3);
  EXPECT_NE(dropped(fixture, config, shape, 4).first, expected.first);
  for (const bool selective : {false, true}) {
    RunShape other = shape;
    other.selective = selective;
    for (other.recomputed_blocks = 0; other.recomputed_blocks <= config.layers; ++other.recomputed_blocks) {
      EXPECT_EQ(dropped(fixture, config, other, 3), expected) << activations_of(config, other);
    }
  }
}

/// The loss moves along the gradient as the gradient says: what is dropped in forward is dropped in backward. The
/// matrices of blocks are zero, so that gradients pass through adapters alone.
TEST_P(AdaptersOf, DropoutHasItsOwnGradient) {
  ModelConfig config = adapted(fixture.config());
  leave_out_experts(*config.lora);
  config.lora->dropout = 0.25;
  Rig rig(config, shape);
  const ParameterLayout& layout = rig.parameters().layout();
  const auto train = [&](double moved, const Gradients* along) {
    for (const Parameter* p : layout.owned_parameters()) {
      std::vector<float> values = exact_values(*p);
      const bool of_block = p->layer > 0 && p->layer <= config.layers;
      if (of_block && p->shape.rank() > 1 && !is_adapter(*p)) std::ranges::fill(values, 0.0F);
      if (along != nullptr && is_adapter(*p)) {
        const std::vector<float>& g = along->at(p->full_name);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] += static_cast<float>(moved * static_cast<double>(g[i]));
      }
      rig.parameters().set(*p, values);
    }
    set_batch(rig);
    rig.model().set_draw(0, 5);
    double sum = 0.0;
    for (const float loss : rig.train(1.0F)) sum += static_cast<double>(loss);
    return sum;
  };
  train(0.0, nullptr);
  Gradients signs;  // steps of one size from zero, which bf16 holds
  double slope = 0.0;
  for (const Parameter* p : layout.owned_parameters()) {
    if (!is_adapter(*p)) continue;
    const std::vector<float> values = exact_values(*p);
    std::vector<float> g = rig.parameters().gradient(*p);
    for (std::size_t i = 0; i < g.size(); ++i) {
      if (values[i] == 0.0F) slope += std::abs(static_cast<double>(g[i]));
      g[i] = values[i] != 0.0F ? 0.0F : g[i] > 0.0F ? 1.0F : -1.0F;
    }
    signs[p->full_name] = std::move(g);
  }
  constexpr double step = 1.0 / 8192;
  const double measured = (train(step, &signs) - train(-step, &signs)) / (2.0 * step);
  EXPECT_NEAR(measured / slope, 1.0, 0.025);
}

INSTANTIATE_TEST_SUITE_P(Models, AdaptersOf, ::testing::ValuesIn(fixture_names()));

TEST(Adapters, BeginAsTheModelThatTheyAreAddedTo) {
  const ModelConfig plain = tiny("tiny-llama"), config = adapted(plain);
  const RunShape shape{.batch = 1, .sequence = 8};
  Rig without(plain, shape), with(config, shape);
  without.load_random(3);
  with.load_random(3);
  for (Rig* rig : {&without, &with}) rig->set_batch(ramp(8, 1), ramp(8, 8));
  EXPECT_EQ(with.train(1.0F), without.train(1.0F));
}

TEST(Adapters, AreInitializedAsPeftDoes) {
  const ModelConfig config = adapted(tiny("tiny-llama"));
  const ParameterLayout layout = layout_of(config);
  const Parameter& a = layout.parameter("block.1.mlp.down_proj" + std::string(lora_a));
  const Parameter& b = layout.parameter("block.1.mlp.down_proj" + std::string(lora_b));
  std::vector<float> values(static_cast<std::size_t>(a.count)), part(7);
  initialize_parameter(config, a, 42, 0, values);
  initialize_parameter(config, a, 42, 9, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), values.begin() + 9));
  const double bound = 1.0 / std::sqrt(static_cast<double>(config.ffn));
  double squares = 0.0;
  for (const float x : values) {
    EXPECT_LE(std::abs(x), bound);
    squares += static_cast<double>(x) * static_cast<double>(x);
  }
  EXPECT_NEAR(squares / static_cast<double>(a.count), bound * bound / 3.0, 0.1 * bound * bound);
  std::vector<float> zeros(static_cast<std::size_t>(b.count), 1.0F);
  initialize_parameter(config, b, 42, 0, zeros);
  EXPECT_EQ(zeros, std::vector<float>(zeros.size()));
}

}  // namespace
}  // namespace tandem::testing
