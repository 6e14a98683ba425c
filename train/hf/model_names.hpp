#pragma once
// Names that a model is asked for by: built-in shapes nearly spelt, names of the hub that are in its local cache.
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Built-in shapes that may be meant by a name that is none, the likeliest first, three at most.
std::vector<std::string> nearest_shapes(std::string_view name);

/// Names that may be meant by one that is none of them, the likeliest first, three at most.
std::vector<std::string> nearest_names(std::string_view name, const std::vector<std::string>& among);

/// Folders beside a path that is not there and that may be meant by it, likewise.
std::vector<std::string> nearest_folders(const std::filesystem::path& missing);

/// Whether it can be a name of the hub: "org/name".
bool is_hub_name(std::string_view name);

/// Folder of the hub's local cache: $HF_HUB_CACHE, $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub or
/// ~/.cache/huggingface/hub.
std::filesystem::path hub_cache();

/// Snapshot of the branch `main` of a model in the hub's local cache; empty where there is none.
std::optional<std::filesystem::path> cached_snapshot(std::string_view name);

}  // namespace tandem
