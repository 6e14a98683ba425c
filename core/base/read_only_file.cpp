#include "core/base/read_only_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/base/error.hpp"

namespace tandem {

void throw_unreadable(const std::filesystem::path& file, int error) {
  throw InputError(fmt::format("cannot read {}", file.string()), std::generic_category().message(error));
}

// A pipe without a writer would be waited for: not with O_NONBLOCK, which regular files know nothing of.
ReadOnlyFile::Opened::Opened(const std::filesystem::path& file)
    : fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (fd < 0) throw_unreadable(file, errno);
}

ReadOnlyFile::Opened::~Opened() { ::close(fd); }

ReadOnlyFile::ReadOnlyFile(const std::filesystem::path& file) : opened_(file) {
  struct stat status {};
  if (::fstat(opened_.fd, &status) != 0) throw_unreadable(file, errno);
  if (!S_ISREG(status.st_mode)) throw InputError(fmt::format("cannot read {}", file.string()), "not a regular file");
  size_ = static_cast<std::uint64_t>(status.st_size);
}

}  // namespace tandem
