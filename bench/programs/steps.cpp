// Training steps of a transformer on the host device, a few for each line "step" on standard input, answered with
// the seconds of one; "facts" answers with one line of JSON about the plan. Contestants of `scripts/bench overlap` and
// `streaming` are this program with other settings.
//
//   bench_steps NAME=VALUE...   names and defaults: see Settings
#include <array>
#include <chrono>
#include <exception>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <tandem/tandem.hpp>

#include "models/transformer/transformer.hpp"
#include "scheduler/tasks/traffic.hpp"
#include "train/config/config.hpp"
#include "train/hf/trained_layout.hpp"

namespace {

using namespace tandem;

struct Settings {
  std::int64_t layers = 12, width = 256, sequence = 128, batch = 2;
  std::string policy = "host";
  std::int64_t prefetch = 2, resident = 0, overlap = 1, subgroup = 0;
  std::int64_t threads = 1;  ///< threads of the device's kernels, and of the update
  double link = 0.0;         ///< bytes a second
  double update_rate = 0.0;  ///< parameters a second
  std::string state = "fp32", speculate = "off";
  double clip = 1.0;
  double clip_of_norm = 0.0;  ///< share of the norm of the step before, in place of `clip`; 0: none
  std::string family = "gpt2";
  std::int64_t vocabulary = 0;  ///< 0: the built-in shape's
  std::int64_t recompute = 1;   ///< 0: all activations are kept
  std::int64_t lora = 0;        ///< rank of adapters of all linear layers of blocks, with all else frozen; 0: none
  std::string base = "bf16";    ///< format of frozen matrices
};

/// The value of that name.
template <class Value, std::size_t count>
Value named(const std::string& name, const std::array<Value, count>& values) {
  for (const Value value : values) {
    if (name_of(value) == name) return value;
  }
  throw UsageError(name, "no such value");
}

Settings read(int argc, char** argv) {
  Settings s;
  const std::map<std::string, std::function<void(const std::string&)>> names = {
      {"layers", [&](const std::string& v) { s.layers = std::stoll(v); }},
      {"width", [&](const std::string& v) { s.width = std::stoll(v); }},
      {"sequence", [&](const std::string& v) { s.sequence = std::stoll(v); }},
      {"batch", [&](const std::string& v) { s.batch = std::stoll(v); }},
      {"policy", [&](const std::string& v) { s.policy = v; }},
      {"prefetch", [&](const std::string& v) { s.prefetch = std::stoll(v); }},
      {"resident", [&](const std::string& v) { s.resident = std::stoll(v); }},
      {"overlap", [&](const std::string& v) { s.overlap = std::stoll(v); }},
      {"subgroup", [&](const std::string& v) { s.subgroup = std::stoll(v); }},
      {"threads", [&](const std::string& v) { s.threads = std::stoll(v); }},
      {"link", [&](const std::string& v) { s.link = std::stod(v); }},
      {"update_rate", [&](const std::string& v) { s.update_rate = std::stod(v); }},
      {"state", [&](const std::string& v) { s.state = v; }},
      {"speculate", [&](const std::string& v) { s.speculate = v; }},
      {"clip", [&](const std::string& v) { s.clip = std::stod(v); }},
      {"family", [&](const std::string& v) { s.family = v; }},
      {"vocabulary", [&](const std::string& v) { s.vocabulary = std::stoll(v); }},
      {"recompute", [&](const std::string& v) { s.recompute = std::stoll(v); }},
      {"lora", [&](const std::string& v) { s.lora = std::stoll(v); }},
      {"base", [&](const std::string& v) { s.base = v; }},
      {"clip_of_norm", [&](const std::string& v) { s.clip_of_norm = std::stod(v); }}};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto equals = word.find('=');
    const auto name = names.find(word.substr(0, equals));
    if (equals == std::string::npos || name == names.end()) throw UsageError(word, "no such setting");
    name->second(word.substr(equals + 1));
  }
  return s;
}

ModelConfig model_of(const Settings& s) {
  ModelConfig c = builtin_model("tiny-" + s.family);
  c.width = s.width;
  c.layers = s.layers;
  c.heads = s.width / 64;
  c.kv_heads = c.heads;
  c.head_dim = 64;
  c.ffn = 4 * s.width;
  c.positions = s.sequence;
  if (s.vocabulary > 0) c.vocabulary = s.vocabulary;
  if (s.lora == 0) return c;
  c.lora = LoraConfig{.rank = s.lora, .alpha = 2.0 * static_cast<double>(s.lora)};
  std::vector<std::string> modules;
  for (const LinearLayer& layer : linear_layers(c)) modules.push_back(layer.module);
  for (std::int64_t block = 0; block < c.layers; ++block) c.lora->adapt(static_cast<std::size_t>(block), modules);
  return c;
}

/// The model's layout; with adapters all else is frozen, and the matrices of blocks are stored as `base` says.
ParameterLayout layout_of(const ModelConfig& config, const Settings& s) {
  if (!config.lora) return layout_of(config);
  TrainConfig run;
  set_config_field(run, *find_config_field("base"), {s.base});
  return trained_layout(run, config);
}

