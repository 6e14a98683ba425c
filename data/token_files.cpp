#include "data/token_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/nesting.hpp"
#include "data/file_kind.hpp"

namespace tandem::data_files {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void unreadable(const fs::path& path, const std::error_code& error) {
  throw InputError(fmt::format("cannot read {}", path.string()), error.message());
}

void collect(const fs::path& folder, FoundFiles& found) {
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  if (error) unreadable(folder, error);
  for (; entries != fs::directory_iterator(); entries.increment(error)) {
    const fs::file_status status = entries->symlink_status(error);
    if (error) unreadable(entries->path(), error);
    // Hidden files of systems, editors and the hub's programs: nobody means them as data.
    if (entries->path().filename().native().starts_with('.')) {
      ++found.hidden;
      continue;
    }
    if (fs::is_symlink(status)) ++found.links;
    if (fs::is_directory(status)) collect(entries->path(), found);
    if (fs::is_regular_file(status)) found.files.push_back(entries->path());
  }
  if (error) unreadable(folder, error);
}

/// Whether a token file of that name lies beside `file`, to which it belongs.
bool belongs_to_tokens(const fs::path& file) {
  std::error_code ignored;
  const auto is_beside = [&](const char* ending) {
    return fs::exists(fs::path(file).replace_extension(ending), ignored);
  };
  constexpr std::string_view scores = ".scores.safetensors";
  if (const std::string name = file.filename().string(); name.ends_with(scores)) {
    return fs::exists(file.parent_path() / (name.substr(0, name.size() - scores.size()) + ".bin"), ignored);
  }
  if (file.extension() == ".json") return is_beside(".bin") || is_beside(".npy");
  return file.extension() == ".idx" && is_beside(".bin");
}

std::size_t width_bytes(TokenWidth width) { return static_cast<std::size_t>(width); }

[[noreturn]] void bad_description(const std::string& name, std::string_view why) {
  throw InputError(fmt::format("token description {}", name), why,
                   "expected what tools/prepare_data.py writes, such as {\"dtype\": \"uint16\"}");
}

constexpr std::uint64_t most_natural = std::uint64_t{1} << 48;

bool is_natural(const nlohmann::json& json, const char* key) {
  return json.contains(key) && json[key].is_number_unsigned() && json[key].get<std::uint64_t>() <= most_natural;
}

std::int64_t natural(const nlohmann::json& json, const char* key, std::int64_t fallback, const std::string& name) {
  if (!json.contains(key) || json[key].is_null()) return fallback;
  if (!is_natural(json, key)) bad_description(name, fmt::format("its \"{}\" is no natural number", key));
  return json[key].get<std::int64_t>();
}

/// A number that only some runs need: anything else is as if it were not there, as other programs may write text there.
std::int64_t natural_or_unknown(const nlohmann::json& json, const char* key) {
  return is_natural(json, key) ? json[key].get<std::int64_t>() : -1;
}

}  // namespace

