#include "train/hf/hf_export.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
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

void write_row(SafetensorsWriter& writer, ExportType type, std::span<const float> values) {
  if (type == ExportType::fp32) return writer.write(values.data(), values.size_bytes());
  constexpr std::size_t longest = 1 << 16;  // elements converted at a time
  std::vector<bf16> narrow(std::min(longest, values.size()));
  while (!values.empty()) {
    const auto part = values.first(std::min(longest, values.size()));
    std::ranges::transform(part, narrow.begin(), numerics::weight_of_master);
    writer.write(narrow.data(), part.size() * sizeof(bf16));
    values = values.subspan(part.size());
  }
}

/// Row by row where the file wants the other order, so that no second copy is needed.
void write_values(SafetensorsWriter& writer, const ExportPart& part, bool transposed, ExportType type,
                  std::span<const float> values) {
  constexpr std::int64_t longest = 1 << 16;  // elements converted at a time
  const Shape& shape = part.parameter->shape;
  const std::int64_t rows = transposed ? shape[1] : (part.count + longest - 1) / longest;
  const std::int64_t columns = transposed ? shape[0] : std::min(longest, part.count);
  std::vector<float> row(static_cast<std::size_t>(columns));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t count = transposed ? columns : std::min(columns, part.count - r * columns);
    for (std::int64_t c = 0; c < count; ++c) {
      row[static_cast<std::size_t>(c)] = values[static_cast<std::size_t>(transposed ? c * rows + r : r * columns + c)];
    }
    write_row(writer, type, std::span(row).first(static_cast<std::size_t>(count)));
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

/// The hidden folder of a target, in which one process at a time writes: others are refused.
class HiddenFolder {
 public:
  explicit HiddenFolder(const fs::path& target)
      : path_(target.parent_path() / fmt::format(".{}.tmp", target.filename().string())) {
    create_directories_or_throw(path_);
    lock_ = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if ((lock_ < 0 || ::flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && is_here()) return;
    close();
    throw WriteError(fmt::format("cannot write {}", target.string()), "another export is writing it",
                     "wait for that one, or name another folder");
  }
  ~HiddenFolder() { close(); }
  HiddenFolder(const HiddenFolder&) = delete;
  HiddenFolder& operator=(const HiddenFolder&) = delete;

  const fs::path& path() const noexcept { return path_; }
  /// Removes what an export that was killed has left.
  void clear() const {
    for (const fs::directory_entry& entry : fs::directory_iterator(path_)) system_files().remove_all(entry.path());
  }

 private:
  /// Whether the locked folder still has its name, which the one before may have taken from it.
  bool is_here() const {
    struct stat named {
    }, locked{};
    if (lock_ < 0) return true;
    return ::stat(path_.c_str(), &named) == 0 && ::fstat(lock_, &locked) == 0 && named.st_ino == locked.st_ino;
  }
  void close() noexcept {
    if (lock_ >= 0) ::close(lock_);
  }

  fs::path path_;
  int lock_ = -1;
};

/// Throws WriteError where the target has been written since the export began.
void require_still_free(const fs::path& target) {
  std::error_code ignored;
  if (!fs::exists(target, ignored) || (fs::is_directory(target, ignored) && fs::is_empty(target, ignored))) return;
  throw WriteError(fmt::format("cannot write {}", target.string()), "it is there, and not empty",
                   "name another folder");
}

/// Has `write` fill a hidden folder, which then takes its place.
void write_folder(const fs::path& to, const std::function<void(const fs::path&)>& write) {
  const fs::path target = to.has_filename() ? to : to.parent_path();
  const HiddenFolder hidden(target);
  require_still_free(target);
  hidden.clear();
  Unfinished guard(hidden.path());
  write(hidden.path());
  rename_or_throw(hidden.path(), target);
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

/// Elements of a parameter that lie in a tensor of an adapter.
struct AdapterPart {
  const Parameter* parameter;
  std::int64_t first;
  PeftTensor as;
};

/// A tensor of an adapter's file, and what makes it up.
struct AdapterTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<AdapterPart> parts;
};

/// The adapter's tensors, under PEFT's names. PEFT has a tied table twice: as the embedding's, and as the head's.
std::vector<AdapterTensor> adapter_file(const AdapterExport& content) {
  std::vector<AdapterTensor> tensors;
  const auto add = [&](const Parameter& p, std::int64_t first, const PeftTensor& as) {
    if (as.first_row == 0) tensors.push_back({.name = as.name, .shape = as.shape, .parts = {}});
    tensors.back().parts.push_back({&p, first, as});
  };
  for (const Parameter* p : content.layout.owned_parameters()) {
    if (!p->options.trainable) continue;
    std::int64_t first = 0;
    for (PeftTensor& as : peft_tensors_of(content.config, *p)) {
      add(*p, first, as);
      first += as.count;
      const bool tied = content.config.tied_head && p->layer == 0 && p->name == "tokens";
      as.name = "base_model.model.lm_head.weight";
      if (tied) add(*p, 0, as);
    }
  }
  return tensors;
}

/// Values of a tensor of an adapter's file, as they lie there.
std::vector<float> values_of(const AdapterExport& content, const AdapterTensor& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t side : tensor.shape) count *= side;
  std::vector<float> all(static_cast<std::size_t>(count)), own;
  for (const AdapterPart& part : tensor.parts) {
    const auto size = static_cast<std::size_t>(part.as.count);
    if (!part.as.transposed) {
      content.values(*part.parameter, part.first,
                     std::span(all).subspan(static_cast<std::size_t>(part.as.place(0)), size));
      continue;
    }
    own.resize(size);
    content.values(*part.parameter, part.first, own);
    for (std::size_t i = 0; i < size; ++i) {
      all[static_cast<std::size_t>(part.as.place(static_cast<std::int64_t>(i)))] = own[i];
    }
  }
  return all;
}

void write_adapter(const fs::path& hidden, const AdapterExport& content) {
  const std::vector<AdapterTensor> tensors = adapter_file(content);
  std::vector<TensorSpec> specs;
  for (const AdapterTensor& tensor : tensors) {
    specs.push_back({tensor.name, content.type == ExportType::fp32 ? "F32" : "BF16", tensor.shape});
  }
  SafetensorsWriter writer(hidden / "adapter_model.safetensors", specs, {{"format", "pt"}});
  for (const AdapterTensor& tensor : tensors) write_row(writer, content.type, values_of(content, tensor));
  writer.finish();
  for (const FileBeside& file : content.beside) copy_beside(hidden, file);
  write_file_atomically(hidden / "adapter_config.json",
                        peft_config_text(content.config, content.options, content.base));
}

/// The two matrices of a linear layer's adapter, or those of all experts: (E, r, I) and (E, r, O).
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

  /// Adds elements [first, first + to.size()) of scale B A, (E, O, I).
  void add(std::int64_t first, std::span<float> to) const {
    const int last = a_.shape.rank() - 1;
    const std::int64_t rank = a_.shape[last - 1], inputs = a_.shape[last], outputs = b_.shape[last];
    std::vector<float> sum(static_cast<std::size_t>(inputs));
    while (!to.empty()) {
      const std::int64_t expert = first / (inputs * outputs), row = first / inputs % outputs, column = first % inputs;
      const auto part = to.first(std::min(to.size(), static_cast<std::size_t>(inputs - column)));
      std::ranges::fill(sum, 0.0F);
      for (std::int64_t k = expert * rank; k < (expert + 1) * rank; ++k) {
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

/// The adapter that a parameter of the model itself has; null where it has none.
std::unique_ptr<AdapterProduct> product_of(const ModelConfig& config, const ParameterLayout& layout,
                                           const Parameter& p) {
  if (p.layer < 1 || p.layer > config.layers) return nullptr;
  const std::string block = layout.layer(p.layer).name + ".";
  for (const AdapterModule& module : adapter_modules(config)) {
    const LoraModule* const lora = config.lora->find(p.layer - 1, module.name);
    if (lora == nullptr) continue;
    for (const LinearLayer& layer : module.layers) {
      if (p.name != layer.module + ".weight") continue;
      return std::make_unique<AdapterProduct>(layout.parameter(block + a_of(module)),
                                              layout.parameter(block + b_of(layer)), config.lora->scale(*lora));
    }
  }
  return nullptr;
}

/// The adapter of the parameter that was asked for last: one of experts is asked for in as many parts.
struct LastProduct {
  std::string parameter;
  std::unique_ptr<AdapterProduct> product;
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
  return [&config, &layout, values = std::move(values), last = std::make_shared<LastProduct>()](
             const Parameter& p, std::int64_t first, std::span<float> to) {
    values(layout.parameter(p.full_name), first, to);
    if (last->parameter != p.full_name) {
      *last = {p.full_name, product_of(config, layout, p)};
      if (last->product) last->product->load(values);
    }
    if (last->product) last->product->add(first, to);
  };
}

}  // namespace tandem
