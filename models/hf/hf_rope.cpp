#include "models/hf/hf_rope.hpp"

#include <fmt/format.h>

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>

namespace tandem {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* original_key = "original_max_position_embeddings";

void require(const Fields& f, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (!f.has(key)) f.refuse(fmt::format("'{}' is missing", key));
  }
}

std::optional<double> optional_number(const Fields& f, const char* key) {
  if (!f.has(key)) return std::nullopt;
  return f.number(key, 0.0);
}

Llama3RopeScaling read_llama3(const Fields& f) {
  require(f, {"factor", "low_freq_factor", "high_freq_factor", original_key});
  return {.factor = f.number("factor", 0),
          .low_freq_factor = f.number("low_freq_factor", 0),
          .high_freq_factor = f.number("high_freq_factor", 0),
          .original_positions = f.number(original_key, 0)};
}

YarnRopeScaling read_yarn(const Fields& f, double original) {
  require(f, {"factor"});
  return {.factor = f.number("factor", 0),
          .original_positions = original,
          .beta_fast = f.number("beta_fast", 32.0),
          .beta_slow = f.number("beta_slow", 1.0),
          .attention_factor = optional_number(f, "attention_factor"),
          .mscale = optional_number(f, "mscale"),
          .mscale_all_dim = optional_number(f, "mscale_all_dim"),
          .truncate = f.boolean("truncate", true)};
}

LongRopeScaling read_longrope(const Fields& f, double original) {
  require(f, {"short_factor", "long_factor"});
  return {.short_factors = f.numbers("short_factor"),
          .long_factors = f.numbers("long_factor"),
          .original_positions = original,
          .factor = optional_number(f, "factor"),
          .attention_factor = optional_number(f, "attention_factor")};
}

/// `original`: the positions that the model was first trained on.
std::optional<RopeScaling> read_scaling(const Fields& f, const ModelConfig& c, double original) {
  std::string type = f.text("rope_type", f.text("type", "default"));
  // The first files of Phi-3 have these names for it.
  if (c.fused_tensors && (type == "su" || type == "yarn")) type = "longrope";
  if (type == "default") return std::nullopt;
  if (type == "llama3") return read_llama3(f);
  if (type == "yarn") return read_yarn(f, original);
  if (type == "longrope") return read_longrope(f, original);
  if (type != "linear" && type != "dynamic") {
    f.refuse(fmt::format("the RoPE type '{}' is not supported", type),
             "one of 'default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'");
  }
  require(f, {"factor"});
  const double factor = f.number("factor", 0);
  if (type == "linear") return LinearRopeScaling{factor};
  return DynamicRopeScaling{factor};
}

/// Positions before scaling: a field beside the scaling comes before one in it; the class of Phi-3 has a default.
double original_positions(const Fields& f, const Fields& scaling, const ModelConfig& c) {
  if (c.fused_tensors || f.has(original_key)) return f.number(original_key, 4096.0);
  return scaling.number(original_key, static_cast<double>(c.positions));
}

/// The RoPE of layers with a window, which has no scaling.
void read_windowed(const Fields& f, ModelConfig& c) {
  if (c.scales_all) f.refuse("'sliding_attention': layers with a window have no RoPE of their own in this class");
  if (const std::string type = f.text("rope_type", "default"); type != "default") {
    f.refuse(fmt::format("the RoPE type '{}' is not supported of layers with a window", type));
  }
  c.window_theta = f.number("rope_theta", c.window_theta.value_or(c.rope_theta));
}

struct ScalingFields {
  OrderedJson json = OrderedJson::object();

  void set(const char* key, std::optional<double> value) {
    if (value) json[key] = *value;
  }
  /// Writes the positions as an integer, as in files.
  void set_original(double positions) { json[original_key] = static_cast<std::int64_t>(positions); }

  void operator()(const LinearRopeScaling& s) { json = {{"rope_type", "linear"}, {"factor", s.factor}}; }
  void operator()(const DynamicRopeScaling& s) { json = {{"rope_type", "dynamic"}, {"factor", s.factor}}; }
  void operator()(const Llama3RopeScaling& s) {
    json = {{"rope_type", "llama3"},
            {"factor", s.factor},
            {"low_freq_factor", s.low_freq_factor},
            {"high_freq_factor", s.high_freq_factor}};
    set_original(s.original_positions);
  }
  void operator()(const YarnRopeScaling& s) {
    json = {{"rope_type", "yarn"},
            {"factor", s.factor},
            {"beta_fast", s.beta_fast},
            {"beta_slow", s.beta_slow},
            {"truncate", s.truncate}};
    set("attention_factor", s.attention_factor);
    set("mscale", s.mscale);
    set("mscale_all_dim", s.mscale_all_dim);
    set_original(s.original_positions);
  }
  void operator()(const LongRopeScaling& s) {
    json = {{"rope_type", "longrope"}, {"short_factor", s.short_factors}, {"long_factor", s.long_factors}};
    set("factor", s.factor);
    set("attention_factor", s.attention_factor);
    set_original(s.original_positions);
  }
};

}  // namespace

void read_rope(const Fields& f, const HfArchitecture& a, ModelConfig& c) {
  c.rope_theta = f.number("rope_theta", a.rope_theta);
  if (a.window_theta != 0.0) c.window_theta = f.number("rope_local_base_freq", a.window_theta);
  c.rotated_share = f.number("partial_rotary_factor", 1.0);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* nested = f.object(key);
    if (nested == nullptr) continue;
    const Fields outer(*nested, fmt::format("{}, '{}'", f.where(), key));
    const Json* full = outer.object("full_attention");
    const Fields inner(full == nullptr ? *nested : *full, outer.where());
    c.rope_theta = inner.number("rope_theta", c.rope_theta);
    c.rotated_share = inner.number("partial_rotary_factor", c.rotated_share);
    if (const auto scaling = read_scaling(inner, c, original_positions(f, inner, c))) c.rope_scaling = scaling;
    const Json* windowed = outer.object("sliding_attention");
    if (windowed != nullptr) read_windowed(Fields(*windowed, outer.where()), c);
  }
  if (c.window_theta == c.rope_theta) c.window_theta.reset();
}

OrderedJson rope_fields(const ModelConfig& c) {
  OrderedJson json = {{"rope_theta", c.rope_theta}, {"rope_scaling", nullptr}};
  if (c.rotated_share != 1.0) json["partial_rotary_factor"] = c.rotated_share;
  if (c.rope_scaling) {
    ScalingFields scaling;
    std::visit(scaling, *c.rope_scaling);
    json["rope_scaling"] = scaling.json;
    if (c.fused_tensors && scaling.json.contains(original_key)) json[original_key] = scaling.json[original_key];
  }
  if (c.scales_all) return json;
  OrderedJson full = c.rope_scaling ? json["rope_scaling"] : OrderedJson{{"rope_type", "default"}};
  full["rope_theta"] = c.rope_theta;
  const double windowed = c.window_theta.value_or(c.rope_theta);
  if (c.window_theta) json["rope_local_base_freq"] = windowed;
  json["rope_parameters"] = {{"full_attention", full},
                             {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", windowed}}}};
  return json;
}

}  // namespace tandem
