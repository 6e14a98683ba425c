#include "train/sampling/text_codec.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "core/base/error.hpp"
#include "train/config/units.hpp"

namespace tandem {
namespace {

/// Bytes that a character beginning with `lead` has; 0: none begins with it.
std::size_t length_of(std::uint32_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  return lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
}

/// Length of the valid UTF-8 sequence at `at`, or 0.
std::size_t utf8_length(std::span<const std::int32_t> b, std::size_t at) {
  const auto lead = static_cast<std::uint32_t>(b[at]);
  const std::size_t length = length_of(lead);
  if (length <= 1) return length;
  if (at + length > b.size()) return 0;
  std::uint32_t code = lead & (0x7fU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    const auto next = static_cast<std::uint32_t>(b[at + i]);
    if ((next & 0xc0U) != 0x80) return 0;
    code = (code << 6) | (next & 0x3fU);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool forbidden = (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff;
  return overlong || forbidden ? 0 : length;
}

class ByteStream final : public TextStream {
 public:
  std::string next(std::int32_t token) override {
    held_.push_back(token);
    const bool more_to_come = held_.size() < length_of(static_cast<std::uint32_t>(held_.front())) &&
                              (held_.size() == 1 || (static_cast<std::uint32_t>(token) & 0xc0U) == 0x80);
    return more_to_come ? std::string() : end();
  }
  std::string end() override { return text_of_bytes(std::exchange(held_, {})); }

 private:
  std::vector<std::int32_t> held_;
};

class ByteCodec final : public TextCodec {
 public:
  std::vector<std::int32_t> tokens_of(const std::string& text) override {
    std::vector<std::int32_t> tokens;
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  std::unique_ptr<TextStream> stream(std::span<const std::int32_t>) override { return std::make_unique<ByteStream>(); }
};

class IdStream final : public TextStream {
 public:
  std::string next(std::int32_t token) override { return fmt::format(" {}", token); }
  std::string end() override { return {}; }
};

class IdCodec final : public TextCodec {
 public:
  IdCodec(std::int64_t vocabulary, std::string_view flag) : vocabulary_(vocabulary), flag_(flag) {}
  std::vector<std::int32_t> tokens_of(const std::string& text) override {
    std::string spaced = text;
    std::replace(spaced.begin(), spaced.end(), ',', ' ');
    std::istringstream words(spaced);
    std::vector<std::int32_t> tokens;
    for (std::string word; words >> word;) tokens.push_back(id_of(word));
    return tokens;
  }
  std::unique_ptr<TextStream> stream(std::span<const std::int32_t>) override { return std::make_unique<IdStream>(); }

 private:
  std::int32_t id_of(const std::string& word) const {
    std::int64_t id = -1;
    try {
      id = parse_integer(word);
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}, which takes token ids", flag_), error.what());
    }
    if (id >= 0 && id < vocabulary_) return static_cast<std::int32_t>(id);
    throw UsageError(fmt::format("{}: token {}", flag_, id), fmt::format("the vocabulary has {}", vocabulary_),
                     "give token ids such as '15496 11'");
  }

  std::int64_t vocabulary_;
  std::string flag_;
};

}  // namespace

std::unique_ptr<TextCodec> byte_codec() { return std::make_unique<ByteCodec>(); }

std::unique_ptr<TextCodec> id_codec(std::int64_t vocabulary, std::string_view flag) {
  return std::make_unique<IdCodec>(vocabulary, flag);
}

std::string text_of_bytes(std::span<const std::int32_t> tokens) {
  std::string text;
  for (std::size_t i = 0; i < tokens.size();) {
    const std::size_t length = utf8_length(tokens, i);
    const std::int32_t byte = tokens[i];
    const bool control = length == 1 && (byte < 0x20 || byte == 0x7f) && byte != '\n' && byte != '\t';
    if (length == 0 || control) {
      text += fmt::format("\\x{:02x}", byte);
      ++i;
      continue;
    }
    for (std::size_t j = 0; j < length; ++j) text += static_cast<char>(tokens[i + j]);
    i += length;
  }
  return text;
}

std::string printable(std::string_view text) {
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool control = (byte < 0x20 || byte == 0x7f) && c != '\n' && c != '\t';
    shown += control ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return shown;
}

std::string StopFilter::pass(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  std::size_t first = held_.size();
  for (const std::string& stop : stops_) {
    std::size_t found = held_.find(stop);
    if (at_end_) found = held_.ends_with(stop) ? held_.size() - stop.size() : std::string::npos;
    if (found != std::string::npos) first = std::min(first, found), stopped_ = true;
  }
  if (stopped_) {
    std::string shown = held_.substr(0, first);
    held_.clear();
    return shown;
  }
  for (const std::string& stop : stops_) {
    for (std::size_t length = std::min(stop.size() - 1, held_.size()); length > 0; --length) {
      if (!std::string_view(held_).ends_with(std::string_view(stop).substr(0, length))) continue;
      first = std::min(first, held_.size() - length);
      break;
    }
  }
  std::string shown = held_.substr(0, first);
  held_.erase(0, first);
  return shown;
}

std::string StopFilter::rest() { return std::exchange(held_, {}); }

}  // namespace tandem
