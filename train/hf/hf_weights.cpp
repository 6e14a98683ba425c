#include "train/hf/hf_weights.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>
#include <system_error>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/mapped_file.hpp"
#include "io/shard_index.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char* tied_head_name = "lm_head.weight";

/// The shards that an index names, each once.
std::vector<fs::path> files_of_index(const fs::path& directory, const fs::path& index) {
  const MappedFile file(index);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  std::vector<fs::path> files;
  for (const std::string& name : shards_of_index(text, index.string())) files.push_back(directory / name);
  return files;
}

/// The single file comes before shards, as transformers takes them: in a folder with both they may be of two models.
std::vector<fs::path> tensor_files(const fs::path& directory) {
  const fs::path single = directory / "model.safetensors";
  const fs::path index = directory / "model.safetensors.index.json";
  std::error_code error;
  if (fs::exists(single, error)) return {single};
  if (fs::exists(index, error)) return files_of_index(directory, index);
  std::set<fs::path> files;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const bool is_adapter_file = it->path().filename() == "adapter_model.safetensors";
    if (it->path().extension() == ".safetensors" && !is_adapter_file) files.insert(it->path());
  }
  return {files.begin(), files.end()};
}

/// Whether a tensor of published files is no parameter: masks and tables that are computed.
bool is_buffer(const std::string& name) {
  return std::ranges::any_of(std::array{".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"},
                             [&](const char* buffer) { return name.ends_with(buffer); });
}

std::string named(const std::vector<std::string>& names) {
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(names.size(), 5));
  return fmt::format("{}{}", fmt::join(names.begin(), end, ", "),
                     names.size() > 5 ? fmt::format(" and {} more", names.size() - 5) : "");
}

}  // namespace

std::vector<std::int64_t> stored_shape(const Parameter& p, const HfTensor& tensor) {
  std::vector<std::int64_t> shape = {tensor.rows};
  for (int i = std::max(1, p.shape.rank() - 1); i < p.shape.rank(); ++i) shape.push_back(p.shape[i]);
  if (tensor.transposed) std::reverse(shape.begin(), shape.end());
  return shape;
}

HfWeightFiles::HfWeightFiles(fs::path directory) : directory_(std::move(directory)), files_(tensor_files(directory_)) {}

std::shared_ptr<const HfWeights> HfWeightFiles::weights() {
  const std::lock_guard lock(opening_);
  if (!opened_) opened_ = std::make_shared<const HfWeights>(directory_, files_);
  return opened_;
}

void HfWeightFiles::close() {
  const std::lock_guard lock(opening_);
  opened_.reset();
}

HfWeights::HfWeights(fs::path directory, const std::vector<fs::path>& files) : directory_(std::move(directory)) {
  files_.reserve(files.size());
  for (const fs::path& file : files) files_.emplace_back(file);
  for (const auto& file : files_) {
    for (const auto& [name, tensor] : file.tensors()) add(file, name, tensor);
  }
}

/// A tensor that two shards hold alike is one; of two that differ nobody can say which is meant.
void HfWeights::add(const SafetensorsReader& file, const std::string& name, const StoredTensor& tensor) {
  const auto [place, is_new] = tensors_.emplace(name, Placed{&tensor, &file});
  if (is_new) return;
  const auto& [known, known_file] = place->second;
  if (known->dtype == tensor.dtype && known->shape == tensor.shape && std::ranges::equal(known->bytes, tensor.bytes))
    return;
  throw InputError(fmt::format("model {}", directory_.string()),
                   fmt::format("{} and {} both hold tensor {}, but not alike", known_file->path().filename().string(),
                               file.path().filename().string(), name),
                   "copy or download the files again, or remove the one that does not belong there");
}

const StoredTensor* HfWeights::find(const std::string& name) const {
  struct Spelling {
    std::string_view ours, theirs;
  };
  // The first GPT-2 files were saved without the model's own prefix; those of models that see say whose language model
  // it is.
  for (const auto& [ours, theirs] : {Spelling{"", ""},
                                     {"transformer.", ""},
                                     {"model.", ""},
                                     {"", "language_model."},
                                     {"model.", "model.language_model."}}) {
    if (!name.starts_with(ours)) continue;
    const auto found = tensors_.find(std::string(theirs) + name.substr(ours.size()));
    if (found != tensors_.end()) return found->second.tensor;
  }
  return nullptr;
}

/// Tensor of a parameter's name; a tied embedding may have been saved under the name of the head alone.
const StoredTensor* HfWeights::stored(const ModelConfig& config, const std::string& name) const {
  const StoredTensor* const found = find(name);
  const bool is_embedding = name == "model.embed_tokens.weight" || name == "transformer.wte.weight";
  return found == nullptr && config.tied_head && is_embedding ? find(tied_head_name) : found;
}

