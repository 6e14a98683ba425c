#include "io/shard_index.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"
#include "io/plain_name.hpp"

namespace tandem {

std::set<std::string> shards_of_index(std::string_view text, const std::string& where) {
  const auto refuse = [&](std::string_view why) {
    throw InputError(fmt::format("index {}", where), why, "copy or download it again");
  };
  if (nests_deeper(text)) refuse("it is nested too deep");
  const auto json = parse_json<nlohmann::json>(text);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    refuse("it has no weight_map");
  }
  std::set<std::string> shards;
  for (const auto& [tensor, name] : json["weight_map"].items()) {
    if (!name.is_string() || !is_plain_name(name.get<std::string>())) {
      refuse(fmt::format("tensor {} names no file beside it", tensor));
    }
    shards.insert(name.get<std::string>());
  }
  return shards;
}

}  // namespace tandem
