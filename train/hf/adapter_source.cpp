#include "train/hf/adapter_source.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/mapped_file.hpp"
#include "models/transformer/transformer.hpp"
#include "offload/engine/state_io.hpp"
#include "train/hf/hf_weights.hpp"
#include "train/hf/lora_modules.hpp"
#include "train/hf/model_names.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char *description_name = "adapter_config.json", *tensors_name = "adapter_model.safetensors";
constexpr const char* prefix = "base_model.model.";
constexpr const char* head_name = "base_model.model.lm_head.weight";

std::string text_of(const fs::path& file) {
  const MappedFile mapped(file);
  return {reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()};
}

bool equal(const StoredTensor& a, const StoredTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape && std::ranges::equal(a.bytes, b.bytes);
}

/// Name that a tensor has where transformers 4 had loaded the model: Mixtral's router lay elsewhere.
std::string older_name(std::string name) {
  constexpr std::string_view now = ".mlp.gate.", then = ".block_sparse_moe.gate.";
  if (const std::size_t at = name.find(now); at != name.npos) name.replace(at, now.size(), then);
  return name;
}

/// Lists of names that are wrong, as one reason.
class Findings {
 public:
  std::vector<std::string> missing, misshapen, unexpected;

  void refuse(const std::string& what) const {
    std::string why;
    for (const auto& [word, names] :
         {std::pair("missing", &missing), {"misshapen", &misshapen}, {"unexpected", &unexpected}}) {
      if (names->empty()) continue;
      const auto end = names->begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(names->size(), 5));
      why += fmt::format("{}{}: {}{}", why.empty() ? "" : "; ", word, fmt::join(names->begin(), end, ", "),
                         names->size() > 5 ? fmt::format(" and {} more", names->size() - 5) : "");
    }
    if (!why.empty()) throw InputError(what, why, "name the base that the adapter was made of");
  }
};

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

}  // namespace

std::vector<PeftTensor> peft_tensors_of(const ModelConfig& config, const Parameter& p) {
  if (is_adapter(p)) return adapter_tensors(config, p);
  const HfTensor tensor = hf_tensor_of(config, p);
  return {{.name = prefix + tensor.name,
           .shape = stored_shape(p, tensor),
           .transposed = tensor.transposed,
           .first_row = tensor.first_row,
           .count = p.count}};
}

bool is_peft_folder(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / description_name, ignored) || fs::exists(folder / tensors_name, ignored) ||
         fs::exists(folder / "adapter_model.bin", ignored);
}

void refuse_several_adapters(const fs::path& directory, std::string_view typed) {
  std::vector<std::string> adapters;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (is_peft_folder(it->path())) adapters.push_back(it->path().string());
  }
  if (adapters.empty()) return;
  std::ranges::sort(adapters);
  const std::string more = adapters.size() > 5 ? fmt::format(" and {} more", adapters.size() - 5) : "";
  adapters.resize(std::min<std::size_t>(adapters.size(), 5));
  throw UsageError(fmt::format("{} {}", typed, directory.string()), "its folders are adapters, and it is none",
                   fmt::format("name one of {}{}", fmt::join(adapters, ", "), more));
}

AdapterSource::AdapterSource(const fs::path& folder) : folder_(folder) {
  std::error_code ignored;
  for (const char* name : {description_name, tensors_name}) {
    if (fs::exists(folder / name, ignored)) continue;
    const bool pickled = fs::exists(folder / "adapter_model.bin", ignored);
    throw UsageError(fmt::format("adapter {}", folder.string()), fmt::format("it has no {}", name),
                     pickled ? "load it with PEFT, and save it with save_pretrained, which writes safetensors"
                             : "name a folder that PEFT's save_pretrained has written");
  }
  description_ = parse_peft_config(text_of(folder / description_name), folder.string());
  tensors_ = std::make_unique<SafetensorsReader>(folder / tensors_name);
}

AdapterSource::AdapterSource(std::unique_ptr<Checkpoint> checkpoint)
    : folder_(checkpoint->directory()), checkpoint_(std::move(checkpoint)) {
  const Manifest& manifest = checkpoint_->manifest();
  if (manifest.adapter.empty()) {
    throw UsageError(fmt::format("adapter {}", folder_.string()), "its run has trained the model itself, no adapter",
                     "give it as --model");
  }
  description_ = parse_peft_config(manifest.adapter, folder_.string());
}

bool AdapterSource::holds(const ModelConfig& config, const Parameter& p) const {
  return is_adapter(p) || is_saved_module(config, p, description_.options.modules_to_save);
}

const StoredTensor* AdapterSource::stored(const ModelConfig& config, const Parameter& p, const PeftTensor& as) const {
  const StoredTensor* found = tensors_->find(as.name);
  if (found == nullptr) found = tensors_->find(older_name(as.name));
  const bool is_table = config.tied_head && p.layer == 0 && p.name == "tokens";
  return found == nullptr && is_table ? tensors_->find(head_name) : found;
}

