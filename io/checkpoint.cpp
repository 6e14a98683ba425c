#include "io/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "core/base/mapped_file.hpp"
#include "core/params/state_digest.hpp"
#include "io/file_hash.hpp"
#include "io/plain_name.hpp"
#include "io/read_ahead.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* manifest_name = "manifest.json";
constexpr const char* state_name = "state.safetensors";
constexpr std::uintmax_t max_manifest_bytes = std::uintmax_t{256} << 20;

/// Name of the tensor that holds an array of a parameter.
std::string tensor_name(StateArray array, const std::string& parameter) {
  constexpr std::array<const char*, state_arrays.size()> prefixes = {"master.", "m.", "v."};
  return prefixes[static_cast<std::size_t>(array)] + parameter;
}

/// Arrays of a parameter that a checkpoint holds.
std::span<const StateArray> arrays_in(const Manifest& manifest, const CheckpointParameter& parameter) {
  if (!parameter.elsewhere.empty()) return {};
  return arrays_of(parameter.trainable, manifest.optimizer);
}

bool has(const Manifest& manifest, const CheckpointParameter& parameter, StateArray array) {
  const std::span<const StateArray> stored = arrays_in(manifest, parameter);
  return std::ranges::find(stored, array) != stored.end();
}

std::vector<TensorSpec> specs_of(const Manifest& manifest) {
  std::vector<TensorSpec> specs;
  for (const auto& parameter : manifest.parameters) {
    for (const StateArray array : arrays_in(manifest, parameter)) {
      specs.push_back({tensor_name(array, parameter.name), "F32", parameter.shape});
    }
  }
  return specs;
}

std::string where_of(const fs::path& directory) { return fmt::format("checkpoint {}", directory.string()); }

[[noreturn]] void refuse(const fs::path& directory, std::string_view why) {
  throw InputError(where_of(directory), why, "use another one of the run");
}

Manifest read_manifest(const fs::path& directory) {
  const fs::path file = directory / manifest_name;
  std::error_code error;
  const std::uintmax_t bytes = fs::is_regular_file(file, error) ? fs::file_size(file, error) : 0;
  std::ifstream stream(file, std::ios::binary);
  if (error || !stream || bytes == 0) {
    throw InputError(where_of(directory), "it has no readable manifest.json",
                     "name a folder like OUT/checkpoints/step-00000100");
  }
  if (bytes > max_manifest_bytes) refuse(directory, fmt::format("its manifest has {} bytes", bytes));
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return parse_manifest(text, where_of(directory));
}

[[noreturn]] void altered(const fs::path& directory, const std::string& file) {
  refuse(directory, fmt::format("{} has another content than when it was saved", file));
}

/// Entry of the state in the manifest.
const CheckpointFile& state_file(const fs::path& directory, const Manifest& manifest) {
  const auto& files = manifest.files;
  const auto found = std::find_if(files.begin(), files.end(), [](const auto& file) { return file.name == state_name; });
  if (found == files.end()) refuse(directory, "its manifest lists no state");
  return *found;
}

void check_files(const fs::path& directory, const Manifest& manifest, CheckpointCheck check) {
  for (const CheckpointFile& file : manifest.files) {
    const fs::path path = directory / file.name;
    if (file.name == state_name && check == CheckpointCheck::all_but_state) {
      if (MappedFile(path).bytes().size() != file.bytes) altered(directory, file.name);
    } else if (file_hash(path) != file.hash) {
      altered(directory, file.name);
    }
  }
}

/// Whether everything that the manifest lists is there in its size: a look at the folder, not at the bytes.
bool looks_whole(const fs::path& directory) {
  try {
    const Manifest manifest = read_manifest(directory);
    std::error_code error;
    return std::all_of(manifest.files.begin(), manifest.files.end(), [&](const CheckpointFile& file) {
      return fs::file_size(directory / file.name, error) == file.bytes && !error;
    });
  } catch (const InputError&) {
    return false;
  }
}

struct Found {
  fs::path path;
  std::uint64_t step = 0;
};

std::optional<std::uint64_t> step_of(std::string_view name) {
  constexpr std::string_view prefix = "step-";
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return step;
}