/// The matrix of this name as bitsandbytes has quantized it; none where it is stored plainly.
std::optional<Nf4Tensor> HfWeights::nf4_tensor(const std::string& name) const {
  const auto find = [this](const std::string& part) { return this->find(part); };
  if (!Nf4Tensor::is_quantized(name, find)) return std::nullopt;
  return Nf4Tensor(fmt::format("tensors of {}", directory_.string()), name, find);
}

/// Throws InputError where a parameter cannot take over a matrix in NF4, which is one of `count` that it consists of.
void HfWeights::check_nf4(const Parameter& p, const HfTensor& tensor, const Nf4Tensor& stored,
                          std::int64_t count) const {
  const auto refuse = [&](std::string_view why, std::string_view advice) {
    throw InputError(fmt::format("tensors of {}", directory_.string()),
                     fmt::format("{} is NF4 by bitsandbytes{}", tensor.name, why), advice);
  };
  const WeightCode code = p.options.code;
  const bool takes_codes = code == WeightCode::nf4 || code == WeightCode::nf4_double;
  if (tensor.transposed) refuse(", of a class whose matrices lie transposed", "use the model's bf16 weights");
  if (p.options.trainable) refuse(", which is not trained", "give --base nf4 and train adapters by --lora-rank");
  if (code != WeightCode::none && !takes_codes) refuse(", and would be rounded again", "give --base nf4");
  if (!takes_codes) return;
  const std::int64_t first = tensor.first_row * (p.count / p.shape[0]), each = p.count / count;
  const bool is_whole = count == 1 && tensor.first_row == 0 && stored.shape()[0] == p.shape[0];
  if (code == WeightCode::nf4_double && !stored.has_coded_scales()) {
    refuse(" with scales in fp32, which would be rounded", "store it with those: the code nf4");
  }
  if (code == WeightCode::nf4_double && !is_whole) {
    refuse(fmt::format(" with scales in bytes, of which {} is a part only", p.full_name),
           "use the model's bf16 weights");
  }
  if (first % nf4_block != 0 || (count > 1 && each % 2 != 0)) {
    refuse(fmt::format(", and {} begins within one of its blocks", p.full_name), "use the model's bf16 weights");
  }
}

/// Checks the copy of a tied head that a file may hold. A head that differs from the embedding would be lost silently.
void HfWeights::check_tied_head(const ModelConfig& config, const ParameterLayout& layout) const {
  const StoredTensor* const head = find(tied_head_name);
  if (!config.tied_head || head == nullptr) return;
  const std::string name = hf_tensor_of(config, *layout.owned_parameters().front()).name;  // the embedding comes first
  const StoredTensor& embedding = *stored(config, name);
  if (&embedding == head) return;
  if (head->dtype == embedding.dtype && head->shape == embedding.shape &&
      std::ranges::equal(head->bytes, embedding.bytes)) {
    return;
  }
  throw InputError(fmt::format("tensors of {}", directory_.string()),
                   fmt::format("{} differs from {}, which config.json says it is", tied_head_name, name),
                   "set \"tie_word_embeddings\" to false in config.json");
}

/// Throws InputError where tensors are of types of quantized or complex numbers, which are no weights as they stand.
void HfWeights::check_types() const {
  for (const auto& [name, placed] : tensors_) {
    const std::string& type = placed.tensor->dtype;
    if (!is_narrow_or_complex(type)) continue;
    throw InputError(fmt::format("tensors of {}", directory_.string()),
                     fmt::format("{} in {} is of type {}, and weights are read of F32, F16 and BF16", name,
                                 placed.file->path().filename().string(), type),
                     "use the model's bf16 or fp32 weights, of which the quantized ones were made");
  }
}

