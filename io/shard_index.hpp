#pragma once
// The index of a sharded model (`model.safetensors.index.json`): which file beside it holds which tensor.
#include <set>
#include <string>
#include <string_view>

namespace tandem {

/// Names of the shards, each once. Throws InputError that names `where` if `text` is no index, or names anything
/// but a file in the index's own folder.
std::set<std::string> shards_of_index(std::string_view text, const std::string& where);

}  // namespace tandem
