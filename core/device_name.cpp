#include "core/device_name.hpp"

#include <charconv>
#include <string>
#include <system_error>

#include "core/error.hpp"

namespace tandem {

DeviceName parse_device_name(std::string_view text) {
  using Kind = DeviceName::Kind;
  constexpr std::string_view numbered = "cuda:";
  if (text == "auto") return {Kind::automatic};
  if (text == "host" || text == "cpu") return {Kind::host};
  if (text == "cuda") return {Kind::cuda};
  if (text.starts_with(numbered)) {
    const std::string_view digits = text.substr(numbered.size());
    DeviceName name{Kind::cuda};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), name.ordinal);
    if (error == std::errc() && end == digits.data() + digits.size() && name.ordinal >= 0) return name;
  }
  throw UsageError("device '" + std::string(text) + "' is not known", {}, "use auto, host, cuda or cuda:N");
}

}  // namespace tandem
