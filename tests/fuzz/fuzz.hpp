#pragma once
// Helpers that the fuzz targets share. A target takes bytes for what a user's file holds; whatever they are, reading
// them ends well or throws the error that the program turns into one line. Anything else is a find.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/base/error.hpp"

namespace tandem::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// A file in memory with the bytes of one input; `ending` decides how it is read.
class InputFile {
 public:
  InputFile(std::string_view bytes, const std::string& ending)
      : path_(std::filesystem::temp_directory_path() / ("tandem-fuzz-" + std::to_string(::getpid()) + ending)) {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) std::abort();
    ::close(fd);
  }
  ~InputFile() { ::unlink(path_.c_str()); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// Runs `read`; an error must be one line and end the program with `code`. Whatever else is thrown ends the fuzzer.
template <class Read>
int expect(ExitCode code, const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    const std::string_view line = error.what();
    if (error.exit_code() != code || line.empty() || line.find_first_of("\r\n") != line.npos) std::abort();
  }
  return 0;
}

}  // namespace tandem::fuzz
