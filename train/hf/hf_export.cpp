#include "train/hf/hf_export.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/base/mapped_file.hpp"
#include "core/numerics/bf16.hpp"
#include "io/atomic_file.hpp"
#include "io/safetensors.hpp"
#include "models/hf/hf_config.hpp"
#include "models/transformer/transformer.hpp"
#include "train/hf/adapter_source.hpp"
#include "train/hf/hf_weights.hpp"
#include "train/hf/peft_config.hpp"
#include "train/hf/tokenizer_files.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// Elements of a parameter: all of them, or those of one expert.
struct ExportPart {
  const Parameter* parameter;
  std::int64_t first, count;
};

/// A tensor of the files, and what makes it up, in the order of its rows.
struct ExportTensor {
  HfTensor as;
  std::vector<ExportPart> parts;
  std::uint64_t bytes = 0;
};

struct Shard {
  std::vector<ExportTensor> tensors;
  std::uint64_t bytes = 0;
};

std::size_t element_bytes(ExportType type) { return type == ExportType::fp32 ? sizeof(float) : sizeof(bf16); }

/// Tensors to export, in model order.
std::vector<ExportTensor> tensors_of(const ExportContent& content) {
  std::vector<ExportTensor> tensors;
  for (const Parameter* p : content.layout.owned_parameters()) {
    const std::int64_t count = hf_tensor_count(*p), each = p->count / count;
    for (std::int64_t i = 0; i < count; ++i) {
      HfTensor as = hf_tensor_of(content.config, *p, i);
      if (as.first_row == 0) tensors.push_back({.as = std::move(as), .parts = {}});
      tensors.back().parts.push_back({p, i * each, each});
      tensors.back().bytes += static_cast<std::uint64_t>(each) * element_bytes(content.type);
    }
  }
  return tensors;
}

/// Shards of tensors, as many in each as fit.
std::vector<Shard> shards_of(const ExportContent& content) {
  std::vector<Shard> shards(1);
  for (ExportTensor& tensor : tensors_of(content)) {
    const bool fits = shards.back().bytes + tensor.bytes <= content.shard_bytes;
    if (!shards.back().tensors.empty() && !fits) shards.emplace_back();
    shards.back().bytes += tensor.bytes;
    shards.back().tensors.push_back(std::move(tensor));
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  return count == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

/// Row by row where the file wants the other order, so that no second copy is needed.
void write_values(SafetensorsWriter& writer, const ExportPart& part, bool transposed, ExportType type,
                  std::span<const float> values) {
  constexpr std::int64_t longest = 1 << 16;  // elements converted at a time
  const Shape& shape = part.parameter->shape;
  const std::int64_t rows = transposed ? shape[1] : (part.count + longest - 1) / longest;
  const std::int64_t columns = transposed ? shape[0] : std::min(longest, part.count);
  std::vector<float> row(static_cast<std::size_t>(columns));
  std::vector<bf16> narrow(row.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t count = transposed ? columns : std::min(columns, part.count - r * columns);
    for (std::int64_t c = 0; c < count; ++c) {
      row[static_cast<std::size_t>(c)] = values[static_cast<std::size_t>(transposed ? c * rows + r : r * columns + c)];
    }
    const auto size = static_cast<std::size_t>(count);
    if (type == ExportType::fp32) {
      writer.write(row.data(), size * sizeof(float));
    } else {
      std::transform(row.begin(), row.begin() + count, narrow.begin(), numerics::weight_of_master);
      writer.write(narrow.data(), size * sizeof(bf16));
    }
  }
}

void write_shard(const fs::path& file, const Shard& shard, const ExportContent& content, std::span<float> buffer) {
  std::vector<TensorSpec> specs;
  for (const ExportTensor& tensor : shard.tensors) {
    specs.push_back({tensor.as.name, content.type == ExportType::fp32 ? "F32" : "BF16",
                     stored_shape(*tensor.parts.front().parameter, tensor.as)});
  }
  SafetensorsWriter writer(file, specs, {{"format", "pt"}});
  for (const ExportTensor& tensor : shard.tensors) {
    for (const ExportPart& part : tensor.parts) {
      const auto values = buffer.first(static_cast<std::size_t>(part.count));
      content.values(*part.parameter, part.first, values);
      write_values(writer, part, tensor.as.transposed, content.type, values);
    }
  }
  writer.finish();
}

std::string index_text(const std::vector<Shard>& shards) {
  std::uint64_t total = 0;
  Json map = Json::object();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    total += shards[i].bytes;
    for (const ExportTensor& tensor : shards[i].tensors) map[tensor.as.name] = shard_name(i, shards.size());
  }
  return json_document(Json{{"metadata", {{"total_size", total}}}, {"weight_map", map}});
}

std::string config_text(const ExportContent& content) {
  Json json =
      parse_json<Json>(hf_config_text(content.config, content.type == ExportType::fp32 ? "float32" : "bfloat16"));
  if (content.bytes) json["tandem_token_kind"] = "bytes";
  return json_document(json);
}

void copy_beside(const fs::path& folder, const FileBeside& file) {
  const MappedFile source(file.from);
  const std::string_view text(reinterpret_cast<const char*>(source.bytes().data()), source.bytes().size());
  const fs::path place = folder / place_in_folder(file.name);
  create_directories_or_throw(place.parent_path());
  write_file_atomically(place, text);
}

/// Copies, and gives those a generation config that came without.
void write_beside(const fs::path& folder, const ExportContent& content) {
  bool generation = false;
  for (const FileBeside& file : content.beside) {
    copy_beside(folder, file);
    generation = generation || file.name == "generation_config.json";
  }
  if (!generation) {
    write_file_atomically(folder / "generation_config.json", json_document(Json{{"_from_model_config", true}}));
  }
}

}  // namespace

