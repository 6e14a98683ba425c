#include "train/hf/quantized_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct Method {
  std::string_view key, name;
};
/// Methods of transformers by quant_method.
constexpr Method methods[] = {{"gptq", "GPTQ"},         {"awq", "AWQ"},
                              {"mxfp4", "MXFP4"},       {"compressed-tensors", "compressed-tensors"},
                              {"fp8", "FP8 in blocks"}, {"fbgemm_fp8", "FP8 by FBGEMM"},
                              {"modelopt", "ModelOpt"}, {"torchao", "torchao"},
                              {"hqq", "HQQ"},           {"quanto", "quanto"},
                              {"aqlm", "AQLM"},         {"eetq", "EETQ"},
                              {"bitnet", "BitNet"}};

[[noreturn]] void refuse(const fs::path& file, std::string_view why) {
  throw UsageError(fmt::format("model description {}", file.string()), fmt::format("'quantization_config': {}", why),
                   "use the model's bf16 or fp32 weights, of which the quantized ones were made; --base nf4, int8 or "
                   "fp8 makes them small");
}

std::string text_at(const nlohmann::json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : std::string();
}

bool is_true(const nlohmann::json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_boolean() && found->get<bool>();
}

/// Code of what bitsandbytes has quantized.
WeightCode code_of_bitsandbytes(const fs::path& file, const nlohmann::json& config) {
  if (is_true(config, "load_in_8bit")) refuse(file, "the weights are int8 by bitsandbytes; read is its NF4");
  const std::string type = text_at(config, "bnb_4bit_quant_type");
  if (!is_true(config, "load_in_4bit") || type != "nf4") {
    refuse(file, fmt::format("the weights are {} by bitsandbytes; read is its NF4",
                             type.empty() ? "of a type that is not named" : "'" + type + "'"));
  }
  return is_true(config, "bnb_4bit_use_double_quant") ? WeightCode::nf4_double : WeightCode::nf4;
}

WeightCode code_of(const fs::path& file, const nlohmann::json& config) {
  const std::string method = config.is_object() ? text_at(config, "quant_method") : std::string();
  if (method == "bitsandbytes") return code_of_bitsandbytes(file, config);
  const auto known = std::ranges::find(methods, method, &Method::key);
  if (known != std::end(methods))
    refuse(file, fmt::format("the weights are quantized by {} ({})", known->name, method));
  refuse(file, method.empty() ? "the weights are quantized, and it does not say how"
                              : fmt::format("the weights are quantized by '{}'", method));
}

}  // namespace

StoredDescription read_description(const fs::path& config_json) {
  StoredDescription read{read_hf_config(config_json), WeightCode::none};
  const std::string& text = read.description.quantization;
  if (!text.empty()) read.code = code_of(config_json, parse_json<nlohmann::json>(text));
  return read;
}

}  // namespace tandem
