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
#include "train/hf/hf_weights.hpp"
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

/// Copies, and gives those a generation config that came without.
void write_beside(const fs::path& folder, const ExportContent& content) {
  bool generation = false;
  for (const FileBeside& file : content.beside) {
    const MappedFile source(file.from);
    const std::string_view text(reinterpret_cast<const char*>(source.bytes().data()), source.bytes().size());
    const fs::path place = folder / place_in_folder(file.name);
    create_directories_or_throw(place.parent_path());
    write_file_atomically(place, text);
    generation = generation || file.name == "generation_config.json";
  }
  if (!generation) {
    write_file_atomically(folder / "generation_config.json", json_document(Json{{"_from_model_config", true}}));
  }
}

}  // namespace

void export_hf(const fs::path& to, const ExportContent& content) {
  const fs::path target = to.has_filename() ? to : to.parent_path();
  const fs::path hidden = target.parent_path() / fmt::format(".{}.tmp", target.filename().string());
  system_files().remove_all(hidden);
  create_directories_or_throw(hidden);
  Unfinished guard(hidden);
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
  rename_or_throw(hidden, target);
  guard.keep();
  sync_directory(target.has_parent_path() ? target.parent_path() : fs::path("."));
}

}  // namespace tandem