namespace {

/// Has `write` fill a hidden folder, which then takes its place.
void write_folder(const fs::path& to, const std::function<void(const fs::path&)>& write) {
  const fs::path target = to.has_filename() ? to : to.parent_path();
  const fs::path hidden = target.parent_path() / fmt::format(".{}.tmp", target.filename().string());
  system_files().remove_all(hidden);
  create_directories_or_throw(hidden);
  Unfinished guard(hidden);
  write(hidden);
  rename_or_throw(hidden, target);
  guard.keep();
  sync_directory(target.has_parent_path() ? target.parent_path() : fs::path("."));
}

void write_model(const fs::path& hidden, const ExportContent& content) {
  const auto shards = shards_of(content);
  std::int64_t largest = 0;
  for (const Parameter* p : content.layout.owned_parameters()) {
    largest = std::max(largest, p->count / hf_tensor_count(*p));
  }
  std::vector<float> buffer(static_cast<std::size_t>(largest));
  for (std::size_t i = 0; i < shards.size(); ++i) {
    write_shard(hidden / shard_name(i, shards.size()), shards[i], content, buffer);
  }
  if (shards.size() > 1) {
    write_file_atomically(hidden / "model.safetensors.index.json", index_text(shards));
  }
  write_beside(hidden, content);
  write_file_atomically(hidden / "config.json", config_text(content));
}

/// The adapter's tensors, under PEFT's names. PEFT has a tied table twice: as the embedding's, and as the head's.
Shard adapter_shard(const AdapterExport& content) {
  Shard shard;
  const auto add = [&](const Parameter& p, HfTensor as) {
    if (as.first_row == 0) shard.tensors.push_back({.as = std::move(as), .parts = {}});
    shard.tensors.back().parts.push_back({&p, 0, p.count});
  };
  for (const Parameter* p : content.layout.owned_parameters()) {
    if (!p->options.trainable) continue;
    HfTensor as = hf_tensor_of(content.config, *p);
    as.name = peft_tensor_of(content.config, *p).name;
    add(*p, as);
    const bool tied = content.config.tied_head && p->layer == 0 && p->name == "tokens";
    as.name = "base_model.model.lm_head.weight";
    if (tied) add(*p, as);
  }
  return shard;
}

void write_adapter(const fs::path& hidden, const AdapterExport& content) {
  const ExportContent tensors{
      .config = content.config, .layout = content.layout, .type = content.type, .beside = {}, .values = content.values};
  const Shard shard = adapter_shard(content);
  std::int64_t largest = 0;
  for (const ExportTensor& tensor : shard.tensors) {
    for (const ExportPart& part : tensor.parts) largest = std::max(largest, part.count);
  }
  std::vector<float> buffer(static_cast<std::size_t>(largest));
  write_shard(hidden / "adapter_model.safetensors", shard, tensors, buffer);
  for (const FileBeside& file : content.beside) copy_beside(hidden, file);
  write_file_atomically(hidden / "adapter_config.json",
                        peft_config_text(content.config, content.options, content.base));
}

/// The two matrices of a linear layer's adapter.
class AdapterProduct {
 public:
  AdapterProduct(const Parameter& a, const Parameter& b, double scale)
      : a_(a), b_(b), scale_(static_cast<float>(scale)) {}