FoundFiles files_of(const fs::path& name) {
  std::error_code error;
  const fs::file_status status = fs::status(name, error);
  if (!fs::exists(status)) {
    throw InputError(fmt::format("cannot read {}", name.string()), "no such file or folder");
  }
  if (error) unreadable(name, error);
  FoundFiles found;
  if (!fs::is_directory(status)) {
    found.files.push_back(name);
    return found;
  }
  found.in_folder = true;
  collect(name, found);
  std::erase_if(found.files, [](const fs::path& file) { return is_mask(file) || belongs_to_tokens(file); });
  std::sort(found.files.begin(), found.files.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  if (!found.files.empty()) return found;
  const std::string what = fmt::format("folder {}", name.string());
  if (found.links == 0 && found.hidden == 0) throw InputError(what, "it holds no files");
  throw InputError(
      what,
      fmt::format("it holds no files but {} links and {} hidden ones, which are not read", found.links, found.hidden),
      "name the files themselves, or copy them: cp -rL");
}

bool is_token_file(const fs::path& file) { return file.extension() == ".bin" || file.extension() == ".npy"; }

bool is_mask(const fs::path& file) { return file.filename().string().ends_with(".mask.bin"); }

fs::path mask_of(const fs::path& bin) { return fs::path(bin).replace_extension(".mask.bin"); }

TokenDescription parse_description(std::string_view text, const std::string& name) {
  if (nests_deeper(text)) bad_description(name, "it is nested too deep");
  const nlohmann::json json = parse_json<nlohmann::json>(text);
  if (!json.is_object()) bad_description(name, "not a JSON object");
  const auto word = [&](const char* key) -> std::string {
    if (!json.contains(key) || json[key].is_null()) return {};
    if (!json[key].is_string()) bad_description(name, fmt::format("its \"{}\" is no text", key));
    return json[key].get<std::string>();
  };
  TokenDescription description;
  const std::string dtype = word("dtype");
  if (!dtype.empty() && dtype != "uint16" && dtype != "uint32") {
    bad_description(name, fmt::format("dtype \"{}\" is neither uint16 nor uint32", dtype));
  }
  if (!dtype.empty()) description.width = parse_token_width(dtype);
  const std::string layout = word("layout");
  if (!layout.empty() && layout != "stream" && layout != "rows" && layout != "packed") {
    bad_description(name, fmt::format("layout \"{}\" is none of stream, rows and packed", layout));
  }
  description.vocabulary = natural(json, "vocab_size", 0, name);
  description.tokens = natural(json, "tokens", -1, name);
  description.end_token = natural_or_unknown(json, "end_token");
  description.records = natural_or_unknown(json, "records");
  if (json.contains("pairs") && !json["pairs"].is_boolean()) bad_description(name, "its \"pairs\" is no true or false");
  description.pairs = json.contains("pairs") && json["pairs"].get<bool>();
  if (description.pairs && layout != "rows") bad_description(name, "pairs need the layout rows");
  if (layout != "rows" && layout != "packed") return description;
  description.layout = layout == "rows" ? TokenLayout::rows : TokenLayout::packed;
  description.row_length = natural(json, "row_length", 0, name);
  if (description.row_length < 2) {
    bad_description(name, fmt::format("layout {} needs a \"row_length\" of at least 2", layout));
  }
  return description;
}

fs::path description_path(const fs::path& bin) { return fs::path(bin).replace_extension(".json"); }

std::string tool_file_beside(const fs::path& bin) {
  constexpr std::string_view validation = "-validation";
  const std::string stem = bin.stem().string();
  std::vector<std::string> names = {stem + ".mask.bin", stem + ".parts", fmt::format("{}{}.json", stem, validation)};
  if (stem.ends_with(validation)) names.push_back(stem.substr(0, stem.size() - validation.size()) + ".json");
  std::error_code ignored;
  const auto found = std::ranges::find_if(
      names, [&](const std::string& name) { return fs::exists(bin.parent_path() / name, ignored); });
  return found == names.end() ? std::string() : *found;
}

std::optional<TokenDescription> description_of(const fs::path& bin) {
  constexpr std::uintmax_t most_bytes = 1U << 20;
  const fs::path file = description_path(bin);
  std::error_code error;
  if (!fs::exists(file, error)) return std::nullopt;
  if (!fs::is_regular_file(file, error)) bad_description(file.string(), "it is no regular file");
  if (fs::file_size(file, error) > most_bytes) bad_description(file.string(), "it is larger than 1 MiB");
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return parse_description(text, file.string());
}

namespace {

/// First bytes of a file, `most` at most.
std::vector<std::byte> first_bytes(const DataFile& file, std::uint64_t most = kind_bytes) {
  std::vector<std::byte> first(static_cast<std::size_t>(std::min(most, file.size())));
  file.read(0, first);
  return first;
}

/// Whether a `.json` holds records: its name is that of a document, too.
bool holds_records(const DataFile& file) {
  constexpr std::uint64_t longest_record = 1U << 20;
  const std::vector<std::byte> first = first_bytes(file, longest_record);
  return begins_as_records({reinterpret_cast<const char*>(first.data()), first.size()});
}

/// uint16, where nothing says so and nothing speaks against it.
TokenWidth assumed_width(const DataFile& file, std::int64_t vocabulary) {
  constexpr std::int64_t most = 1 << 16;
  const std::string what = fmt::format("token file {}", file.path().string());
  if (const auto kind = kind_of_content(first_bytes(file), file.size())) {
    throw InputError(what, fmt::format("it begins as {} does, and holds no token ids", kind->name),
                     fmt::format("{}, or give --token-dtype", kind->advice));
  }
  if (vocabulary > most) {
    throw InputError(
        what,
        fmt::format("nothing says how wide its tokens are, and 16 bits have no room for the vocabulary of {}",
                    vocabulary),
        "give --token-dtype uint32, or uint16 if they are");
  }
  const NarrowReading reading = read_as_uint16(file);
  if (reading.three_of_four_are_zero) {
    throw InputError(
        what, "nothing says how wide its tokens are, and they look like 64-bit ids: of four 16-bit words three are 0",
        "write them as uint32 and give --token-dtype uint32, or --token-dtype uint16 if they are");
  }
  if (reading.every_second_is_zero) {
    throw InputError(
        what, "nothing says how wide its tokens are, and they look like 32-bit ids: every second 16-bit word is 0",
        "give --token-dtype uint32, or uint16 if they are");
  }
  return TokenWidth::uint16;
}

/// Token width of a `.bin` without header.
TokenWidth width_of(const DataFile& file, std::optional<TokenWidth> forced,
                    const std::optional<TokenDescription>& description, std::int64_t vocabulary) {
  if (forced) return *forced;
  const std::optional<TokenWidth> indexed = width_of_index(file);
  const std::optional<TokenWidth> described = description ? description->width : std::nullopt;
  if (indexed && described && *indexed != *described) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("its description says {}, its index {}", name_of(*described), name_of(*indexed)),
                     "remove the one that is of other data");
  }
  if (described) return *described;
  return indexed ? *indexed : assumed_width(file, vocabulary);
}

}  // namespace