/// PEFT trains a saved embedding apart from a head that is tied to it, unless told: then they are two, and here one.
void AdapterSource::check_tied(const ModelConfig& config, const Parameter& table) const {
  const StoredTensor* const own = tensors_->find(peft_tensors_of(config, table).front().name);
  const StoredTensor* const head = tensors_->find(head_name);
  if (own != nullptr && head != nullptr ? equal(*own, *head) : description_.tied_modules) return;
  throw InputError(fmt::format("adapter {}", folder_.string()),
                   "its embedding and head were trained apart, and the base has one tensor for both",
                   "set \"tie_word_embeddings\" to false in the base's config.json, or train with ensure_weight_tying");
}

void AdapterSource::check_checkpoint(const ParameterLayout& layout) const {
  Findings wrong;
  const std::vector<CheckpointParameter>& stored = checkpoint_->manifest().parameters;
  const std::vector<CheckpointParameter> expected = checkpoint_parameters(layout);
  const auto named = [](const std::vector<CheckpointParameter>& among, const std::string& name) {
    return std::ranges::find(among, name, &CheckpointParameter::name);
  };
  for (const CheckpointParameter& p : expected) {
    const auto found = named(stored, p.name);
    if (found == stored.end()) wrong.missing.push_back(p.name);
    if (found != stored.end() && found->shape != p.shape) wrong.misshapen.push_back(p.name);
  }
  for (const CheckpointParameter& p : stored) {
    if (named(expected, p.name) == expected.end()) wrong.unexpected.push_back(p.name);
  }
  wrong.refuse(fmt::format("checkpoint {}", folder_.string()));
}

void AdapterSource::check(const ModelConfig& config, const ParameterLayout& layout) const {
  if (checkpoint_) return check_checkpoint(layout);
  Findings wrong;
  std::set<std::string> used;
  const Parameter* table = nullptr;
  for (const Parameter* p : layout.owned_parameters()) {
    if (!holds(config, *p)) continue;
    if (config.tied_head && p->layer == 0 && p->name == "tokens") table = p;
    for (const PeftTensor& as : peft_tensors_of(config, *p)) {
      used.insert(as.name);
      used.insert(older_name(as.name));
      const StoredTensor* const found = stored(config, *p, as);
      if (found == nullptr) {
        wrong.missing.push_back(as.name);
      } else if (found->shape != as.shape) {
        wrong.misshapen.push_back(
            fmt::format("{} {} instead of {}", as.name, shape_text(found->shape), shape_text(as.shape)));
      } else if (found->dtype != "F32" && found->dtype != "F16" && found->dtype != "BF16") {
        wrong.misshapen.push_back(fmt::format("{} of type {}", as.name, found->dtype));
      }
    }
  }
  if (table != nullptr) used.insert(head_name);
  for (const auto& [name, tensor] : tensors_->tensors()) {
    if (!used.contains(name)) wrong.unexpected.push_back(name);
  }
  wrong.refuse(fmt::format("adapter {}", folder_.string()));
  if (table != nullptr) check_tied(config, *table);
}

void AdapterSource::read(const ModelConfig& config, const Parameter& p, std::int64_t first,
                         std::span<float> values) const {
  if (checkpoint_) {
    return checkpoint_->read(checkpoint_->index_of(p.full_name), StateArray::master, first, values);
  }
  const std::vector<PeftTensor> tensors = peft_tensors_of(config, p);
  const std::int64_t each = tensors.front().count;
  while (!values.empty()) {
    const std::int64_t within = first % each;
    const auto part = values.first(std::min(values.size(), static_cast<std::size_t>(each - within)));
    const PeftTensor& as = tensors.at(static_cast<std::size_t>(first / each));
    read_part(*stored(config, p, as), as, within, part);
    first += std::ssize(part);
    values = values.subspan(part.size());
  }
}

void AdapterSource::read_part(const StoredTensor& tensor, const PeftTensor& as, std::int64_t first,
                              std::span<float> values) const {
  if (!as.transposed) return widen(tensor, as.place(first), values);
  // Few enough to be held, as one side of it is the rank, or the model's width.
  std::vector<float> all(static_cast<std::size_t>(tensor.count));
  widen(tensor, 0, all);
  for (float& value : values) value = all[static_cast<std::size_t>(as.place(first++))];
}

std::shared_ptr<const AdapterSource> open_adapter(const fs::path& path, std::string_view typed) {
  std::error_code ignored;
  if (is_checkpoint(path)) return std::make_shared<AdapterSource>(std::make_unique<Checkpoint>(path));
  if (fs::is_directory(path / "checkpoints", ignored)) {
    auto newest = newest_checkpoint(path / "checkpoints",
                                    [](const fs::path&, const std::string& why) { spdlog::warn("{}", why); });
    if (!newest) throw InputError(fmt::format("run {}", path.string()), "it holds no good checkpoint");
    return std::make_shared<AdapterSource>(std::move(newest));
  }
  if (is_peft_folder(path)) return std::make_shared<AdapterSource>(path);
  refuse_several_adapters(path, typed);
  const bool there = fs::exists(path, ignored);
  const std::vector<std::string> near = there ? std::vector<std::string>() : nearest_folders(path);
  throw UsageError(fmt::format("{} {}", typed, path.string()),
                   there ? "it holds no adapter" : "there is no such folder",
                   near.empty() ? "name a folder that PEFT has written, or a run or checkpoint with adapters"
                                : fmt::format("perhaps {}", fmt::join(near, ", ")));
}

}  // namespace tandem
