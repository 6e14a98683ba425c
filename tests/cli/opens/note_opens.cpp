// Notes the name of each file that a program has opened, a line each, in the file that $TANDEM_TEST_OPENED names.
// Loaded before the C library (LD_PRELOAD), whose functions it calls.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

void note(const char* name) {
  const char* const log = std::getenv("TANDEM_TEST_OPENED");
  if (log == nullptr) return;
  const auto file = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0644));
  const std::string line = std::string(name) + "\n";
  if (file < 0 || ::write(file, line.data(), line.size()) < 0) std::abort();  // a note that is lost would pass a test
  ::close(file);
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

mode_t mode_of(int flags, va_list& more) { return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0; }

int noted(int file, const char* name) {
  if (file >= 0) note(name);
  return file;
}

std::FILE* noted(std::FILE* file, const char* name) {
  if (file != nullptr) note(name);
  return file;
}

}  // namespace

extern "C" {

int open(const char* name, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_of(flags, more);
  va_end(more);
  return noted(next<int (*)(const char*, int, ...)>("open")(name, flags, mode), name);
}

int open64(const char* name, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_of(flags, more);
  va_end(more);
  return noted(next<int (*)(const char*, int, ...)>("open64")(name, flags, mode), name);
}

int openat(int folder, const char* name, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = mode_of(flags, more);
  va_end(more);
  return noted(next<int (*)(int, const char*, int, ...)>("openat")(folder, name, flags, mode), name);
}

std::FILE* fopen(const char* name, const char* mode) {
  return noted(next<std::FILE* (*)(const char*, const char*)>("fopen")(name, mode), name);
}

std::FILE* fopen64(const char* name, const char* mode) {
  return noted(next<std::FILE* (*)(const char*, const char*)>("fopen64")(name, mode), name);
}
}
