#pragma once
// Libraries that are not part of the program and may be missing: looked for when they are needed. Internal to gpu_ops.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tandem::gpu {

/// A library loaded at run time; one that find() has returned stays loaded until the program ends, since what it gave
/// out may be in use anywhere.
class SharedLibrary {
 public:
  /// Whether a library that was found is the one. Best told from its file: what one that is refused has loaded may
  /// stay, and be found by name in place of another's.
  using Accepts = std::function<bool(const SharedLibrary&)>;
  /// Loads the first of `names` ("libcublasLt.so.13") that is found and accepted, each in the system's own search path,
  /// which gives one file, then in the folders of search_folders(). Unloads those that are not; without `accepts`, any
  /// is. Empty where there is none.
  static std::optional<SharedLibrary> find(const std::vector<std::string>& names, const Accepts& accepts = {});

  /// The function called `name`, or null.
  template <class Function>
  Function* function(const char* name) const noexcept {
    return reinterpret_cast<Function*>(symbol(name));
  }
  /// The path of `name` in the folder that this one was loaded from.
  std::string neighbour(const std::string& name) const;
  /// Loads `name` from the folder that this one was loaded from, if it is there, for good: from then on whoever loads
  /// it by name finds it, wherever they look.
  void load_neighbour(const std::string& name) const;
  /// The handle for dlsym.
  void* native() const noexcept { return handle_; }
  /// The file it was loaded from.
  const std::string& file() const noexcept { return file_; }

 private:
  SharedLibrary(void* handle, std::string file) : handle_(handle), file_(std::move(file)) {}
  void* symbol(const char* name) const noexcept;
  void* handle_;
  std::string file_;
};

/// Folders in which libraries are looked for once the system has none: the folders `nvidia/*/lib` of Python's packages
/// (of those that this code lies among, of $VIRTUAL_ENV and $CONDA_PREFIX, of the python3 on $PATH and of each file
/// that it is a link to, of the user, of the system), then those of $TANDEM_CUDA_LIBS, separated by colons.
std::vector<std::string> search_folders();

/// The folders `nvidia/*/lib` of the Python packages among which a file of one lies; none where it is in none.
std::vector<std::string> folders_beside(const std::string& file);

}  // namespace tandem::gpu