void HfWeights::check(const ModelConfig& config, const ParameterLayout& layout) const {
  check_types();
  std::vector<std::string> missing, misshapen, unexpected;
  std::set<const StoredTensor*> used;
  const StoredTensor* const head = find(tied_head_name);
  const auto check_tensor = [&](const Parameter& p, const HfTensor& tensor) {
    const StoredTensor* stored = this->stored(config, tensor.name);
    if (tensor.first_row > 0) {  // part of a tensor that an earlier parameter has asked for
      if (const auto nf4 = nf4_tensor(tensor.name)) check_nf4(p, tensor, *nf4, hf_tensor_count(p));
      return;
    }
    if (stored == nullptr) {
      missing.push_back(tensor.name);
      return;
    }
    used.insert(stored);
    const auto shape = stored_shape(p, tensor);
    if (const auto nf4 = nf4_tensor(tensor.name)) {
      used.insert(nf4->parts().begin(), nf4->parts().end());
      check_nf4(p, tensor, *nf4, hf_tensor_count(p));
      if (nf4->shape() == shape) return;
      misshapen.push_back(
          fmt::format("{} ({}) instead of ({})", tensor.name, fmt::join(nf4->shape(), ", "), fmt::join(shape, ", ")));
      return;
    }
    if (stored->shape != shape) {
      misshapen.push_back(
          fmt::format("{} ({}) instead of ({})", tensor.name, fmt::join(stored->shape, ", "), fmt::join(shape, ", ")));
    } else if (stored->dtype != "F32" && stored->dtype != "F16" && stored->dtype != "BF16") {
      misshapen.push_back(fmt::format("{} of type {}", tensor.name, stored->dtype));
    }
  };
  for (const Parameter* p : layout.owned_parameters()) {
    for (std::int64_t i = 0; i < hf_tensor_count(*p); ++i) check_tensor(*p, hf_tensor_of(config, *p, i));
  }
  for (const auto& [name, placed] : tensors_) {
    const StoredTensor* const stored = placed.tensor;
    const bool tied_head = config.tied_head && stored == head;
    const bool is_vision_tensor = config.is_multimodal && name.find("language_model.") == std::string::npos;
    if (!used.contains(stored) && !is_buffer(name) && !tied_head && !is_vision_tensor) unexpected.push_back(name);
  }
  if (missing.empty() && misshapen.empty() && unexpected.empty()) return check_tied_head(config, layout);
  std::string why;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) why += fmt::format("{}{}: {}", why.empty() ? "" : "; ", what, named(names));
  };
  add("missing", missing);
  add("misshapen", misshapen);
  add("unexpected", unexpected);
  throw InputError(fmt::format("tensors of {}", directory_.string()), why,
                   "config.json and tensors must belong together");
}

void HfWeights::read(const ModelConfig& config, const Parameter& p, std::int64_t first, std::span<float> values) const {
  const std::int64_t each = p.count / hf_tensor_count(p);
  while (!values.empty()) {
    const std::int64_t index = first / each, within = first % each;
    const auto part = values.first(std::min(values.size(), static_cast<std::size_t>(each - within)));
    read_tensor(config, hf_tensor_of(config, p, index), p, within, part);
    first += static_cast<std::int64_t>(part.size());
    values = values.subspan(part.size());
  }
}

bool HfWeights::read_codes(const ModelConfig& config, const Parameter& p, CodeSink& sink) const {
  const std::int64_t count = hf_tensor_count(p), each = p.count / count;
  std::vector<Nf4Tensor> tensors;
  for (std::int64_t i = 0; i < count; ++i) {
    auto nf4 = nf4_tensor(hf_tensor_of(config, p, i).name);
    if (!nf4) return false;
    tensors.push_back(std::move(*nf4));
  }
  const std::int64_t first = hf_tensor_of(config, p).first_row * (p.count / p.shape[0]);
  for (std::int64_t i = 0; i < count; ++i) {
    const Nf4Tensor& tensor = tensors[static_cast<std::size_t>(i)];
    tensor.give_codes(first, each, i * each, sink);
    if (p.options.code != WeightCode::nf4_double) {
      tensor.give_scales(first, each, i * ((each + nf4_block - 1) / nf4_block), sink);
    }
  }
  if (p.options.code == WeightCode::nf4_double) tensors.front().give_coded_scales(sink);
  return true;
}

void HfWeights::read_tensor(const ModelConfig& config, const HfTensor& tensor, const Parameter& p, std::int64_t first,
                            std::span<float> values) const {
  if (const auto nf4 = nf4_tensor(tensor.name)) {
    return nf4->read(tensor.first_row * (p.count / p.shape[0]) + first, values);
  }
  const StoredTensor* stored = this->stored(config, tensor.name);
  if (!tensor.transposed) return widen(*stored, tensor.first_row * (p.count / p.shape[0]) + first, values);
  const auto end = first + static_cast<std::int64_t>(values.size());
  const std::int64_t outputs = p.shape[0];
  const std::int64_t inputs = p.shape[1];
  const std::int64_t first_output = first / inputs;
  std::vector<float> row(static_cast<std::size_t>((end + inputs - 1) / inputs - first_output));
  for (std::int64_t i = 0; i < inputs; ++i) {
    widen(*stored, i * outputs + first_output, row);
    std::int64_t element = first_output * inputs + i;
    for (const float x : row) {
      if (element >= first && element < end) values[static_cast<std::size_t>(element - first)] = x;
      element += inputs;
    }
  }
}

}  // namespace tandem
