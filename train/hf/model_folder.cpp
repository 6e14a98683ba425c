#include "train/hf/model_folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <vector>

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Formats in the order in which they say what a folder holds.
enum class OtherFormat : std::uint8_t {
  gguf,
  zero,
  distributed,
  pytorch,
  pickled,
  tensorflow,
  flax,
  onnx,
  unfinished,
  trainer
};

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> beginnings) {
  return std::ranges::any_of(beginnings, [&](std::string_view b) { return name.starts_with(b); });
}

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> endings) {
  return std::ranges::any_of(endings, [&](std::string_view e) { return name.ends_with(e); });
}

std::optional<OtherFormat> format_of(std::string_view name) {
  if (ends_with_any(name, {".gguf"})) return OtherFormat::gguf;
  if (starts_with_any(name, {"zero_pp_rank_", "bf16_zero_pp_rank_", "global_step", "mp_rank_"}))
    return OtherFormat::zero;
  if (name == ".metadata" || ends_with_any(name, {".distcp"})) return OtherFormat::distributed;
  if (starts_with_any(name, {"optimizer.", "scheduler.", "scaler.", "rng_state", "training_args."}))
    return OtherFormat::trainer;
  if (name.find(".ckpt.") != name.npos || ends_with_any(name, {".h5"})) return OtherFormat::tensorflow;
  if (name.starts_with("pytorch_model") && ends_with_any(name, {".bin", ".bin.index.json"}))
    return OtherFormat::pytorch;
  if (ends_with_any(name, {".pt", ".pth", ".ckpt"})) return OtherFormat::pickled;
  if (ends_with_any(name, {".bin"}) && name.find("model") != name.npos) return OtherFormat::pickled;
  if (ends_with_any(name, {".msgpack", ".msgpack.index.json"})) return OtherFormat::flax;
  if (ends_with_any(name, {".onnx"})) return OtherFormat::onnx;
  if (ends_with_any(name, {".incomplete", ".part", ".crdownload", ".aria2"})) return OtherFormat::unfinished;
  return std::nullopt;
}

std::string_view name_of(OtherFormat format) {
  switch (format) {
    case OtherFormat::gguf:
      return "GGUF";
    case OtherFormat::zero:
      return "DeepSpeed ZeRO";
    case OtherFormat::distributed:
      return "PyTorch's distributed checkpoint, as FSDP writes it";
    case OtherFormat::pytorch:
    case OtherFormat::pickled:
      return "PyTorch";
    case OtherFormat::tensorflow:
      return "TensorFlow";
    case OtherFormat::flax:
      return "Flax";
    case OtherFormat::onnx:
      return "ONNX";
    case OtherFormat::unfinished:
      return "a download that has not ended";
    case OtherFormat::trainer:
      return "the state of another trainer, whose weights are missing";
  }
  return "unknown";
}

std::string converted_by(std::string_view folder, std::string_view more) {
  return fmt::format(
      "make safetensors of it: python -c \"from transformers import AutoModelForCausalLM as M; "
      "M.from_pretrained('{0}'{1}).save_pretrained('{0}-safetensors')\"",
      folder, more);
}

std::string advice_of(OtherFormat format, const std::string& folder, const std::string& file) {
  switch (format) {
    case OtherFormat::gguf:
      return converted_by(folder, fmt::format(", gguf_file='{}'", file));
    case OtherFormat::zero:
      return fmt::format("make safetensors of it: python zero_to_fp32.py {0} {0}-safetensors --safe_serialization",
                         folder);
    case OtherFormat::distributed:
      return fmt::format("make safetensors of it: accelerate merge-weights {0} {0}-safetensors", folder);
    case OtherFormat::pytorch:
      return converted_by(folder, "");
    case OtherFormat::pickled:
      return "make safetensors of it: load it with the program that wrote it, and save the model with save_pretrained";
    case OtherFormat::tensorflow:
      return "make safetensors of it with transformers 4: from_pretrained(..., from_tf=True), then save_pretrained";
    case OtherFormat::flax:
      return "make safetensors of it with transformers 4: from_pretrained(..., from_flax=True), then save_pretrained";
    case OtherFormat::onnx:
      return "name the model that it was made of, as safetensors";
    case OtherFormat::unfinished:
      return "let the download end, or begin it anew, until there are *.safetensors";
    case OtherFormat::trainer:
      return "copy the model's *.safetensors into the folder";
  }
  return {};
}

ForeignWeights made(OtherFormat format, const fs::path& folder, const std::string& file) {
  const std::string name = folder.empty() ? "." : folder.string();
  return {file, name_of(format), advice_of(format, name, file)};
}

/// Names in a folder, hidden ones among them, sorted; of folders in it those of its checkpoint shards, too.
std::vector<std::string> names_in(const fs::path& folder, bool nested) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    names.push_back(name);
    std::error_code ignored;
    if (!nested || !fs::is_directory(it->path(), ignored)) continue;
    for (const std::string& inner : names_in(it->path(), false)) {
      if (format_of(inner) == OtherFormat::distributed) names.push_back(name + "/" + inner);
    }
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace

std::optional<ForeignWeights> foreign_weights_of_name(const fs::path& file) {
  const auto format = format_of(file.filename().string());
  if (!format) return std::nullopt;
  return made(*format, file.parent_path(), file.filename().string());
}

std::optional<ForeignWeights> foreign_weights_in(const fs::path& folder) {
  std::optional<std::pair<OtherFormat, std::string>> best;
  for (const std::string& name : names_in(folder, true)) {
    const auto format = format_of(fs::path(name).filename().string());
    if (format && (!best || *format < best->first)) best.emplace(*format, name);
  }
  if (!best) return std::nullopt;
  return made(best->first, folder, best->second);
}

}  // namespace tandem