fs::path hidden_path(const fs::path& root, const std::string& name, const char* ending) {
  return root / fmt::format(".{}.{}", name, ending);
}

/// Newest first. One that was moved aside, to be replaced, counts where its place is still empty: the
/// process died between two renames.
std::vector<Found> checkpoints_below(const fs::path& root) {
  std::vector<Found> found;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.starts_with(".") && name.ends_with(".old")) {
      name = name.substr(1, name.size() - 5);
      if (fs::exists(root / name, error)) continue;
    }
    if (const auto step = step_of(name)) found.push_back({it->path(), *step});
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.step > b.step; });
  return found;
}

constexpr std::size_t at_once = std::size_t{1} << 16;  // values: both hashes and the writer find them in the cache

void write_array(std::size_t index, StateArray array, const CheckpointContent& content, SafetensorsWriter& writer,
                 StateDigest& digest) {
  const auto& parameter = content.manifest->parameters[index];
  const auto count = static_cast<std::size_t>(parameter.count());
  for (std::size_t first = 0; first < count;) {
    const auto buffer = content.buffer.first(std::min(count - first, content.buffer.size()));
    const auto values = content.read(index, array, static_cast<std::int64_t>(first), buffer);
    if (values.empty() || values.size() > count - first) {
      throw MisuseError("checkpoint state of another length", parameter.name);
    }
    for (std::size_t at = 0; at < values.size(); at += at_once) {
      const auto chunk = values.subspan(at, std::min(at_once, values.size() - at));
      writer.write(chunk.data(), chunk.size_bytes());
      digest.add(chunk.data(), static_cast<std::int64_t>(chunk.size()));
      if (content.progress) content.progress(writer.bytes());
    }
    first += values.size();
  }
}

/// Writes the state and returns its entry in the file list.
CheckpointFile write_state(const fs::path& file, const CheckpointContent& content, FileOps& ops) {
  Manifest& manifest = *content.manifest;
  SafetensorsWriter writer(file, specs_of(manifest), {{"format", "tandem"}}, ops);
  StateDigest digest;
  const std::vector<float> zeros(at_once);
  for (std::size_t i = 0; i < manifest.parameters.size(); ++i) {
    const auto& parameter = manifest.parameters[i];
    if (!parameter.elsewhere.empty()) {
      digest.add_parameter(parameter.name, parameter.elsewhere);
      continue;
    }
    const auto count = static_cast<std::size_t>(parameter.count());
    digest.begin_parameter(parameter.name);
    for (const StateArray array : state_arrays) {
      const bool stored = has(manifest, parameter, array);
      if (stored) write_array(i, array, content, writer, digest);
      for (std::size_t at = 0; !stored && at < count; at += at_once) {
        digest.add(zeros.data(), static_cast<std::int64_t>(std::min(at_once, count - at)));
      }
      digest.end_array();
    }
    digest.end_parameter(parameter.missed_updates);
  }
  writer.finish();
  manifest.state_digest = digest.text();
  return {state_name, writer.bytes(), writer.hash()};
}

/// Checks the names of added files: they must not replace each other, nor what makes up a checkpoint.
void check_names(const std::vector<FileBeside>& beside) {
  std::set<std::string> names = {manifest_name, state_name};
  for (const auto& [from, name] : beside) {
    if (!is_plain_name(name))
      throw MisuseError(fmt::format("{} beside a checkpoint", from.string()), "it names no file");
    if (!names.insert(name).second) {
      throw MisuseError(fmt::format("{} beside a checkpoint", from.string()),
                        fmt::format("there is a {} in it already", name));
    }
  }
}

CheckpointFile copy_beside(const FileBeside& file, const fs::path& directory, FileOps& ops) {
  const MappedFile source(file.from);
  FileWriter writer(directory / file.name, ops);
  writer.write(source.bytes().data(), source.bytes().size());
  writer.finish();
  return {file.name, writer.bytes(), writer.hash()};
}

/// Puts a finished folder in its place. Where that fails, what was there before is there again.
void publish(const fs::path& hidden, const fs::path& final, const fs::path& old, FileOps& ops) {
  std::error_code ignored;
  const bool replaces = fs::exists(final, ignored);
  if (replaces) {
    ops.remove_all(old);
    rename_or_throw(final, old, ops);
  }
  const int failed = ops.rename(hidden, final);
  if (failed != 0) {
    if (replaces) ops.rename(old, final);
    throw WriteError(fmt::format("cannot write {}", final.string()), std::generic_category().message(failed),
                     "check the folder, its permissions and the free space");
  }
}