TokenExtent token_extent(const DataFile& file, std::optional<TokenWidth> forced,
                         const std::optional<TokenDescription>& description, std::int64_t vocabulary,
                         std::vector<std::string>& notices) {
  if (file.path().extension() == ".npy" || is_numpy(file)) return extent_of_numpy(file);
  if (auto extent = extent_of_llmc(file, forced)) return *extent;
  const TokenWidth width = width_of(file, forced, description, vocabulary);
  const std::uint64_t size = file.size();
  if (size % width_bytes(width) != 0) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("{} bytes are no multiple of a {} token", size, name_of(width)),
                     "the file is cut off, or give the width with --token-dtype");
  }
  const auto count = static_cast<std::int64_t>(size / width_bytes(width));
  if (description && !forced && description->tokens >= 0 && description->tokens != count) {
    throw InputError(fmt::format("token file {}", file.path().string()),
                     fmt::format("it has {} tokens, its description promises {}", count, description->tokens),
                     "the file is cut off or of another run; write it again");
  }
  std::error_code ignored;
  const bool bare = !description && !fs::exists(index_of(file.path()), ignored);
  const TokenExtent extent{0, width, count, bare};
  if (looks_like_64_bit(file, extent)) {
    notices.push_back(fmt::format("token file {}: every second token is 0, as in 64-bit ids that are read as uint32",
                                  file.path().string()));
  }
  return extent;
}

std::uint64_t require_text(const DataFile& file, bool in_folder) {
  const fs::path& path = file.path();
  const auto refuse = [&](std::string_view why, std::string_view advice) {
    throw InputError(fmt::format("data {}", path.string()), why, advice);
  };
  if (file.size() == 0) return 0;
  const std::vector<std::byte> first = first_bytes(file);
  if (const auto kind = kind_of_content(first, file.size())) {
    refuse(fmt::format("its first bytes are those of {}, which would be trained on as text", kind->name), kind->advice);
  }
  if (const auto kind = kind_of_name(path)) {
    refuse(fmt::format("by its name it is {}, which would be trained on as text", kind->name), kind->advice);
  }
  if (is_json(path) && (!in_folder || holds_records(file))) {
    refuse("by its name it is JSON, whose brackets and keys would be trained on as text",
           "prepare it with tools/prepare_data.py, or name it .txt if that is meant");
  }
  return has_utf8_mark(first) ? utf8_mark_bytes : 0;
}

}  // namespace tandem::data_files
