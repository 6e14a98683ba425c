#include "train/setup/run_request.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "core/device/device_name.hpp"
#include "train/hf/trained_layout.hpp"
#include "train/setup/fp8_work.hpp"
#include "train/setup/performance.hpp"

namespace tandem {

DeviceOptions device_options(const TrainConfig& c) {
  return {.memory = c.device_memory,
          .threads = c.threads,
          .update_threads = c.update_threads,
          .numa_node = c.numa_node,
          .link_bytes_per_second = c.link_bandwidth,
          .update_parameters_per_second = c.update_rate,
          .strict = c.strict,
          .notice = [](const std::string& why) { spdlog::info("device: host, as {}", why); },
          .warning = [](const std::string& what) { spdlog::warn("{}", what); }};
}

std::filesystem::path state_folder(const TrainConfig& config) {
  if (config.state_dir.empty() || std::filesystem::is_directory(config.state_dir)) return config.state_dir;
  throw UsageError(fmt::format("--state-dir {}", config.state_dir), "there is no such folder",
                   "make it, on a disk that is fast");
}

void require_file_rates(const TrainConfig& config, const MachineProfile& profile) {
  if (config.state_dir.empty() || profile.knows_file()) return;
  throw UsageError("--state-dir", fmt::format("profile {} does not say how fast a file is", profile.name),
                   "give it read, write and both_ways of file, in B/s");
}

OffloadOptions offload_options(const TrainConfig& c) {
  OffloadOptions o;
  if (!c.state_dir.empty()) o.state_folder = c.state_dir;
  if (c.device_memory > 0) o.device_memory = c.device_memory;
  if (c.host_memory > 0) o.host_memory = c.host_memory;
  o.policy = c.policy;
  if (c.subgroup_size > 0) o.subgroup_size = c.subgroup_size;
  if (c.resident_layers >= 0) o.resident_layers = c.resident_layers;
  if (c.prefetch_layers > 0) o.prefetch_layers = c.prefetch_layers;
  o.max_micro_batches = static_cast<int>(c.grad_accum);
  if (c.update_threads > 0) o.update_threads = c.update_threads;
  o.state = c.state;
  o.seed = c.seed;
  o.adamw.beta1 = c.beta1;
  o.adamw.beta2 = c.beta2;
  o.adamw.eps = c.eps;
  o.adamw.weight_decay = c.weight_decay;
  o.on_nonfinite = c.on_nonfinite;
  o.speculate = why_none_speculates(c).empty() ? c.speculate : Speculate::off;
  o.clips = c.clip > 0.0;
  return o;
}

DType compute_type(const TrainConfig& config, std::string_view device_kind) {
  if (device_kind == "host") {
    return config.compute.value_or(ComputeType::fp32) == ComputeType::fp32 ? DType::f32 : DType::bf16;
  }
  if (config.compute == ComputeType::fp32) {
    throw UsageError("--compute fp32", "on a GPU tandem computes in bf16, with fp32 sums",
                     "leave it out, or use --device host");
  }
  return DType::bf16;
}

Recompute recompute_of(const TrainConfig& config, const ModelConfig& model) {
  const Recompute asked = config.recompute.value_or(Recompute{.blocks = config.offload_activations ? all_blocks : 0});
  if (asked.blocks == all_blocks || asked.blocks == model.layers) return {.blocks = model.layers};
  if (asked.blocks > model.layers) {
    throw UsageError(fmt::format("--recompute block:{}{}", asked.blocks, asked.selective ? ",selective" : ""),
                     fmt::format("{} has {} blocks", model.name, model.layers),
                     fmt::format("use at most --recompute block:{}", model.layers));
  }
  if (config.offload_activations) {
    throw UsageError("--offload-activations", "--recompute keeps the activations of some blocks",
                     "leave out one of them");
  }
  return asked;
}

void set_shape(OffloadOptions& options, const ModelConfig& model, const RunShape& shape) {
  options.micro_batches_at_once = static_cast<int>(shape.micro_batches);
  options.owners_make_gradients = makes_table_last(model, shape);
  options.offloaded_input_bytes = offloaded_input_bytes(model, shape);
}

namespace {

/// How linear layers multiply, where not by their factors as they are.
std::optional<Fp8Products> fp8_products(const TrainConfig& config) {
  if (config.compute != ComputeType::fp8) return std::nullopt;
  return Fp8Products{config.fp8_gradients, config.fp8_accumulation};
}

}  // namespace

RunShape run_shape(const TrainConfig& config, const ModelConfig& model, DType compute, bool training) {
  const Recompute recompute = recompute_of(config, model);
  const bool learns_pairs = training && config.objective == Objective::dpo;
  const bool in_step = learns_pairs && config.dpo_reference == DpoReference::step;
  return {.batch = config.micro_batch,
          .sequence = config.seq_len,
          .micro_batches = training && config.accumulation_order == AccumulationOrder::layer ? config.grad_accum : 1,
          .compute = compute,
          .fp8 = fp8_products(config),
          .recomputed_blocks = recompute.blocks,
          .selective = recompute.selective,
          .training = training,
          .offload_inputs = config.offload_activations && training,
          .packed = config.sequences.packed,
          .preference_beta = learns_pairs ? static_cast<float>(config.dpo_beta) : 0.0F,
          .reference_in_step = in_step,
          .reference_adapters = in_step && config.reference_has_adapter};
}

ParameterLayout training_layout(const TrainConfig& config, const ModelConfig& model, const RunShape& shape) {
  ParameterLayout layout = trained_layout(config, model, ends_gradient(model, shape));
  if (!shape.fp8) return layout;
  return with_fp8_factors(layout, [&](const Parameter& p) { return has_fp8_product(model, shape, p); });
}

std::int64_t sequence_length(const TrainConfig& config, const ModelConfig& model) {
  constexpr std::int64_t longest_default = 1024;
  if (config.seq_len == 0) return std::min(longest_default, model.positions);
  if (config.seq_len > model.positions) {
    throw UsageError(fmt::format("--seq-len {}", config.seq_len),
                     fmt::format("{} has {} positions", model.name, model.positions),
                     fmt::format("use at most --seq-len {}", model.positions));
  }
  return config.seq_len;
}

int ranks_of(const TrainConfig& config, int processes) {
  const auto devices = static_cast<int>(split_device_names(config.device).size());
  if (processes == 1) return devices;
  if (devices == 1) return processes;
  throw UsageError(fmt::format("--device {}", config.device),
                   fmt::format("this is one of {} processes, which have a device each", processes),
                   "give --device host, or cuda, or train in one process");
}

TrainConfig config_of_rank(TrainConfig config, int processes) {
  const std::int64_t ranks = ranks_of(config, processes);
  if (config.grad_accum % ranks != 0) {
    throw UsageError(
        fmt::format("--grad-accum {}", config.grad_accum),
        fmt::format("{} {} share the micro-batches of a step", ranks, processes > 1 ? "processes" : "devices"),
        fmt::format("use a multiple of {}", ranks));
  }
  config.grad_accum /= ranks;
  return config;
}

}  // namespace tandem