void remove_checkpoint(const fs::path& path, FileOps& ops) {
  // Under its own name a half-removed checkpoint would look like a damaged one.
  const fs::path hidden = hidden_path(path.parent_path(), path.filename().string(), "tmp");
  ops.remove_all(ops.rename(path, hidden) == 0 ? hidden : path);
}

void clear_leftovers(const fs::path& root, FileOps& ops) {
  std::vector<fs::path> leftovers;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(".step-")) continue;
    const bool needed = name.ends_with(".old") && !fs::exists(root / name.substr(1, name.size() - 5), ignored);
    if (!needed) leftovers.push_back(entry.path());
  }
  for (const auto& path : leftovers) ops.remove_all(path);
}

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

fs::path write_checkpoint(const fs::path& root, const CheckpointContent& content, FileOps& ops) {
  Manifest& manifest = *content.manifest;
  check_names(content.beside);
  create_directories_or_throw(root, ops);
  const std::string name = checkpoint_name(manifest.step);
  const fs::path final = root / name;
  const fs::path hidden = hidden_path(root, name, "tmp");
  const fs::path old = hidden_path(root, name, "old");
  ops.remove_all(hidden);
  create_directories_or_throw(hidden, ops);
  Unfinished guard(hidden, ops);
  manifest.files.clear();
  for (const FileBeside& file : content.beside) manifest.files.push_back(copy_beside(file, hidden, ops));
  manifest.files.push_back(write_state(hidden / state_name, content, ops));
  write_file_atomically(hidden / manifest_name, manifest_text(manifest), ops);
  sync_directory(hidden, ops);
  publish(hidden, final, old, ops);
  guard.keep();
  sync_directory(root, ops);
  ops.remove_all(old);
  return final;
}

Checkpoint::Checkpoint(const fs::path& directory, CheckpointCheck check)
    : directory_(directory), manifest_(read_manifest(directory)) {
  static_cast<void>(state_file(directory, manifest_));
  check_files(directory, manifest_, check);
  state_ = std::make_unique<SafetensorsReader>(directory / state_name);
  for (const TensorSpec& spec : specs_of(manifest_)) {
    const StoredTensor* tensor = state_->find(spec.name);
    if (tensor == nullptr || tensor->shape != spec.shape || tensor->dtype != spec.dtype) {
      refuse(directory, fmt::format("tensor {} is missing or of another shape", spec.name));
    }
  }
}

void Checkpoint::read(std::size_t index, StateArray array, std::int64_t first, std::span<float> values) const {
  const auto& parameter = manifest_.parameters.at(index);
  if (!parameter.elsewhere.empty()) {
    throw InputError(where_of(directory_),
                     fmt::format("it does not hold the values of {}, which was not trained", parameter.name),
                     "take those from the base that it was trained over");
  }
  if (!has(manifest_, parameter, array)) {
    std::fill(values.begin(), values.end(), 0.0F);
    return;
  }
  widen(*state_->find(tensor_name(array, parameter.name)), first, values);
}

/// Arrays as they follow each other in the file.
std::vector<Checkpoint::Stored> Checkpoint::stored() const {
  std::vector<Stored> arrays;
  for (std::size_t index = 0; index < manifest_.parameters.size(); ++index) {
    const auto& parameter = manifest_.parameters[index];
    for (const StateArray array : arrays_in(manifest_, parameter)) {
      const StoredTensor& tensor = *state_->find(tensor_name(array, parameter.name));
      if (tensor.begin % sizeof(float) != 0) refuse(directory_, fmt::format("{} is not aligned", parameter.name));
      arrays.push_back({tensor.begin, tensor.begin + tensor.bytes.size(), index, array});
    }
  }
  std::sort(arrays.begin(), arrays.end(), [](const Stored& a, const Stored& b) { return a.begin < b.begin; });
  return arrays;
}

