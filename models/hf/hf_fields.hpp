#pragma once
// Fields of a Hugging Face config.json, read by name and type.
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Typed access to one JSON object. An explicit null counts as absent, as in transformers. Throws UsageError that names
/// the field. Keeps a reference to the object.
class Fields {
 public:
  /// `where`: what messages are about.
  Fields(const nlohmann::json& object, std::string where);

  [[noreturn]] void refuse(std::string_view why, std::string_view advice = {}) const;

  bool has(const char* key) const;
  /// Whether the key is there, if only with an explicit null.
  bool mentions(const char* key) const;

  std::int64_t integer(const char* key) const;
  std::int64_t integer(const char* key, std::int64_t fallback) const;
  double number(const char* key, double fallback) const;
  bool boolean(const char* key, bool fallback) const;
  std::string text(const char* key, std::string fallback) const;
  /// The nested object, or null where absent.
  const nlohmann::json* object(const char* key) const;
  // Lists, empty where absent.
  std::vector<double> numbers(const char* key) const;
  std::vector<std::int64_t> integers(const char* key) const;
  std::vector<std::string> texts(const char* key) const;
  /// A token id or a list of them, as JSON; empty where absent, and null where that is said: transformers has defaults.
  std::string token_ids(const char* key) const;

  const std::string& where() const noexcept { return where_; }

 private:
  const nlohmann::json* find(const char* key) const;
  template <class T, class Check>
  std::vector<T> list(const char* key, std::string_view what, const Check& check) const;

  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace tandem
