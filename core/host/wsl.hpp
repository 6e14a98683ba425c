#pragma once
// Whether this Linux runs below Windows, whose driver then has the GPU.
#include <filesystem>

namespace tandem {

/// True under WSL2 where that has a GPU. `root`: of the file system. Does not throw.
bool runs_under_windows(const std::filesystem::path& root = "/") noexcept;

}  // namespace tandem
