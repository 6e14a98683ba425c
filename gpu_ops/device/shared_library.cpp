#include "gpu_ops/device/shared_library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace tandem::gpu {
namespace {

namespace fs = std::filesystem;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

/// Folders below `parent`, in order of name; none where it cannot be read.
std::vector<fs::path> folders_of(const fs::path& parent) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->is_directory(ignored)) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// The file that this code is part of: a program, or a module of Python.
fs::path own_file() {
  Dl_info info{};
  std::error_code error;
  if (::dladdr(reinterpret_cast<const void*>(&environment), &info) == 0 || info.dli_fname == nullptr) return {};
  return fs::canonical(info.dli_fname, error);
}

/// prefix/lib/python3.N/{site,dist}-packages/nvidia/NAME/lib
void add_python_folders(const fs::path& prefix, std::vector<std::string>& folders) {
  for (const fs::path& python : folders_of(prefix / "lib")) {
    if (!python.filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      for (const fs::path& package : folders_of(python / packages / "nvidia")) folders.push_back(package / "lib");
    }
  }
}

/// The folders that a variable lists, separated by colons.
std::vector<std::string> folders_in(const char* variable) {
  std::vector<std::string> folders;
  std::istringstream given(environment(variable));
  for (std::string folder; std::getline(given, folder, ':');) {
    if (!folder.empty()) folders.push_back(folder);
  }
  return folders;
}

void add_once(const fs::path& prefix, std::vector<fs::path>& prefixes) {
  if (std::find(prefixes.begin(), prefixes.end(), prefix) == prefixes.end()) prefixes.push_back(prefix);
}

/// Folders that the first `python3` of $PATH may belong to: the one above its own. It may be a link to a virtual
/// environment's interpreter, which is a link to the system's: the packages lie beside one of them, and nothing says
/// beside which.
std::vector<fs::path> prefixes_of_python() {
  constexpr int most_links = 40;  // the kernel's limit
  std::vector<fs::path> prefixes;
  for (const fs::path folder : folders_in("PATH")) {
    std::error_code error;
    fs::path interpreter = folder / "python3";
    if (!fs::exists(interpreter, error)) continue;
    add_once(folder.parent_path(), prefixes);
    for (int link = 0; link < most_links && !error; ++link) {
      // A folder on the way may be a link itself.
      const fs::path real = fs::canonical(interpreter.parent_path(), error);
      if (error) break;
      // Folders of the system come last.
      if (real != "/usr/bin" && real != "/usr/local/bin") add_once(real.parent_path(), prefixes);
      interpreter = real / fs::read_symlink(interpreter, error);
    }
    break;
  }
  return prefixes;
}

void* load(const std::string& file) { return ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL); }

std::string file_of(void* handle, const std::string& asked) {
  link_map* map = nullptr;
  return ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? std::string(map->l_name) : asked;
}

}  // namespace

std::vector<std::string> folders_beside(const std::string& file) {
  std::vector<std::string> folders;
  for (fs::path folder = fs::path(file).parent_path(); folder.has_relative_path(); folder = folder.parent_path()) {
    if (folder.filename() != "site-packages" && folder.filename() != "dist-packages") continue;
    for (const fs::path& package : folders_of(folder / "nvidia")) folders.push_back(package / "lib");
    break;
  }
  return folders;
}

std::vector<std::string> search_folders() {
  std::vector<std::string> folders = folders_beside(own_file().string());
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const std::string prefix = environment(variable);
    if (!prefix.empty()) add_python_folders(prefix, folders);
  }
  for (const fs::path& prefix : prefixes_of_python()) add_python_folders(prefix, folders);
  const std::string home = environment("HOME");
  if (!home.empty()) add_python_folders(fs::path(home) / ".local", folders);
  for (const char* prefix : {"/usr/local", "/usr"}) add_python_folders(prefix, folders);
  for (std::string& folder : folders_in("TANDEM_CUDA_LIBS")) folders.push_back(std::move(folder));
  return folders;
}

std::optional<SharedLibrary> SharedLibrary::find(const std::vector<std::string>& names, const Accepts& accepts) {
  const auto attempt = [&](const std::string& file) -> std::optional<SharedLibrary> {
    void* const handle = load(file);
    if (handle == nullptr) return std::nullopt;
    const SharedLibrary library(handle, file_of(handle, file));
    if (!accepts || accepts(library)) return library;
    // A refused library is closed: whoever asks for the name later would get this one, wherever they look.
    ::dlclose(handle);
    return std::nullopt;
  };
  for (const std::string& name : names) {
    if (const auto found = attempt(name)) return found;
  }
  const std::vector<std::string> folders = search_folders();
  for (const std::string& name : names) {
    for (const std::string& folder : folders) {
      if (const auto found = attempt((fs::path(folder) / name).string())) return found;
    }
  }
  return std::nullopt;
}

std::string SharedLibrary::neighbour(const std::string& name) const {
  return (fs::path(file_).parent_path() / name).string();
}

void SharedLibrary::load_neighbour(const std::string& name) const { static_cast<void>(load(neighbour(name))); }

void* SharedLibrary::symbol(const char* name) const noexcept { return ::dlsym(handle_, name); }

}  // namespace tandem::gpu
