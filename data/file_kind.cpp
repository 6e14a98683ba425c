#include "data/file_kind.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

namespace tandem::data_files {
namespace {

using namespace std::literals;

constexpr auto prepare = "prepare it with tools/prepare_data.py"sv;
constexpr auto unpack = "unpack it, and name what is in it"sv;
constexpr auto encode = "write it as UTF-8, for example with iconv -f UTF-16 -t UTF-8"sv;
constexpr auto encode_wide = "write it as UTF-8, for example with iconv -f UTF-32 -t UTF-8"sv;
constexpr auto leave_out = "leave it out, or take the text out of it first"sv;
constexpr auto weights = "these are weights of a model: leave them out, or name the model with --model"sv;

struct Signature {
  std::string_view bytes;
  FileKind kind;
  std::size_t offset = 0;
};

/// Longer ones first where one begins as another does. None is shorter than what no text begins with.
constexpr std::array signatures{
    Signature{"\xff\xfe\0\0"sv, {"a UTF-32 text", encode_wide}},
    Signature{"\0\0\xfe\xff"sv, {"a UTF-32 text", encode_wide}},
    Signature{"\xff\xfe"sv, {"a UTF-16 text", encode}},
    Signature{"\xfe\xff"sv, {"a UTF-16 text", encode}},
    Signature{"\x1f\x8b\x08"sv, {"a gzip file", "unpack it with gunzip, or prepare it with tools/prepare_data.py"}},
    Signature{"\x28\xb5\x2f\xfd"sv, {"a zstd file", "unpack it with unzstd, or prepare it with tools/prepare_data.py"}},
    Signature{"\xfd\x37zXZ\0"sv, {"an xz file", unpack}},
    Signature{"1AY&SY"sv, {"a bzip2 file", unpack}, 4},
    Signature{"\x04\x22\x4d\x18"sv, {"an lz4 file", unpack}},
    Signature{"7z\xbc\xaf\x27\x1c"sv, {"a 7z archive", unpack}},
    Signature{"Rar!\x1a\x07"sv, {"a RAR archive", unpack}},
    Signature{"PK\x03\x04"sv, {"a zip archive (also .docx, .xlsx, .npz, .pt)", unpack}},
    Signature{"ustar"sv, {"a tar archive", unpack}, 257},
    Signature{"PAR1"sv, {"a Parquet file", prepare}},
    Signature{"ARROW1"sv, {"an Arrow file", "write it as Parquet or JSON lines for tools/prepare_data.py"}},
    Signature{"Obj\x01"sv, {"an Avro file", "write it as JSON lines for tools/prepare_data.py"}},
    Signature{"SQLite format 3"sv, {"an SQLite database", "write it as JSON lines for tools/prepare_data.py"}},
    Signature{"\x93NUMPY"sv, {"a NumPy array", "name it NAME.npy, where it holds token ids"}},
    Signature{"\x89HDF\r\n\x1a\n"sv, {"an HDF5 file", leave_out}},
    Signature{"%PDF-"sv, {"a PDF document", leave_out}},
    Signature{"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, {"an old Office document", leave_out}},
    Signature{"\x89PNG\r\n\x1a\n"sv, {"a PNG image", leave_out}},
    Signature{"\xff\xd8\xff"sv, {"a JPEG image", leave_out}},
    Signature{"GIF87a"sv, {"a GIF image", leave_out}},
    Signature{"GIF89a"sv, {"a GIF image", leave_out}},
    Signature{"WEBPVP8"sv, {"a WebP image", leave_out}, 8},
    Signature{"\x7f"
              "ELF"sv,
              {"a program", leave_out}},
    Signature{"GGUF"sv, {"a GGUF file", weights}},
    Signature{"version https://git-lfs.github.com/spec/"sv, {"a pointer of Git LFS", "fetch the file: git lfs pull"}},
};

/// A number of 8 bytes, then JSON of that length.
bool is_safetensors(std::span<const std::byte> first, std::uint64_t size) {
  constexpr std::size_t length_bytes = 8;
  if (first.size() <= length_bytes || first[length_bytes] != std::byte{'{'}) return false;
  std::uint64_t length = 0;
  std::memcpy(&length, first.data(), length_bytes);
  return length >= 2 && length <= size - length_bytes;
}

struct Ending {
  std::string_view text;
  FileKind kind;
};

constexpr std::array endings{
    Ending{".jsonl"sv, {"a file of records", prepare}},
    Ending{".ndjson"sv, {"a file of records", prepare}},
    Ending{".csv"sv, {"a table of records", "write it as JSON lines or Parquet for tools/prepare_data.py"}},
    Ending{".tsv"sv, {"a table of records", "write it as JSON lines or Parquet for tools/prepare_data.py"}},
    Ending{".parquet"sv, {"a Parquet file", prepare}},
    Ending{".arrow"sv, {"an Arrow file", "write it as Parquet or JSON lines for tools/prepare_data.py"}},
    Ending{".feather"sv, {"an Arrow file", "write it as Parquet or JSON lines for tools/prepare_data.py"}},
    Ending{".gz"sv, {"a compressed file", "unpack it, or prepare it with tools/prepare_data.py"}},
    Ending{".zst"sv, {"a compressed file", "unpack it, or prepare it with tools/prepare_data.py"}},
    Ending{".xz"sv, {"a compressed file", "unpack it, then prepare it with tools/prepare_data.py"}},
    Ending{".bz2"sv, {"a compressed file", "unpack it, then prepare it with tools/prepare_data.py"}},
    Ending{".zip"sv, {"an archive", "unpack it, then prepare it with tools/prepare_data.py"}},
    Ending{".tar"sv, {"an archive", "unpack it, then prepare it with tools/prepare_data.py"}},
    Ending{".tgz"sv, {"an archive", "unpack it, then prepare it with tools/prepare_data.py"}},
    Ending{".idx"sv, {"an index of token files", "name the .bin beside it"}},
};

std::string lower_case(std::string text) {
  std::ranges::transform(text, text.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c; });
  return text;
}

}  // namespace

std::optional<FileKind> kind_of_content(std::span<const std::byte> first, std::uint64_t size) {
  const std::string_view text(reinterpret_cast<const char*>(first.data()), first.size());
  for (const Signature& signature : signatures) {
    if (text.size() >= signature.offset && text.substr(signature.offset).starts_with(signature.bytes)) {
      return signature.kind;
    }
  }
  if (is_safetensors(first, size)) return FileKind{"a safetensors file", weights};
  return std::nullopt;
}

std::optional<FileKind> kind_of_name(const std::filesystem::path& file) {
  const std::string name = lower_case(file.filename().string());
  for (const Ending& ending : endings) {
    if (name.ends_with(ending.text)) return ending.kind;
  }
  return std::nullopt;
}

bool is_json(const std::filesystem::path& file) { return lower_case(file.extension().string()) == ".json"; }

bool begins_as_records(std::string_view first) {
  constexpr auto blank = " \t\r\n"sv;
  const auto begin = first.find_first_not_of(blank);
  if (begin == std::string_view::npos) return false;
  if (first[begin] == '[') {
    const auto next = first.find_first_not_of(blank, begin + 1);
    return next != std::string_view::npos && first[next] == '{';
  }
  // The object of a document ends where the file does.
  return first[begin] == '{' && (first.find("}\n{") != first.npos || first.find("}\r\n{") != first.npos);
}

bool has_utf8_mark(std::span<const std::byte> first) {
  return first.size() >= utf8_mark_bytes && std::memcmp(first.data(), "\xef\xbb\xbf", utf8_mark_bytes) == 0;
}

}  // namespace tandem::data_files
