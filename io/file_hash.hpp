#pragma once
// Hashes of files, as manifests have them. Internal to io.
#include <filesystem>
#include <string>

namespace tandem {

/// XXH3-128 of a file's bytes, 32 hexadecimal digits. Throws InputError.
std::string file_hash(const std::filesystem::path& file);

}  // namespace tandem
