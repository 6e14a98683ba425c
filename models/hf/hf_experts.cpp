#include "models/hf/hf_experts.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "core/base/json_text.hpp"

namespace tandem {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// transformers 5 writes either name, whichever the class had first.
std::int64_t count_of(const Fields& f, const HfArchitecture& a) {
  for (const char* key : {"num_experts", "num_local_experts"}) {
    if (f.has(key)) return f.integer(key);
  }
  return a.experts.count;
}

void refuse_no_experts(const Fields& f) {
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (f.integer(key, 0) > 0) f.refuse(fmt::format("'{}': the architecture has no experts", key));
  }
}

void refuse_unsupported_experts(const Fields& f) {
  if (f.boolean("output_router_logits", false)) {
    f.refuse("'output_router_logits' is true: the loss that balances experts is not supported", "set it to false");
  }
  if (f.number("router_jitter_noise", 0.0) != 0.0) f.refuse("'router_jitter_noise' is not supported", "set it to 0");
  if (f.integer("decoder_sparse_step", 1) != 1) {
    f.refuse("'decoder_sparse_step' is not 1: experts in some layers alone are not supported");
  }
  if (!f.integers("mlp_only_layers").empty()) {
    f.refuse("'mlp_only_layers': experts in some layers alone are not supported");
  }
}

/// Passes on fields for layers without experts, and for the loss that balances experts.
void pass_on(const Fields& f, const HfArchitecture& a, ModelConfig& c) {
  const auto keep = [&](const char* key, const OrderedJson& value) { c.passed_on.emplace_back(key, json_text(value)); };
  const char* const width = "intermediate_size";
  const char* const weight = "router_aux_loss_coef";
  if (a.experts.width_key != std::string_view(width) && f.has(width)) keep(width, f.integer(width));
  if (f.has(weight)) keep(weight, f.number(weight, 0.0));
}

}  // namespace

void read_experts(const Fields& f, const HfArchitecture& a, ModelConfig& c) {
  if (a.experts.count == 0) return refuse_no_experts(f);
  refuse_unsupported_experts(f);
  c.experts = count_of(f, a);
  if (c.experts < 1) f.refuse(fmt::format("the number of experts is {}, expected at least 1", c.experts));
  c.chosen_experts = f.integer("num_experts_per_tok", a.experts.chosen);
  c.normalized_weights = a.experts.normalized || f.boolean("norm_topk_prob", false);
  c.expert_names = a.experts.names;
  c.ffn = f.integer(a.experts.width_key);
  pass_on(f, a, c);
}

OrderedJson expert_fields(const HfArchitecture& a, const ModelConfig& c) {
  if (c.experts == 0) return OrderedJson::object();
  OrderedJson json = {{a.experts.count_key, c.experts},
                      {"num_experts_per_tok", c.chosen_experts},
                      {a.experts.width_key, c.ffn},
                      {"output_router_logits", false}};
  if (!a.experts.normalized) json["norm_topk_prob"] = c.normalized_weights;
  return json;
}

}  // namespace tandem
