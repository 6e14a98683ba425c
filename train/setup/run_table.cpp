// Text of a run's plan.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/link_codes.hpp"
#include "train/hf/model_source.hpp"
#include "train/setup/fp8_work.hpp"
#include "train/setup/run_plan.hpp"

namespace tandem {
namespace {

/// Treatment of activations, as in the table.
std::string activations_note(const ModelConfig& model, const RunShape& shape) {
  if (!shape.training) return "forward only";
  if (shape.offload_inputs) return "block recompute, inputs on the host";
  if (shape.recomputed_blocks == model.layers) return "block recompute";
  return shape.recomputed_blocks == 0 && !shape.selective ? "all kept" : activations_of(model, shape);
}

/// "12.0 GiB in /fast, read and written in every step".
std::string file_note(const RunPlan& run) {
  std::size_t bytes = run.plan.file_bytes_of_step();
  for (const RunPlan& other : run.other_ranks) bytes += other.plan.file_bytes_of_step();
  return fmt::format("{} in {}, read and written in every step", format_bytes(bytes),
                     run.options.state_folder->string());
}

/// "e4m3", and the layers that are none; empty without eight-bit products.
std::string products_note(const ModelConfig& model, const RunShape& shape) {
  if (!shape.fp8) return "";
  const std::vector<std::string> others = fp8_exceptions(model, shape);
  const std::string gradients = shape.fp8->gradients == Fp8Format::e5m2 ? "e4m3, gradients e5m2" : "e4m3";
  if (others.empty()) return gradients;
  if (shape.batch * shape.sequence % fp8_multiple != 0) {
    return fmt::format("bf16: a micro-batch of {} tokens is no multiple of {}", shape.batch * shape.sequence,
                       fp8_multiple);
  }
  const auto linear = std::ranges::count_if(
      linear_layers(model), [](const LinearLayer& layer) { return layer.experts == 0 && layer.module != "mlp.gate"; });
  if (std::ssize(others) == linear) return fmt::format("bf16: no layer's sizes are multiples of {}", fp8_multiple);
  return fmt::format("{}; bf16, as sizes are no multiples of {}: {}", gradients, fp8_multiple, fmt::join(others, ", "));
}

/// How the weights of eight-bit products cross the link; empty where they stay on the device, or there are none.
std::string link_note(const RunPlan& run) {
  bool streamed = false, in_codes = false;
  for (const LayerIndex l : layers_of(run.layout)) {
    const LayerPlacement& placed = placement_at(run.plan, l);
    streamed |= !placed.resident && code_bytes(layer_at(run.layout, l)) > 0;
    in_codes |= placed.in_codes;
  }
  if (!streamed) return "";
  if (in_codes) return "; weights cross the link in a byte each";
  return run.ranks() > 1 ? "; weights cross the link in bf16, as devices own parts of them"
                         : "; weights cross the link in bf16";
}

}  // namespace

MemoryPlan RunPlan::all_memory() const {
  MemoryPlan all = memory;
  for (const RunPlan& other : other_ranks) {
    for (const MemoryEntry& of_other : other.memory.entries) {
      if (of_other.place == Place::device) continue;
      const auto entry = std::ranges::find_if(
          all.entries, [&](const MemoryEntry& e) { return e.name == of_other.name && e.place == of_other.place; });
      if (entry != all.entries.end()) {
        entry->bytes += of_other.bytes;
      } else {
        all.entries.push_back(of_other);
      }
    }
  }
  return all;
}

std::string RunPlan::table() const {
  struct Row {
    std::string_view name;
    std::size_t device = 0;
    std::size_t host = 0;
  };
  std::array<Row, 5> rows{{{"weights"}, {"gradients"}, {"optimizer"}, {"activations"}, {"workspace"}}};
  const MemoryPlan all_rows = all_memory();
  for (const MemoryEntry& entry : all_rows.entries) {
    auto row = std::find_if(rows.begin(), rows.end(), [&](const Row& r) {
      return entry.name.starts_with(r.name) || (r.name == "gradients" && entry.name.starts_with("gradient"));
    });
    if (row == rows.end()) row = rows.end() - 1;
    if (entry.place == Place::file) continue;
    (entry.place == Place::device ? row->device : row->host) += entry.bytes;
  }
  const auto shares = plan.shares();
  const double all = std::max(1.0, static_cast<double>(shares.cpu + shares.streamed + shares.resident));
  const auto percent = [&](std::int64_t part) { return 100.0 * static_cast<double>(part) / all; };
  const auto resident = std::count_if(plan.layers.begin(), plan.layers.end(), [](const auto& l) { return l.resident; });
  int buffers = 0;
  for (const auto& c : plan.size_classes) buffers = std::max(buffers, c.weight_buffers);
  const bool training = shape.training;
  const WeightCode code = base_format();
  const std::string stored = code == WeightCode::none
                                 ? ""
                                 : fmt::format("; frozen matrices of blocks in {}, all else as it is", base_name(code));
  const std::array<std::string, 5> notes{
      fmt::format("{} of {} layers resident, {} in flight{}", resident, layout.layer_count(), buffers, stored),
      training ? "bf16, flushed during backward" : "none",
      training ? fmt::format("{:.0f}% resident, {:.0f}% streamed, {:.0f}% on the CPU ({})", percent(shares.resident),
                             percent(shares.streamed), percent(shares.cpu), plan.policy_text())
               : "none",
      activations_note(model_config, shape), "program, libraries, batches, scratch"};
  std::string text = fmt::format("{:<12}{:>11}{:>11}   what\n", "plan", "device", "host");
  const auto line = [&](std::string_view name, std::size_t device_bytes, std::size_t host_bytes,
                        std::string_view note) {
    const auto shown = [](std::size_t bytes) { return bytes == 0 ? std::string("-") : format_bytes(bytes); };
    text += fmt::format("{:<12}{:>11}{:>11}   {}\n", name, shown(device_bytes), shown(host_bytes), note);
  };
  for (std::size_t i = 0; i < rows.size(); ++i) line(rows[i].name, rows[i].device, rows[i].host, notes[i]);
  if (shape.fp8) line("products", 0, 0, products_note(model_config, shape) + link_note(*this));
  if (!order.empty()) line("order", 0, 0, order);
  if (reference) line("reference", 0, 0, reference->text);
  if (plan.file_buffers > 0) line("state file", 0, 0, file_note(*this));
  if (checkpoints) line("checkpoint", 0, 0, checkpoints->text());
  std::string bounds = fmt::format("ceiling {}", format_bytes(plan.device_memory));
  if (prediction) {
    const Simulation& predicted = prediction->choice.simulation;
    bounds +=
        fmt::format(", predicted {:.4g} s/step, bound by {}", predicted.step_seconds, name_of(predicted.bound_by()));
  }
  if (!other_ranks.empty()) line("ranks", 0, 0, fmt::format("{} devices, each as above; host memory of all", ranks()));
  line("total", memory.device_bytes(), planned_host_bytes(), bounds);
  return text;
}

}  // namespace tandem
