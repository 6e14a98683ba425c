#pragma once
// The configuration of a run. Every field is declared once, in the table of config_fields.cpp, which
// serves flags, TOML and help.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/numerics/weight_code.hpp"
#include "core/ops/ops.hpp"
#include "core/tensor/dtype.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "data/token_source.hpp"
#include "scheduler/plan/options.hpp"
#include "scheduler/plan/policy.hpp"
#include "train/config/schedule.hpp"

namespace tandem {

/// Type of activations; `fp8`: bf16, with eight-bit factors of the products of blocks' linear layers.
enum class ComputeType : std::uint8_t { fp32, bf16, fp8 };

/// Number of blocks for `--recompute` that means all, however many the model has.
constexpr std::int64_t all_blocks = std::numeric_limits<std::int64_t>::max();

/// Part of forward that is computed again in backward.
struct Recompute {
  std::int64_t blocks = 0;  ///< number of first blocks of which all is computed again
  bool selective = false;   ///< the other blocks compute norms and activations again
  bool operator==(const Recompute&) const = default;
};

/// Whether micro-batches go through forward and backward one after another, or all through each layer in one visit.
enum class AccumulationOrder : std::uint8_t { automatic, micro_batch, layer };

/// Reaction of a run to a checkpoint that cannot be written. The last checkpoint of a run always ends it.
enum class OnSaveFailure : std::uint8_t { stop, go_on };

/// Objective of a run: each target, or which answer of a pair is preferred (DPO, Rafailov et al., arXiv 2305.18290).
enum class Objective : std::uint8_t { lm, dpo };

/// Time at which log-probabilities under DPO's reference are computed: in passes before the first step, or in each step
/// beside those of the model that is trained. The bits are the same.
enum class DpoReference : std::uint8_t { automatic, before, step };

/// A source of data and its weight, which is to those of the others as its windows are to theirs.
struct MixEntry {
  std::string path;
  double weight = 1.0;
};

/// Facts of the sequences that a run trains on, known once its data is opened; no flag sets them.
struct SequenceFacts {
  bool packed = false;  ///< sequences may hold several records, and attention and positions stay within each
  /// Length of a record -> its number in a sequence, on average over a sample. Empty: each sequence is one record.
  std::map<std::int64_t, double> records;
  double target_share = 1.0;  ///< share of tokens that are targets
  std::int64_t scored = 0;    ///< records for --objective dpo, whose log-probabilities are held where computed before
  std::int64_t held_out = 0;  ///< records of its evaluations, whose log-probabilities always are
  bool has_scores = false;    ///< log-probabilities of the former lie beside them
};

/// Low-rank adapters that a run trains in place of the model's own weights.
struct LoraOptions {
  std::int64_t rank = 0;                     ///< 0: none
  std::optional<double> alpha;               ///< empty: twice the rank
  std::string targets;                       ///< text that parse_lora_targets reads; empty: all-linear
  std::string experts;                       ///< matrices of experts that have some, as --lora-experts; empty: none
  std::optional<double> dropout;             ///< empty: 0
  std::optional<bool> rank_stabilized;       ///< empty: off
  std::vector<std::string> modules_to_save;  ///< ends of the names of modules that are trained whole beside them
  /// Ranks and alphas of modules whose whole name, or what follows a dot in it, the regular expression matches: the
  /// first that does. PEFT's rank_pattern and alpha_pattern.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern{};
  std::vector<std::pair<std::string, double>> alpha_pattern{};
  double alpha_or_default() const noexcept { return alpha.value_or(2.0 * static_cast<double>(rank)); }
  bool operator==(const LoraOptions&) const = default;
};

struct TrainConfig {
  std::string model;
  bool from_scratch = false;
  std::vector<std::string> data;
  std::vector<MixEntry> mix;  ///< in place of data: sources with weights
  std::vector<std::string> eval_data;
  std::optional<TokenWidth> token_dtype;
  bool document_attention = false;  ///< documents of a stream are records, which do not see each other
  Objective objective = Objective::lm;
  double dpo_beta = 0.1;  ///< how much a reward weighs that departs from the reference, of DPO alone
  DpoReference dpo_reference = DpoReference::automatic;
  bool reference_has_adapter = false;  ///< adapters that training goes on from; no flag sets it
  std::string out;
  std::string device = "auto";
  std::size_t device_memory = 0;  ///< bytes; 0: what is free, less a margin
  std::size_t host_memory = 0;    ///< bytes; 0: no ceiling
  double link_bandwidth = 0.0;    ///< bytes a second; 0: none emulated
  double update_rate = 0.0;       ///< parameters a second of the CPU update; 0: none emulated
  Policy policy;
  std::int64_t subgroup_size = 0;  ///< parameters; 0: auto
  int resident_layers = -1;        ///< -1: auto
  int prefetch_layers = 0;         ///< 0: auto
  StateFormat state = StateFormat::fp32;
  std::optional<ComputeType> compute;  ///< empty: fp32 on the host device, bf16 on GPUs
  Fp8Format fp8_gradients = Fp8Format::e4m3;  ///< format of gradients that are factors
  Fp8Accumulation fp8_accumulation = Fp8Accumulation::full;
  std::optional<Recompute> recompute;  ///< empty: auto
  bool offload_activations = false;    ///< whether inputs wait on the host for backward; only where all blocks are
                                       ///< computed again
  std::int64_t micro_batch = 1;
  std::int64_t grad_accum = 1;
  AccumulationOrder accumulation_order = AccumulationOrder::automatic;
  std::int64_t seq_len = 0;  ///< 0: the model's positions, at most 1024
  SequenceFacts sequences;
  std::int64_t steps = 0;  ///< 0: given by epochs
  double epochs = 0.0;     ///< 0: given by steps
  std::optional<double> lr;
  std::optional<double> min_lr;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;
  Schedule::Kind lr_schedule = Schedule::Kind::cosine;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;
  std::uint64_t seed = 42;
  std::string freeze;
  LoraOptions lora;
  std::string adapter;             ///< folder of an adapter that training goes on from; empty: none
  std::optional<WeightCode> base;  ///< format of frozen matrices; empty: as the model's files have them
  OnNonfinite on_nonfinite = OnNonfinite::skip;
  Speculate speculate = Speculate::automatic;
  std::int64_t eval_every = 0;
  std::int64_t checkpoint_every = 0;
  int keep = 2;
  bool keep_best = false;
  std::int64_t patience = 0;  ///< evaluations in a row without a lower loss that end the run; 0: any number
  OnSaveFailure on_save_failure = OnSaveFailure::stop;
  std::int64_t log_every = 1;
  std::string trace;
  int metrics_port = -1;  ///< -1: none; 0: one that is free
  std::string metrics_address = "127.0.0.1";
  int threads = 0;
  int update_threads = 0;
  int numa_node = -1;  ///< -1: the GPU's, else wherever
  std::string state_dir;
  bool strict = false;
};

/// Name of a format as --base takes it: "nf4", and "bf16" where weights are stored as they are.
std::string_view base_name(WeightCode code) noexcept;

/// One field: how it is called, explained, read and printed.
struct ConfigField {
  /// How TOML writes it.
  enum class Kind : std::uint8_t { text, number, boolean, list };
  std::string_view name;  ///< "lr": flag --lr, TOML key lr
  Kind kind = Kind::text;
  std::string_view unit;      ///< "BYTES", "PARAMETERS", ...
  std::string_view fallback;  ///< the default, in words
  std::string_view example;   ///< a value
  std::string_view help;
  /// Throws UsageError where the text is no proper value. A list field appends.
  std::function<void(TrainConfig&, std::string_view)> set;
  /// Texts that `set` reads back; empty where the field is unset.
  std::function<std::vector<std::string>(const TrainConfig&)> get;
};

/// All fields, in the order of help and TOML.
const std::vector<ConfigField>& config_fields();
/// Null where there is none of that name.
const ConfigField* find_config_field(std::string_view name);
/// Sets one field from texts (several for a list, which they replace). Throws UsageError "--name VALUE: ...".
void set_config_field(TrainConfig& config, const ConfigField& field, const std::vector<std::string>& values);

/// Why no update of such a run can run ahead of the gradient norm; empty where some may.
std::string_view why_none_speculates(const TrainConfig& config) noexcept;

/// TOML with every field that is set. Reads back as the same configuration.
std::string config_toml(const TrainConfig& config);
/// Reads TOML over `config`; the second names of flags are keys too. Throws UsageError on unknown keys, wrong types and
/// values, InputError where the file cannot be read.
void read_config_toml(const std::filesystem::path& file, TrainConfig& config);

/// Contradictions between fields. Throws UsageError.
void check_config(const TrainConfig& config);

}  // namespace tandem
