#include "core/device/device_name.hpp"

#include <algorithm>
#include <charconv>
#include <set>
#include <string>
#include <system_error>

#include "core/base/error.hpp"

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

std::vector<std::string> split_device_names(std::string_view text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    names.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  const DeviceName first = parse_device_name(names.front());
  std::set<int> gpus;
  for (const std::string& name : names) {
    const DeviceName device = parse_device_name(name);
    const bool listed = device.kind == DeviceName::Kind::host || device.ordinal >= 0;
    if (names.size() > 1 && (!listed || device.kind != first.kind)) {
      throw UsageError("devices '" + std::string(text) + "'", "several are GPUs by their numbers, or all host",
                       "use for example cuda:0,cuda:1");
    }
    // Each would take the card's memory for its own.
    if (device.kind == DeviceName::Kind::cuda && !gpus.insert(device.ordinal).second) {
      throw UsageError("devices '" + std::string(text) + "'", name + " is named twice", "name each GPU once");
    }
  }
  return names;
}

void require_one_device(std::string_view text, std::string_view what) {
  if (split_device_names(text).size() == 1) return;
  throw UsageError("devices '" + std::string(text) + "'", std::string(what) + " takes one", "name one of them");
}

}  // namespace tandem