/// Bytes of the blocks' frozen matrices, as they are stored, and their elements.
std::pair<std::size_t, std::int64_t> base_of(const ParameterLayout& layout) {
  std::size_t bytes = 0;
  std::int64_t elements = 0;
  for (const Layer& layer : layout.layers()) {
    const auto between = [&](std::int64_t begin, std::int64_t end) {
      return layer.weight_offset(end) - layer.weight_offset(begin);
    };
    for (const Parameter& p : layer.parameters) {
      const bool of_block = p.layer > 0 && p.layer + 1 < layout.layer_count();
      if (!of_block || p.options.trainable || p.shape.rank() < 2) continue;
      bytes += between(p.offset, p.offset + p.padded_count);
      elements += p.count;
      if (!p.coded()) continue;
      bytes += static_cast<std::size_t>(scale_floats(p.options.code, p.coded_shape())) * sizeof(float);
    }
  }
  return {bytes, elements};
}

class Steps {
 public:
  explicit Steps(const Settings& s)
      : config_(model_of(s)),
        layout_(layout_of(config_, s)),
        model_(config_,
               {.batch = s.batch, .sequence = s.sequence, .recomputed_blocks = s.recompute != 0 ? config_.layers : 0}),
        device_(open_device("host", {.memory = std::size_t{4} << 30,
                                     .threads = static_cast<int>(s.threads),
                                     .update_threads = static_cast<int>(s.threads),
                                     .link_bytes_per_second = s.link,
                                     .update_parameters_per_second = s.update_rate})),
        stream_(device_->make_stream("compute")) {
    options_.policy = parse_policy(s.policy);
    if (s.prefetch > 0) options_.prefetch_layers = static_cast<int>(s.prefetch);
    if (options_.policy.kind != Policy::Kind::device) options_.resident_layers = static_cast<int>(s.resident);
    if (s.subgroup > 0) options_.subgroup_size = s.subgroup;
    options_.overlap = s.overlap != 0;
    options_.state = named(s.state, state_formats);
    options_.speculate = named(s.speculate, std::array{Speculate::off, Speculate::automatic, Speculate::on});
    clip_ = s.clip;
    clip_of_norm_ = s.clip_of_norm;
    plan_ = make_plan(layout_, options_, profile_of(*device_));
    std::size_t bytes = 0;
    for (const auto& row : model_.memory(device_->ops())) bytes += row.bytes;
    activations_ = device_->allocate(bytes, "activations");
    Arena arena(activations_.data(), bytes, "activations");
    model_.bind(*device_, arena, stream_);
    engine_ = std::make_unique<OffloadEngine>(*device_, layout_, options_, plan_);
    engine_->initialize([&](const Parameter& p, std::int64_t first, std::span<float> values) {
      initialize_parameter(config_, p, 1, first, values, &device_->host_kernels().parallel());
    });
    fill_batch(s);
  }
  ~Steps() { model_.unbind(); }

  /// Seconds of a step, as the mean of several, the last one's updates included: they must not run on while another
  /// contestant is timed.
  double seconds_of_a_step() {
    constexpr int at_once = 4;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < at_once; ++i) {
      engine_->begin_step({.lr = 1e-4, .max_grad_norm = clip_});
      model_.train(*engine_, 1e-3F, stream_);
      norm_ = engine_->end_step().gradient_norm;
      if (clip_of_norm_ > 0.0) clip_ = clip_of_norm_ * norm_;
    }
    engine_->wait();
    device_->synchronize(stream_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / at_once;
  }

  std::string facts() const {
    const Traffic traffic = traffic_of_step(layout_, plan_, 1);
    std::size_t weights = 0;
    for (const MemoryEntry& e : plan_.memory.entries) {
      if (e.place == Place::device && e.name.starts_with("weights")) weights += e.bytes;
    }
    return nlohmann::json{{"to_device", traffic.host_to_device},
                          {"to_host", traffic.device_to_host},
                          {"engine_device_bytes", plan_.memory.device_bytes()},
                          {"weight_bytes", weights},
                          {"parameters", layout_.parameter_count()},
                          {"base_bytes", base_of(layout_).first},
                          {"base_elements", base_of(layout_).second},
                          {"confirmed_steps", engine_->counters().confirmed_steps},
                          {"rolled_back_steps", engine_->counters().rolled_back_steps},
                          {"speculated_parameters", engine_->counters().parameters_speculated},
                          {"norm", norm_}}
        .dump();
  }

 private:
  void fill_batch(const Settings& s) {
    std::mt19937 random(1);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(s.batch * s.sequence));
    for (std::int32_t& t : tokens) t = static_cast<std::int32_t>(random() % static_cast<unsigned>(config_.vocabulary));
    const std::size_t bytes = tokens.size() * sizeof(std::int32_t);
    device_->copy(model_.tokens().data, tokens.data(), bytes, CopyKind::host_to_device, stream_);
    device_->copy(model_.targets().data, tokens.data(), bytes, CopyKind::host_to_device, stream_);
    device_->synchronize(stream_);
  }

  ModelConfig config_;
  ParameterLayout layout_;
  Transformer model_;
  OffloadOptions options_;
  double clip_ = 1.0, clip_of_norm_ = 0.0;
  double norm_ = 0.0;  ///< gradient norm of the last step
  std::unique_ptr<Device> device_;
  Plan plan_;
  MemoryBlock activations_;
  std::unique_ptr<OffloadEngine> engine_;
  Stream stream_;
};

int serve(const Settings& settings) {
  Steps steps(settings);
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "step") {
      std::cout << std::setprecision(9) << steps.seconds_of_a_step() << std::endl;
    } else if (line == "facts") {
      std::cout << steps.facts() << std::endl;
    } else {
      std::cerr << "bench_steps: unknown request " << line << '\n';
      return 2;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return serve(read(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "bench_steps: " << error.what() << '\n';
    return 1;
  }
}
