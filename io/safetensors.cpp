#include "io/safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"
#include "core/numerics/bf16.hpp"

namespace tandem {
namespace {

using nlohmann::json;

constexpr std::uint64_t header_limit = 100'000'000;  // bytes; the format's own limit
constexpr std::size_t length_bytes = 8;
constexpr std::size_t header_alignment = 64;

/// Bits of an element of the format's types.
std::optional<std::uint64_t> bits_of(std::string_view dtype) {
  constexpr std::array known{
      std::pair("F64", 64),        std::pair("I64", 64),        std::pair("U64", 64),    std::pair("F32", 32),
      std::pair("I32", 32),        std::pair("U32", 32),        std::pair("F16", 16),    std::pair("BF16", 16),
      std::pair("I16", 16),        std::pair("U16", 16),        std::pair("I8", 8),      std::pair("U8", 8),
      std::pair("BOOL", 8),        std::pair("F8_E4M3", 8),     std::pair("F8_E5M2", 8), std::pair("F8_E8M0", 8),
      std::pair("F8_E4M3FNUZ", 8), std::pair("F8_E5M2FNUZ", 8), std::pair("F6_E2M3", 6), std::pair("F6_E3M2", 6),
      std::pair("F4", 4),          std::pair("C64", 64)};
  for (const auto& [name, bits] : known) {
    if (name == dtype) return static_cast<std::uint64_t>(bits);
  }
  return std::nullopt;
}

[[noreturn]] void corrupt(const std::filesystem::path& file, std::string_view why) {
  throw InputError(fmt::format("corrupt safetensors file {}", file.string()), why, "copy or download it again");
}

/// Parses and refuses repeated names, which JSON readers otherwise pass over.
json parse_header(const std::filesystem::path& file, std::string_view text) {
  if (nests_deeper(text)) corrupt(file, "its header is nested too deep");
  std::set<std::string> names;
  std::string repeated;
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key && depth == 1 && !names.insert(value.get<std::string>()).second) {
      repeated = value.get<std::string>();
    }
    return true;
  };
  json header = json::parse(text, watch, false);
  if (!repeated.empty()) corrupt(file, fmt::format("tensor {} is listed twice", repeated));
  if (!header.is_object()) corrupt(file, "its header is not a JSON object");
  return header;
}

std::uint64_t natural(const std::filesystem::path& file, const std::string& name, const json& value) {
  if (!value.is_number_unsigned()) corrupt(file, fmt::format("tensor {}: a size or offset is no natural number", name));
  return value.get<std::uint64_t>();
}

struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string name;
};

/// One header entry, checked; `data_bytes` is what follows the header.
std::pair<StoredTensor, Extent> entry_of(const std::filesystem::path& file, const std::string& name, const json& value,
                                         std::uint64_t data_bytes) {
  const auto part = [&](const char* key, json::value_t type) -> const json& {
    if (!value.is_object() || !value.contains(key) || value[key].type() != type) {
      corrupt(file, fmt::format("tensor {} has no proper \"{}\"", name, key));
    }
    return value[key];
  };
  StoredTensor tensor;
  tensor.dtype = part("dtype", json::value_t::string).get<std::string>();
  const auto element = bits_of(tensor.dtype);
  if (!element) {
    throw InputError(fmt::format("safetensors file {}", file.string()),
                     fmt::format("tensor {} is of type {}, which is not known", name, tensor.dtype),
                     "use a file whose weights are F32, F16 and BF16");
  }
  std::uint64_t count = 1;
  for (const json& dim : part("shape", json::value_t::array)) {
    const std::uint64_t size = natural(file, name, dim);
    std::uint64_t ignored = 0;
    if (__builtin_mul_overflow(count, size, &count) || __builtin_mul_overflow(*element, count, &ignored) ||
        size > static_cast<std::uint64_t>(INT64_MAX)) {
      corrupt(file, fmt::format("tensor {}: its shape overflows", name));
    }
    tensor.shape.push_back(static_cast<std::int64_t>(size));
  }
  constexpr std::uint64_t byte = 8;  // bits
  if (*element * count % byte != 0) {
    corrupt(file, fmt::format("tensor {}: shape ({}) of {} ends within a byte", name, fmt::join(tensor.shape, ", "),
                              tensor.dtype));
  }
  const std::uint64_t bytes = *element * count / byte;
  const json& offsets = part("data_offsets", json::value_t::array);
  if (offsets.size() != 2) corrupt(file, fmt::format("tensor {} has no pair of offsets", name));
  const Extent extent{natural(file, name, offsets[0]), natural(file, name, offsets[1]), name};
  if (extent.begin > extent.end || extent.end > data_bytes) {
    corrupt(file, fmt::format("tensor {}: its bytes [{}, {}) lie outside the file's {}", name, extent.begin, extent.end,
                              data_bytes));
  }
  if (extent.end - extent.begin != bytes) {
    corrupt(file, fmt::format("tensor {}: shape ({}) of {} needs {} bytes, its offsets hold {}", name,
                              fmt::join(tensor.shape, ", "), tensor.dtype, bytes, extent.end - extent.begin));
  }
  tensor.count = static_cast<std::int64_t>(count);
  return {std::move(tensor), extent};
}

