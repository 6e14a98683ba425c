#include "data/data_file.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "core/base/error.hpp"

namespace tandem {
namespace {

[[noreturn]] void changed(const std::filesystem::path& file, const std::string& how) {
  throw InputError(fmt::format("data {}", file.string()), fmt::format("it has changed since the start: {}", how),
                   "leave data as it is while it is read; training goes on from its last checkpoint with --resume");
}

void allow_many_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);  // a refusal is told by opening, which says what is lacking
}

}  // namespace

DataFile::DataFile(const std::filesystem::path& file) : path_(file) {
  allow_many_open_files();
  file_ = std::make_unique<const ReadOnlyFile>(file);
}

void DataFile::read(std::uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = ::pread(file_->descriptor(), to.data(), to.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) changed(path_, std::generic_category().message(errno));
    if (got == 0) changed(path_, fmt::format("it ends at byte {} of {}", offset, size()));
    offset += static_cast<std::uint64_t>(got);
    to = to.subspan(static_cast<std::size_t>(got));
  }
}

}  // namespace tandem