  template <class Values>
  void load(const Values& values) {
    matrix_a_.resize(static_cast<std::size_t>(a_.count));
    matrix_b_.resize(static_cast<std::size_t>(b_.count));
    values(a_, 0, matrix_a_);
    values(b_, 0, matrix_b_);
  }

  /// Adds elements [first, first + to.size()) of scale B A, (O, I).
  void add(std::int64_t first, std::span<float> to) const {
    const std::int64_t rank = a_.shape[0], inputs = a_.shape[1], outputs = b_.shape[1];
    std::vector<float> sum(static_cast<std::size_t>(inputs));
    while (!to.empty()) {
      const std::int64_t row = first / inputs, column = first % inputs;
      const auto part = to.first(std::min(to.size(), static_cast<std::size_t>(inputs - column)));
      std::ranges::fill(sum, 0.0F);
      for (std::int64_t k = 0; k < rank; ++k) {
        const float b = matrix_b_[static_cast<std::size_t>(k * outputs + row)];
        const float* const a = matrix_a_.data() + k * inputs + column;
        for (std::size_t i = 0; i < part.size(); ++i) sum[i] += b * a[i];
      }
      for (std::size_t i = 0; i < part.size(); ++i) part[i] += scale_ * sum[i];
      first += std::ssize(part);
      to = to.subspan(part.size());
    }
  }

 private:
  const Parameter &a_, &b_;
  float scale_;
  std::vector<float> matrix_a_, matrix_b_;
};

}  // namespace

void export_hf(const fs::path& to, const ExportContent& content) {
  write_folder(to, [&](const fs::path& hidden) { write_model(hidden, content); });
}

void export_adapter(const fs::path& to, const AdapterExport& content) {
  write_folder(to, [&](const fs::path& hidden) { write_adapter(hidden, content); });
}

std::function<void(const Parameter&, std::int64_t, std::span<float>)> merged_values(
    const ModelConfig& config, const ParameterLayout& layout,
    std::function<void(const Parameter&, std::int64_t, std::span<float>)> values) {
  const double scale = config.lora.value().scale();
  return [&config, &layout, values = std::move(values), scale](const Parameter& p, std::int64_t first,
                                                               std::span<float> to) {
    const Parameter& own = layout.parameter(p.full_name);
    values(own, first, to);
    const std::size_t end = p.name.ends_with(".weight") ? p.name.size() - std::string_view(".weight").size() : 0;
    const std::string module = p.name.substr(0, end);
    const bool in_block = p.layer > 0 && p.layer <= config.layers;
    if (!in_block || !config.lora->adapts(p.layer - 1, module)) return;
    const std::string whole = layout.layer(p.layer).name + "." + module;
    AdapterProduct product(layout.parameter(whole + std::string(lora_a)), layout.parameter(whole + std::string(lora_b)),
                           scale);
    product.load(values);
    product.add(first, to);
  };
}

}  // namespace tandem
