#include "gpu_ops/device/library_file.hpp"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>

namespace tandem::gpu {
namespace {

/// An ELF file with its section headers. What lies beyond its end is not there.
class Image {
 public:
  explicit Image(const std::string& file) {
    std::ostringstream read;  // stays empty for a folder, without an exception
    read << std::ifstream(file, std::ios::binary).rdbuf();
    bytes_ = read.str();
    const auto header = at<Elf64_Ehdr>(0);
    if (header && std::memcmp(header->e_ident, ELFMAG, SELFMAG) == 0 && header->e_ident[EI_CLASS] == ELFCLASS64) {
      header_ = *header;
    }
  }
  std::size_t sections() const { return header_.e_shnum; }
  std::optional<Elf64_Shdr> section(std::size_t i) const {
    if (i >= sections()) return std::nullopt;
    return at<Elf64_Shdr>(header_.e_shoff + i * sizeof(Elf64_Shdr));
  }
  template <class T>
  std::optional<T> at(std::uint64_t offset) const {
    if (offset > bytes_.size() || bytes_.size() - offset < sizeof(T)) return std::nullopt;
    T value{};
    std::memcpy(&value, bytes_.data() + offset, sizeof(T));
    return value;
  }
  std::string_view text(std::uint64_t offset) const {
    return offset < bytes_.size() ? std::string_view(bytes_.c_str() + offset) : std::string_view();
  }

 private:
  std::string bytes_;
  Elf64_Ehdr header_{};
};

std::optional<Elf64_Sym> find_symbol(const Image& image, std::string_view name) {
  for (std::size_t i = 0; i < image.sections(); ++i) {
    const auto symbols = image.section(i);
    if (!symbols || symbols->sh_type != SHT_DYNSYM) continue;
    const auto names = image.section(symbols->sh_link);
    if (!names) continue;
    for (std::uint64_t at = 0; at < symbols->sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = image.at<Elf64_Sym>(symbols->sh_offset + at);
      if (!symbol) break;
      if (image.text(names->sh_offset + symbol->st_name) == name) return symbol;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::uint32_t> exported_number(const std::string& file, const std::string& symbol) {
  const Image image(file);
  const auto found = find_symbol(image, symbol);
  if (!found || found->st_shndx == SHN_UNDEF) return std::nullopt;
  const auto home = image.section(found->st_shndx);
  if (!home || home->sh_type == SHT_NOBITS) return std::nullopt;
  return image.at<std::uint32_t>(home->sh_offset + (found->st_value - home->sh_addr));
}

}  // namespace tandem::gpu
