#include "models/hf/hf_attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace tandem {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* full_layer = "full_attention";
constexpr const char* sliding = "sliding_attention";

/// Whether "use_sliding_window" must be true for a window.
bool is_switched(const HfArchitecture& a) {
  return a.windows == WindowFields::switched || a.windows == WindowFields::switched_all;
}

/// Whether no layer can be without the window.
bool is_of_all_layers(const HfArchitecture& a) {
  return a.windows == WindowFields::all || a.windows == WindowFields::switched_all;
}

/// The window, 0 where there is none. A default is switched off by an explicit null alone.
std::int64_t read_window(const Fields& f, const HfArchitecture& a) {
  if (a.windows == WindowFields::none) return 0;
  if (is_switched(a) && !f.boolean("use_sliding_window", false)) return 0;
  if (!f.has("sliding_window")) return f.mentions("sliding_window") ? 0 : a.sliding_window;
  const std::int64_t window = f.integer("sliding_window");
  if (window < 1) f.refuse(fmt::format("'sliding_window' is {}, expected at least 1", window));
  return window;
}

void read_rotated(const Fields& f, ModelConfig& c) {
  const std::vector<std::int64_t> given = f.integers("no_rope_layers");
  const std::int64_t interval = f.integer("no_rope_layer_interval", 4);
  if (interval < 1) f.refuse(fmt::format("'no_rope_layer_interval' is {}, expected at least 1", interval));
  if (!given.empty() && given.size() < c.attention.size()) {
    f.refuse(fmt::format("'no_rope_layers' has {} of {} layers", given.size(), c.attention.size()));
  }
  for (std::size_t i = 0; i < c.attention.size(); ++i) {  // a 1 says that the layer does rotate
    c.attention[i].rotated = given.empty() ? (static_cast<std::int64_t>(i) + 1) % interval != 0 : given[i] != 0;
  }
}

/// Whether a layer has a window where config.json does not list them: layers that know no positions, most layers, or
/// those above some.
bool windowed_by_default(const Fields& f, const HfArchitecture& a, const ModelConfig& c, std::size_t layer) {
  if (a.no_rope_layers) return !c.attention[layer].rotated;
  const auto index = static_cast<std::int64_t>(layer);
  if (a.windows != WindowFields::listed) return index >= f.integer("max_window_layers", 28);
  const std::int64_t interval = f.integer("sliding_window_pattern", a.window_interval);
  if (interval < 1) f.refuse(fmt::format("'sliding_window_pattern' is {}, expected at least 1", interval));
  return (index + 1) % interval != 0;
}

void read_listed(const Fields& f, const HfArchitecture& a, ModelConfig& c) {
  const std::vector<std::string> types = f.texts("layer_types");
  if (!types.empty() && types.size() != c.attention.size()) {
    f.refuse(fmt::format("'layer_types' has {} entries for {} layers", types.size(), c.attention.size()));
  }
  for (std::size_t i = 0; i < c.attention.size(); ++i) {
    if (!types.empty() && types[i] != full_layer && types[i] != sliding) {
      f.refuse(fmt::format("'layer_types' has '{}', which is not supported", types[i]));
    }
    const bool windowed = types.empty() ? windowed_by_default(f, a, c, i) : types[i] == sliding;
    if (windowed && c.window == 0 && !types.empty()) {
      f.refuse(fmt::format("'layer_types' has '{}', but no 'sliding_window' is in use", sliding));
    }
    c.attention[i].windowed = windowed && c.window > 0;
  }
}

void set_windows(ModelConfig& c, bool windowed) {
  for (AttentionKind& kind : c.attention) kind.windowed = windowed;
}

}  // namespace

void read_attention(const Fields& f, const HfArchitecture& a, ModelConfig& c) {
  if (c.layers < 1 || c.layers > max_layers) return;  // refused by name where the numbers are checked
  c.attention.assign(static_cast<std::size_t>(c.layers), {});
  if (a.no_rope_layers) read_rotated(f, c);
  c.window = read_window(f, a);
  if (is_of_all_layers(a)) {
    set_windows(c, c.window > 0);
  } else if (a.windows != WindowFields::none) {
    read_listed(f, a, c);
  }
  // Windows that hide nothing are dropped: the function is that of a model without.
  if (c.window >= c.positions && c.scales_all) set_windows(c, false);
  const auto is_windowed = [](const AttentionKind& kind) { return kind.windowed; };
  if (std::ranges::none_of(c.attention, is_windowed)) c.window = 0;
  if (std::ranges::count(c.attention, AttentionKind{}) == c.layers) c.attention.clear();
}

OrderedJson attention_fields(const HfArchitecture& a, const ModelConfig& c) {
  OrderedJson json = OrderedJson::object();
  const bool windowed = c.window > 0;
  if (is_switched(a) && windowed) json["use_sliding_window"] = true;
  if (a.windows == WindowFields::all || a.windows == WindowFields::listed || windowed) {
    json["sliding_window"] = windowed ? OrderedJson(c.window) : OrderedJson(nullptr);
  }
  if (a.windows == WindowFields::listed || (a.windows == WindowFields::switched && windowed)) {
    for (std::int64_t i = 0; i < c.layers; ++i)
      json["layer_types"].push_back(c.window_of(i) > 0 ? sliding : full_layer);
  }
  if (a.no_rope_layers) {
    for (std::int64_t i = 0; i < c.layers; ++i) json["no_rope_layers"].push_back(c.attention_of(i).rotated ? 1 : 0);
  }
  return json;
}

}  // namespace tandem
