// The one table of all configuration fields.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/base/error.hpp"
#include "core/device/device_name.hpp"
#include "train/config/config.hpp"
#include "train/config/field_kinds.hpp"
#include "train/config/name_pattern.hpp"
#include "train/config/units.hpp"

namespace tandem {
namespace {

using namespace fields;

std::string parse_regex(std::string_view value) {
  static_cast<void>(name_pattern(value));
  return std::string(value);
}

std::string parse_device(std::string_view value) {
  static_cast<void>(split_device_names(value));
  return std::string(value);
}

std::size_t parse_ceiling(std::string_view value) {
  const std::size_t bytes = parse_size(value);
  if (bytes == 0) out_of_range(value, "a ceiling above zero");
  return bytes;
}

std::int64_t parse_subgroup(std::string_view value) {
  if (value == "auto") return 0;
  const std::int64_t count = parse_count(value);
  if (count < 1) out_of_range(value, "at least 1 parameter, or auto");
  return count;
}

double parse_rate(std::string_view value) {
  const std::int64_t count = parse_count(value);
  if (count < 1) out_of_range(value, "at least 1 parameter a second");
  return static_cast<double>(count);
}

std::optional<Recompute> parse_recompute(std::string_view value) {
  constexpr std::string_view counted = "block:", selectively = ",selective";
  if (value == "auto") return std::nullopt;
  if (value == "none") return Recompute{};
  if (value == "selective") return Recompute{.selective = true};
  if (value == "block") return Recompute{.blocks = all_blocks};
  std::string_view count = value.starts_with(counted) ? value.substr(counted.size()) : std::string_view{};
  const bool selective = count.ends_with(selectively);
  if (selective) count.remove_suffix(selectively.size());
  if (count.empty() || count.find_first_not_of("0123456789") != std::string_view::npos) {
    throw UsageError(fmt::format("'{}'", value), "not supported",
                     "use none, selective, block, block:N, block:N,selective, auto");
  }
  const std::int64_t blocks = parse_integer(count);
  if (blocks == all_blocks) out_of_range(value, "as many blocks as the model has");
  return Recompute{blocks, selective};
}

std::string print_recompute(const std::optional<Recompute>& recompute) {
  if (!recompute) return "auto";
  if (recompute->blocks == all_blocks) return "block";
  if (recompute->blocks == 0) return recompute->selective ? "selective" : "none";
  return fmt::format("block:{}{}", recompute->blocks, recompute->selective ? ",selective" : "");
}

/// A number of layers, or "auto", which is `automatic`.
ConfigField layers(const Words& w, int TrainConfig::*member, int least, int automatic) {
  return other(
      w, member,
      [=](std::string_view value) {
        if (value == "auto") return automatic;
        const std::int64_t number = parse_integer(value);
        if (number < least || number > 100000) out_of_range(value, fmt::format("auto, or {} to 100000", least));
        return static_cast<int>(number);
      },
      [=](int value) { return value == automatic ? std::string("auto") : std::to_string(value); }, always);
}

// Weights of a mix: within these bounds every source has a share, and their sum is a number.
constexpr double least_mix_weight = 1e-9, most_mix_weight = 1e9;

/// "a.bin" of "./a.bin".
std::filesystem::path normal_path(std::string_view path) { return std::filesystem::path(path).lexically_normal(); }

/// Adds the entries of "a.bin=0.7,b.bin=0.3". A comma that no weight stands before belongs to a path.
void add_mix(std::vector<MixEntry>& mix, std::string_view value) {
  const auto refuse = [](std::string_view entry, std::string_view why) {
    throw UsageError(fmt::format("'{}'", entry), why, "give each path its weight, such as a.bin=0.7,b.bin=0.3");
  };
  std::size_t begin = 0;
  for (std::size_t end = 0; begin <= value.size(); ++end) {
    end = std::min(value.find(',', end), value.size());
    const std::string_view entry = value.substr(begin, end - begin);
    const auto equal = entry.rfind('=');
    if (equal == std::string_view::npos && end < value.size()) continue;
    if (equal == std::string_view::npos || equal == 0) refuse(entry, "it has no path with a weight");
    const double weight = parse_number(entry.substr(equal + 1));
    if (!(weight >= least_mix_weight && weight <= most_mix_weight)) refuse(entry, "its weight is not from 1e-9 to 1e9");
    const std::string path(entry.substr(0, equal));
    const auto same_file = [place = normal_path(path)](const MixEntry& other) {
      return normal_path(other.path) == place;
    };
    if (std::ranges::any_of(mix, same_file)) refuse(entry, "its path is given twice");
    mix.push_back({path, weight});
    begin = end + 1;
  }
}

std::vector<std::string> print_mix(const std::vector<MixEntry>& mix) {
  std::vector<std::string> entries;
  for (const MixEntry& entry : mix) entries.push_back(fmt::format("{}={}", entry.path, print_number(entry.weight)));
  return entries;
}

void add_input_fields(std::vector<ConfigField>& all) {
  using C = TrainConfig;
  all.push_back(text({"model", "NAME|PATH", "needed", "tiny-gpt2",
                      "built-in shape, Hugging Face directory, config.json, checkpoint or run directory, or org/name "
                      "in the hub's cache"},
                     &C::model));
  all.push_back(
      flag({"from-scratch", "", "off", "", "random weights even where the directory has some"}, &C::from_scratch));
  all.push_back(list({"data", "PATH...", "needed", "corpus/",
                      "text files, folders of text (bytes as tokens), or .bin or .npy token files"},
                     &C::data));
  all.push_back(field(
      {"mix", "PATH=WEIGHT,...", "none", "a.bin=0.7,b.bin=0.3",
       "in place of --data: files or folders, and how many of the windows come of each"},
      Kind::list, [](C& c, std::string_view value) { add_mix(c.mix, value); },
      [](const C& c) { return print_mix(c.mix); }));
  all.push_back(list({"eval-data", "PATH...", "none", "held-out.txt", "the same, for validation"}, &C::eval_data));
  all.push_back(other(
      {"token-dtype", "TYPE", "what the file says, else uint16 where no other can be meant", "uint32",
       "width of .bin tokens: uint16 or uint32"},
      &C::token_dtype, [](std::string_view v) { return std::optional(parse_token_width(v)); },
      [](std::optional<TokenWidth> v) { return name_of(*v); },
      [](std::optional<TokenWidth> v) { return v.has_value(); }));
  all.push_back(flag({"document-attention", "", "off", "",
                      "attention and positions stay within documents, which end tokens of a .bin separate"},
                     &C::document_attention));
  all.push_back(choice<Objective>(
      {"objective", "NAME", "lm", "dpo",
       "lm learns every target; dpo which answer of each pair is preferred, from data with preferences"},
      &C::objective, {{"lm", Objective::lm}, {"dpo", Objective::dpo}}));
  all.push_back(number({"dpo-beta", "BETA", "0.1", "0.3", "of --objective dpo: factor of the rewards"}, &C::dpo_beta,
                       0.0, unlimited, true));
  all.push_back(choice<DpoReference>(
      {"dpo-reference", "WHEN", "auto: what is predicted to take less time", "step",
       "of --objective dpo: its reference is computed before the first step, or in each step of adapters"},
      &C::dpo_reference,
      {{"auto", DpoReference::automatic}, {"before", DpoReference::before}, {"step", DpoReference::step}}));
  all.push_back(text(
      {"out", "DIR", "nothing is saved", "runs/first", "run directory: configuration, metrics, summary, checkpoints"},
      &C::out));
}

void add_machine_fields(std::vector<ConfigField>& all) {
  using C = TrainConfig;
  all.push_back(other(
      {"device", "DEVICE[,DEVICE...]", "auto", "cuda:0,cuda:1",
       "auto, cuda, cuda:N or host (cpu is the same); train and plan: several, which share the micro-batches of a "
       "step"},
      &C::device, parse_device, [](const std::string& name) { return name; }, always));
  all.push_back(
      other({"device-memory", "BYTES", "what is free, less a margin", "8GiB", "hard ceiling of device memory"},
            &C::device_memory, parse_ceiling, print_size, positive));
  all.push_back(other({"host-memory", "BYTES", "what is free", "16GiB",
                       "hard ceiling of host memory; more than is free is insisted on, with a warning"},
                      &C::host_memory, parse_ceiling, print_size, positive));
  all.push_back(
      other({"link-bandwidth", "BYTES/S", "none", "1GB/s", "host device: emulate a link of this speed, each way"},
            &C::link_bandwidth, parse_bandwidth, print_bandwidth, positive));
  all.push_back(other(
      {"update-rate", "PARAMETERS/S", "none", "50M", "host device: emulate a CPU that updates so many a second"},
      &C::update_rate, parse_rate, [](double v) { return std::to_string(std::llround(v)); }, positive));
  all.push_back(other(
      {"policy", "POLICY", "auto", "static:0.5",
       "who updates what: auto, device, host, static:R, interleave:K[,resident=S], stream"},
      &C::policy, [](std::string_view v) { return parse_policy(v); }, [](const Policy& p) { return p.text(); },
      always));
  all.push_back(other(
      {"subgroup-size", "PARAMETERS", "auto", "1Mi", "parameters in a subgroup, rounded up to a multiple of 1,024"},
      &C::subgroup_size, parse_subgroup,
      [](std::int64_t v) { return v == 0 ? std::string("auto") : std::to_string(v); }, always));
  all.push_back(layers({"resident-layers", "LAYERS", "auto", "2", "layers whose weights stay on the device"},
                       &C::resident_layers, 0, -1));
  all.push_back(
      layers({"prefetch-layers", "LAYERS", "auto", "2", "layers of weights in flight"}, &C::prefetch_layers, 1, 0));
  all.push_back(choice<StateFormat>(
      {"state", "FORMAT", "fp32", "fp32",
       "optimizer state in 12, 10, 6 or 4 bytes: fp32, split (the same bits), bf16-moments, 8bit-moments; or lion, "
       "another optimizer, in 6"},
      &C::state,
      {{"fp32", StateFormat::fp32},
       {"split", StateFormat::split},
       {"bf16-moments", StateFormat::bf16_moments},
       {"8bit-moments", StateFormat::byte_moments},
       {"lion", StateFormat::lion}}));
  all.push_back(choice<Speculate>({"speculate", "WHEN", "auto", "off",
                                   "updates on the CPU before the gradient norm is known, taken back to the bit where "
                                   "it clips: off, auto (where there "
                                   "is host memory for it, while most steps are not clipped), on"},
                                  &C::speculate,
                                  {{"off", Speculate::off}, {"auto", Speculate::automatic}, {"on", Speculate::on}}));
  all.push_back(text({"state-dir", "DIR", "none: all of it is in memory", "/mnt/nvme",
                      "folder on a fast disk, for the optimizer state that host memory has no room for; read and "
                      "written in every step"},
                     &C::state_dir));
  all.push_back(choice<ComputeType>(
      {"compute", "TYPE", "fp32 on the host device, bf16 on GPUs", "bf16",
       "compute type: fp32 on the host device, bf16, or fp8: bf16 with linear layers that multiply eight-bit factors"},
      &C::compute, {{"fp32", ComputeType::fp32}, {"bf16", ComputeType::bf16}, {"fp8", ComputeType::fp8}}));
  all.push_back(
      choice<Fp8Format>({"fp8-gradients", "FORMAT", "e4m3", "e5m2",
                         "with --compute fp8, of the gradients that are factors: e4m3, or e5m2, of wider range"},
                        &C::fp8_gradients, {{"e4m3", Fp8Format::e4m3}, {"e5m2", Fp8Format::e5m2}}));
  all.push_back(choice<Fp8Accumulation>(
      {"fp8-accumulation", "HOW", "full", "fast",
       "with --compute fp8, sums of products: full, in fp32, or fast, as Ada and Hopper do faster with fewer bits"},
      &C::fp8_accumulation, {{"full", Fp8Accumulation::full}, {"fast", Fp8Accumulation::fast}}));
  all.push_back(other({"recompute", "HOW", "auto: as little as fits", "block:8,selective",
                       "computed again in backward: none, selective (norms and activations alone), block (all blocks), "
                       "block:N (the first N), block:N,selective (both), auto"},
                      &C::recompute, parse_recompute, print_recompute, always));
  all.push_back(flag({"offload-activations", "", "off; auto where nothing else fits", "",
                      "where all blocks are computed again: their inputs wait on the host for backward"},
                     &C::offload_activations));
  all.push_back(
      integer<int>({"threads", "THREADS", "all cores", "2", "of the host device's kernels"}, &C::threads, 1, 4096, 0));
  all.push_back(integer<int>({"update-threads", "THREADS", "all cores", "2", "of the CPU update"}, &C::update_threads,
                             1, 4096, 0));
  all.push_back(integer<int>({"numa-node", "NODE", "the GPU's, else wherever", "0",
                              "memory node of pinned memory and of the CPU update's threads"},
                             &C::numa_node, 0, 1023, -1));
}

/// One text that is shown where it is set.
void add_work_fields(std::vector<ConfigField>& all) {
  using C = TrainConfig;
  constexpr std::int64_t many = 1'000'000'000'000;
  all.push_back(integer<std::int64_t>({"micro-batch", "SEQUENCES", "1", "4", "sequences computed at once"},
                                      &C::micro_batch, 1, 1 << 24));
  all.push_back(integer<std::int64_t>(
      {"grad-accum", "MICRO-BATCHES", "1", "8", "micro-batches of a step, of all devices together"}, &C::grad_accum, 1,
      1 << 20));
  all.push_back(choice<AccumulationOrder>(
      {"accumulation-order", "ORDER", "auto: layer where that is faster and fits", "layer",
       "micro-batches one after another (micro-batch), or all through each layer while its weights are there (layer)"},
      &C::accumulation_order,
      {{"auto", AccumulationOrder::automatic},
       {"micro-batch", AccumulationOrder::micro_batch},
       {"layer", AccumulationOrder::layer}}));
  all.push_back(
      integer<std::int64_t>({"seq-len", "TOKENS", "the model's positions, at most 1024", "256", "tokens of a sequence"},
                            &C::seq_len, 1, 1 << 24, 0));
  all.push_back(integer<std::int64_t>({"steps", "STEPS", "needed, or --epochs", "1000", "optimizer steps"}, &C::steps,
                                      1, many, 0));
  all.push_back(other(
      {"epochs", "EPOCHS", "needed, or --steps", "1", "passes over the data"}, &C::epochs,
      [](std::string_view v) {
        const double x = parse_number(v);
        if (x <= 0.0 || x > 1e9) out_of_range(v, "a number above 0");
        return x;
      },
      print_number, positive));
  all.push_back(number(
      {"lr", "RATE",
       "2e-5 with loaded weights, 3e-4 from scratch, 2e-4 of adapters; with --objective dpo 1e-6, 1e-5 of adapters",
       "1e-3", "peak learning rate"},
      &C::lr, 0.0, unlimited));
  all.push_back(number({"min-lr", "RATE", "a tenth of --lr", "1e-5", "learning rate at the end of the decay"},
                       &C::min_lr, 0.0, unlimited));
  all.push_back(integer<std::int64_t>({"warmup-steps", "STEPS", "0", "100", "steps in which the rate rises"},
                                      &C::warmup_steps, 0, many));
  all.push_back(integer<std::int64_t>({"decay-steps", "STEPS", "all steps; wsd: a tenth", "1000",
                                       "step at which linear and cosine reach --min-lr; wsd: length of the decay"},
                                      &C::decay_steps, 1, many, 0));
  all.push_back(other(
      {"lr-schedule", "NAME", "cosine", "wsd", "constant, linear, cosine or wsd"}, &C::lr_schedule, parse_schedule,
      [](Schedule::Kind k) { return name_of(k); }, always));
  all.push_back(number({"weight-decay", "RATE", "0.1", "0.01", "on matrices, not on biases and norms"},
                       &C::weight_decay, 0.0, unlimited));
  all.push_back(
      number({"beta1", "SHARE", "0.9", "0.9", "decay of the first moment; of lion its share in a step's direction"},
             &C::beta1, 0.0, 1.0));
  all.push_back(number({"beta2", "SHARE", "0.95", "0.999", "decay of the second moment; of lion that of its only one"},
                       &C::beta2, 0.0, 1.0));
  all.push_back(
      number({"eps", "VALUE", "1e-8", "1e-6", "added to the root of the second moment; without effect on lion"},
             &C::eps, 0.0, unlimited, true));
  all.push_back(number({"clip", "NORM", "1.0", "0.5", "clip the global gradient norm; 0: off (also --grad-clip)"},
                       &C::clip, 0.0, unlimited));
  all.push_back(integer<std::uint64_t>({"seed", "SEED", "42", "7", "of initial weights and order of data"}, &C::seed, 0,
                                       std::numeric_limits<std::int64_t>::max()));
  all.push_back(other(
      {"freeze", "REGEX", "none", "wte|wpe", "parameters (Hugging Face names) that are not trained"}, &C::freeze,
      parse_regex, [](const std::string& v) { return v; }, [](const std::string& v) { return !v.empty(); }));
  add_adapter_fields(all);
  all.push_back(
      choice<OnNonfinite>({"on-nonfinite", "ACTION", "skip", "stop", "a step without a finite gradient: skip or stop"},
                          &C::on_nonfinite, {{"skip", OnNonfinite::skip}, {"stop", OnNonfinite::stop}}));
}

void add_report_fields(std::vector<ConfigField>& all) {
  using C = TrainConfig;
  constexpr std::int64_t many = 1'000'000'000'000;
  all.push_back(
      integer<std::int64_t>({"eval-every", "STEPS", "off (always at the end)", "100", "validate every so many steps"},
                            &C::eval_every, 0, many));
  all.push_back(
      integer<std::int64_t>({"checkpoint-every", "STEPS", "off (always at the end)", "500", "save every so many steps"},
                            &C::checkpoint_every, 0, many));
  all.push_back(
      integer<int>({"keep", "CHECKPOINTS", "2", "5", "newest checkpoints to keep; 0: all"}, &C::keep, 0, 1000000));
  all.push_back(
      flag({"keep-best", "", "off", "", "save where --eval-data's loss is the lowest so far, and keep that one"},
           &C::keep_best));
  all.push_back(integer<std::int64_t>(
      {"patience", "EVALUATIONS", "off", "3", "end the run after so many evaluations in a row without a lower loss"},
      &C::patience, 0, many));
  all.push_back(choice<OnSaveFailure>(
      {"on-save-failure", "ACTION", "stop", "continue",
       "a checkpoint that cannot be written: stop, or continue with the old one kept (the last one always stops)"},
      &C::on_save_failure, {{"stop", OnSaveFailure::stop}, {"continue", OnSaveFailure::go_on}}));
  all.push_back(
      integer<std::int64_t>({"log-every", "STEPS", "1", "10",
                             "leave a line every so many steps (on a terminal with 1: the live line alone); 0: none"},
                            &C::log_every, 0, many));
  all.push_back(text({"trace", "FILE", "none", "trace.json", "write a Perfetto trace"}, &C::trace));
  all.push_back(integer<int>({"metrics-port", "PORT", "none", "9400",
                              "serve Prometheus metrics over HTTP at /metrics; 0: a free port, which is printed"},
                             &C::metrics_port, 0, 65535, -1));
  all.push_back(text({"metrics-address", "ADDRESS", "127.0.0.1", "0.0.0.0",
                      "address that --metrics-port listens on: others than this machine only if you say so"},
                     &C::metrics_address));
  all.push_back(flag({"strict", "", "off", "", "refuse where a fallback would be taken"}, &C::strict));
}

}  // namespace

const std::vector<ConfigField>& config_fields() {
  static const std::vector<ConfigField> fields = [] {
    std::vector<ConfigField> all;
    add_input_fields(all);
    add_machine_fields(all);
    add_work_fields(all);
    add_report_fields(all);
    return all;
  }();
  return fields;
}

const ConfigField* find_config_field(std::string_view name) {
  for (const auto& f : config_fields()) {
    if (f.name == name) return &f;
  }
  return nullptr;
}

}  // namespace tandem