void Checkpoint::stream(const StateWriter& write) const {
  const auto arrays = stored();
  auto next = arrays.begin();
  ReadAhead file(directory_ / state_name);
  Hash128 hash;
  std::uint64_t at = 0;  // position of the piece in the file
  for (auto piece = file.next(); !piece.empty(); piece = file.next()) {
    hash.add(piece.data(), piece.size());
    const std::uint64_t end = at + piece.size();
    while (next != arrays.end() && next->begin < end) {
      const std::uint64_t from = std::max(at, next->begin);
      const std::uint64_t to = std::min(end, next->end);
      const auto* const values = reinterpret_cast<const float*>(piece.data() + (from - at));
      write(next->index, next->array, static_cast<std::int64_t>((from - next->begin) / sizeof(float)),
            {values, static_cast<std::size_t>(to - from) / sizeof(float)});
      if (next->end > end) break;  // the rest comes with the next piece
      ++next;
    }
    at = end;
  }
  if (hash.text() != state_file(directory_, manifest_).hash) altered(directory_, state_name);
}

std::size_t Checkpoint::index_of(const std::string& name) const {
  const auto& all = manifest_.parameters;
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& p) { return p.name == name; });
  if (found == all.end()) refuse(directory_, fmt::format("it has no parameter {}", name));
  return static_cast<std::size_t>(found - all.begin());
}

std::vector<fs::path> Checkpoint::files_beside() const {
  std::vector<fs::path> files;
  for (const CheckpointFile& file : manifest_.files) {
    if (file.name != state_name) files.push_back(directory_ / file.name);
  }
  return files;
}

std::string Checkpoint::state_digest() const {
  std::vector<float> block(static_cast<std::size_t>(state_digest_block));
  StateDigest digest;
  for (const auto& parameter : manifest_.parameters) {
    if (!parameter.elsewhere.empty()) {
      digest.add_parameter(parameter.name, parameter.elsewhere);
      continue;
    }
    digest.begin_parameter(parameter.name);
    for (const StateArray array : state_arrays) {
      const StoredTensor* tensor =
          has(manifest_, parameter, array) ? state_->find(tensor_name(array, parameter.name)) : nullptr;
      for (std::int64_t at = 0; at < parameter.count(); at += state_digest_block) {
        const auto count = std::min(state_digest_block, parameter.count() - at);
        const auto values = std::span(block).first(static_cast<std::size_t>(count));
        if (tensor != nullptr)
          widen(*tensor, at, values);
        else
          std::fill(values.begin(), values.end(), 0.0F);
        digest.add(values.data(), count);
      }
      digest.end_array();
    }
    digest.end_parameter(parameter.missed_updates);
  }
  return digest.text();
}

bool is_checkpoint(const fs::path& directory) {
  std::error_code ignored;
  return fs::is_regular_file(directory / manifest_name, ignored);
}

std::unique_ptr<Checkpoint> newest_checkpoint(
    const fs::path& root, const std::function<void(const fs::path&, const std::string&)>& passed_over,
    const CheckpointSearch& search) {
  for (const Found& candidate : checkpoints_below(root)) {
    if (std::cmp_greater_equal(candidate.step, search.before)) continue;
    try {
      return std::make_unique<Checkpoint>(candidate.path, search.check);
    } catch (const NewerFormat&) {
      throw;
    } catch (const InputError& error) {
      passed_over(candidate.path, error.what());
    }
  }
  return nullptr;
}

void prune_checkpoints(const fs::path& root, const KeepOptions& options, FileOps& ops) noexcept {
  try {
    clear_leftovers(root, ops);
    const auto written = step_of(options.written.filename().string());
    int counted = 0;
    for (const Found& found : checkpoints_below(root)) {
      if (found.path == options.written) {
        ++counted;
        continue;
      }
      if (written && found.step > *written) {
        remove_checkpoint(found.path, ops);
        continue;
      }
      if (options.keep < 1 || found.path == options.best) continue;
      const bool enough = counted >= options.keep;
      if (enough) {
        remove_checkpoint(found.path, ops);
      } else if (looks_whole(found.path)) {
        ++counted;
      }
    }
  } catch (const std::exception&) {
    return;  // no memory for a list: the old checkpoints stay
  }
}

}  // namespace tandem
