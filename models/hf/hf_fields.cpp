#include "models/hf/hf_fields.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;

/// The beginning of a long one.
std::string shown(const Json& value) {
  constexpr std::size_t longest = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > longest) text.replace(longest, std::string::npos, "...");
  return text;
}

bool is_integer(const Json& value) { return value.is_number_integer(); }

}  // namespace

Fields::Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

void Fields::refuse(std::string_view why, std::string_view advice) const { throw UsageError(where_, why, advice); }

const Json* Fields::find(const char* key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool Fields::has(const char* key) const { return find(key) != nullptr; }

bool Fields::mentions(const char* key) const { return object_.contains(key); }

std::int64_t Fields::integer(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) refuse(fmt::format("'{}' is missing", key));
  if (!is_integer(*value)) refuse(fmt::format("'{}' is {}, expected an integer", key, shown(*value)));
  constexpr auto highest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (value->is_number_unsigned() && value->get<std::uint64_t>() > highest) {
    refuse(fmt::format("'{}' is {}, which no model has", key, shown(*value)));
  }
  return value->get<std::int64_t>();
}

std::int64_t Fields::integer(const char* key, std::int64_t fallback) const {
  return has(key) ? integer(key) : fallback;
}

double Fields::number(const char* key, double fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) refuse(fmt::format("'{}' is {}, expected a number", key, shown(*value)));
  return value->get<double>();
}

bool Fields::boolean(const char* key, bool fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) refuse(fmt::format("'{}' is {}, expected true or false", key, shown(*value)));
  return value->get<bool>();
}

std::string Fields::text(const char* key, std::string fallback) const {
  const Json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) refuse(fmt::format("'{}' is {}, expected a string", key, shown(*value)));
  return value->get<std::string>();
}

const Json* Fields::object(const char* key) const {
  const Json* value = find(key);
  if (value != nullptr && !value->is_object()) refuse(fmt::format("'{}' is {}, expected {{...}}", key, shown(*value)));
  return value;
}

template <class T, class Check>
std::vector<T> Fields::list(const char* key, std::string_view what, const Check& check) const {
  std::vector<T> all;
  const Json* value = find(key);
  if (value == nullptr) return all;
  if (!value->is_array() || !std::all_of(value->begin(), value->end(), check)) {
    refuse(fmt::format("'{}' is {}, expected a list of {}", key, shown(*value), what));
  }
  for (const Json& item : *value) all.push_back(item.get<T>());
  return all;
}

std::vector<double> Fields::numbers(const char* key) const {
  return list<double>(key, "numbers", [](const Json& value) { return value.is_number(); });
}

std::vector<std::int64_t> Fields::integers(const char* key) const {
  return list<std::int64_t>(key, "integers", is_integer);
}

std::vector<std::string> Fields::texts(const char* key) const {
  return list<std::string>(key, "strings", [](const Json& value) { return value.is_string(); });
}

std::string Fields::token_ids(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) return mentions(key) ? "null" : "";
  if (!is_integer(*value) && !(value->is_array() && std::all_of(value->begin(), value->end(), is_integer))) {
    refuse(fmt::format("'{}' is {}, expected a token id or a list of them", key, shown(*value)));
  }
  return value->dump();
}

}  // namespace tandem