void require_gapless(const std::filesystem::path& file, std::vector<Extent> extents, std::uint64_t data_bytes) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  std::uint64_t end = 0;
  for (const Extent& extent : extents) {
    if (extent.begin < end) corrupt(file, fmt::format("tensor {} overlaps another", extent.name));
    if (extent.begin > end) corrupt(file, fmt::format("a gap lies before tensor {}", extent.name));
    end = extent.end;
  }
  if (end != data_bytes) corrupt(file, fmt::format("it is longer than its tensors, by {} B", data_bytes - end));
}

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fU;
  const std::uint32_t fraction = half & 0x3ffU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t bits =
      exponent == 31 ? sign | 0x7f800000U | (fraction << 13) : sign | ((exponent + 112) << 23) | (fraction << 13);
  return std::bit_cast<float>(bits);
}

template <class T, class Convert>
void convert(const std::byte* from, std::span<float> to, const Convert& one) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    to[i] = one(value);
  }
}

std::uint64_t bytes_of(const TensorSpec& spec) {
  const auto element = bits_of(spec.dtype);
  if (!element) throw MisuseError("safetensors writer", fmt::format("unknown type {}", spec.dtype));
  std::uint64_t bytes = *element / 8;
  for (const std::int64_t dim : spec.shape) bytes *= static_cast<std::uint64_t>(dim);
  return bytes;
}

FileWay way_of(const std::vector<TensorSpec>& specs) {
  std::uint64_t bytes = 0;
  for (const TensorSpec& spec : specs) bytes += bytes_of(spec);
  return way_of_file(bytes);
}

}  // namespace

bool is_narrow_or_complex(std::string_view dtype) {
  return dtype.starts_with("F8") || dtype.starts_with("F6") || dtype.starts_with("F4") || dtype.starts_with("C");
}

void widen(const StoredTensor& tensor, std::int64_t first, std::span<float> values) {
  const auto count = static_cast<std::int64_t>(values.size());
  if (first < 0 || first + count > tensor.count) throw MisuseError("stored tensor read out of range");
  const auto at = [&](std::size_t element) { return tensor.bytes.data() + static_cast<std::size_t>(first) * element; };
  if (tensor.dtype == "F32") {
    if (count > 0) std::memcpy(values.data(), at(4), values.size_bytes());
  } else if (tensor.dtype == "BF16") {
    convert<std::uint16_t>(at(2), values, [](std::uint16_t x) { return numerics::bf16_to_float(bf16{x}); });
  } else if (tensor.dtype == "F16") {
    convert<std::uint16_t>(at(2), values, half_to_float);
  } else {
    throw InputError(fmt::format("tensor of type {}", tensor.dtype), "only F32, F16 and BF16 are read as weights");
  }
}

SafetensorsReader::SafetensorsReader(const std::filesystem::path& file) : file_(file) { parse(); }

void SafetensorsReader::parse() {
  const auto bytes = file_.bytes();
  const auto& path = file_.path();
  constexpr std::string_view pointer = "version https://git-lfs.github.com/spec/";
  if (std::string_view(reinterpret_cast<const char*>(bytes.data()), std::min(bytes.size(), pointer.size())) ==
      pointer) {
    throw InputError(fmt::format("safetensors file {}", path.string()),
                     "it is a pointer of Git LFS, not the file itself", "fetch the file: git lfs pull");
  }
  if (bytes.size() < length_bytes) corrupt(path, "it is shorter than its own header length");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  if (length > bytes.size() - length_bytes) {
    corrupt(path, fmt::format("it promises a header of {} bytes and has {} in all", length, bytes.size()));
  }
  if (length > header_limit) {
    corrupt(path, fmt::format("it promises a header of {} bytes, and {} are the most", length, header_limit));
  }
  const auto header_bytes = static_cast<std::size_t>(length);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + length_bytes, header_bytes);
  const auto data = bytes.subspan(length_bytes + header_bytes);
  const json header = parse_header(path, text);
  std::vector<Extent> extents;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) corrupt(path, "its metadata is no object");
      for (const auto& [key, note] : value.items()) {
        if (note.is_string()) metadata_[key] = note.get<std::string>();
      }
      continue;
    }
    auto [tensor, extent] = entry_of(path, name, value, data.size());
    tensor.bytes =
        data.subspan(static_cast<std::size_t>(extent.begin), static_cast<std::size_t>(extent.end - extent.begin));
    tensor.begin = length_bytes + header_bytes + extent.begin;
    tensors_.emplace(name, std::move(tensor));
    extents.push_back(std::move(extent));
  }
  require_gapless(path, std::move(extents), data.size());
}

const StoredTensor* SafetensorsReader::find(std::string_view name) const {
  const auto found = tensors_.find(std::string(name));
  return found == tensors_.end() ? nullptr : &found->second;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& file, const std::vector<TensorSpec>& specs,
                                     const std::map<std::string, std::string>& metadata, FileOps& ops)
    : file_(file, ops, way_of(specs)) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const TensorSpec& spec : specs) {
    const std::uint64_t bytes = bytes_of(spec);
    header[spec.name] = {{"dtype", spec.dtype}, {"shape", spec.shape}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.is_null() ? "{}" : json_text(header);
  const std::size_t whole = length_bytes + text.size();
  text.append((header_alignment - whole % header_alignment) % header_alignment, ' ');
  const std::uint64_t length = text.size();
  file_.write(&length, sizeof(length));
  file_.write(text.data(), text.size());
  expected_ = file_.bytes() + offset;
}

void SafetensorsWriter::finish() {
  if (file_.bytes() != expected_) {
    throw MisuseError("safetensors writer", fmt::format("{} bytes written, {} announced", file_.bytes(), expected_));
  }
  file_.finish();
}

}  // namespace tandem
