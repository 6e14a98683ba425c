#include "train/setup/performance.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "api/calibrate.hpp"
#include "api/profile_cache.hpp"
#include "core/base/error.hpp"
#include "models/transformer/input_store.hpp"
#include "scheduler/simulation/input_copies.hpp"

namespace tandem {
namespace {

static_assert(InputStore::ring(1) == 1 + InputCopies::buffers_ahead, "the simulator sends inputs as the model does");

/// Part of a block's forward that is computed again in backward.
enum class Again : std::uint8_t { nothing, selected, all };

/// Work of a block's MLP.
struct MlpWork {
  double product_flops = 0.0;  ///< FLOPs of one of its matrices, in forward
  double router_flops = 0.0;
  double activation_bytes = 0.0;  ///< bytes that the activation reads and writes
  double sum_bytes = 0.0;         ///< bytes moved to add up the outputs of experts
  /// Bytes of one of its matrices, where reading them takes longer than multiplying by them.
  double weight_bytes = 0.0;
  double kernels = 0.0;  ///< kernels that experts add
};

MlpWork mlp_work(const ModelConfig& c, const RunShape& shape) {
  const auto tokens = static_cast<double>(shape.batch * shape.sequence);
  const auto width = static_cast<double>(c.width), ffn = static_cast<double>(c.ffn);
  const auto experts = static_cast<double>(c.experts);
  const auto element = static_cast<double>(size_of(shape.compute));
  const double rows = tokens * static_cast<double>(c.mlp_rows());
  // Rows are multiplied by so many at once, and of the last ones of an expert half are none.
  constexpr double rows_at_once = 16.0;
  const double used = std::min(experts, rows);
  const double multiplied = rows + used * rows_at_once / 2.0;
  MlpWork work;
  work.product_flops = 2.0 * multiplied * width * ffn;
  work.router_flops = 2.0 * tokens * width * experts;
  work.activation_bytes = rows * element * ffn * (c.family == Family::gpt2 ? 2.0 : 3.0);
  if (c.experts > 0) {
    work.sum_bytes = (rows + tokens) * width * element;
    work.kernels = 5.0;
    // With so many rows an expert's weight is read while it is multiplied by; with fewer, part of that is waited for.
    constexpr double rows_that_hide = 128.0;
    work.weight_bytes = used * width * ffn * sizeof(bf16) * std::max(0.0, 1.0 - rows / (experts * rows_that_hide));
  }
  return work;
}

/// Positions that a token sees on average, of sequences that hold such records.
double positions_seen_in(const SequenceFacts& sequences, std::int64_t sequence, std::int64_t window) {
  if (sequences.records.empty()) return positions_seen(sequence, window);
  double seen = 0.0, tokens = 0.0;
  for (const auto& [length, count] : sequences.records) {
    tokens += count * static_cast<double>(length);
    seen += count * static_cast<double>(length) * positions_seen(length, window);
  }
  return seen / tokens;
}

LayerWork block_work(const ModelConfig& c, const RunShape& shape, const SequenceFacts& sequences, std::int64_t layer,
                     Again again) {
  const auto tokens = static_cast<double>(shape.batch * shape.sequence);
  const auto width = static_cast<double>(c.width);
  const MlpWork mlp = mlp_work(c, shape);
  const auto queries = static_cast<double>(c.heads * c.head_dim);
  const auto keys = static_cast<double>(c.kv_heads * c.head_dim);
  const double matrices = c.family == Family::gpt2 ? 2.0 : 3.0;  // matrices of the MLP
  const auto element = static_cast<double>(size_of(shape.compute));
  LayerWork work;
  work.forward.matmul_flops =
      2.0 * tokens * width * (2.0 * queries + 2.0 * keys) + matrices * mlp.product_flops + mlp.router_flops;
  // Two products of (T, T) with each head, of which the causal mask leaves half, and a window or records less.
  const double in_sight =
      positions_seen_in(sequences, shape.sequence, c.window_of(layer)) / positions_seen(shape.sequence, 0);
  work.forward.attention_flops = 2.0 * tokens * static_cast<double>(shape.sequence) * queries * in_sight;
  // Two norms and two residual sums over the width, rotations, the activation over the MLP's inner width.
  work.forward.memory_bytes = tokens * element * (10.0 * width + 2.0 * (queries + keys)) + mlp.activation_bytes +
                              mlp.sum_bytes + matrices * mlp.weight_bytes;
  work.forward.kernels = 12.0 + mlp.kernels;
  if (c.norm_before && c.norm_after) {  // twice as many norms
    work.forward.memory_bytes += 4.0 * tokens * element * width;
    work.forward.kernels += 2.0;
  }
  if (c.residual_factor != 1.0) work.forward.memory_bytes += 4.0 * tokens * element * width;  // sums of their own
  work.backward.matmul_flops = 2.0 * work.forward.matmul_flops;
  work.backward.attention_flops = 2.5 * work.forward.attention_flops;
  work.backward.memory_bytes = 2.0 * work.forward.memory_bytes;
  work.backward.kernels = 24.0 + mlp.kernels;
  if (again == Again::selected) {
    // Norms before attention and MLP and the activation of the MLP; norms of query and key and rotations, too.
    const bool qk_norm = c.qk_norm != QkNorm::none;
    const double norms = c.norm_before ? 2.0 : 0.0;
    work.backward.memory_bytes +=
        tokens * element * (2.0 * norms * width + (qk_norm ? 4.0 * (queries + keys) : 0.0)) + mlp.activation_bytes;
    work.backward.kernels += norms + (qk_norm ? 5.0 : 1.0);
  }
  if (again == Again::all) {
    // All but the residual sum and the last product, unless a norm is of it: they only make the block's output.
    work.backward.matmul_flops += work.forward.matmul_flops - (c.norm_after ? 0.0 : mlp.product_flops);
    work.backward.attention_flops += work.forward.attention_flops;
    work.backward.memory_bytes += work.forward.memory_bytes - 3.0 * tokens * element * width - mlp.sum_bytes -
                                  (c.norm_after ? 0.0 : mlp.weight_bytes);
    work.backward.kernels += work.forward.kernels - 1.0;
  }
  return work;
}

/// The figure that varies most, where one varies too much; else the first of the doubts.
const std::string& worst(const std::vector<std::string>& lines, const MachineProfile& profile) {
  const auto spread = [&](const ProfileField& field) { return (profile.*field.figure).spread; };
  const ProfileField& widest = *std::ranges::max_element(profile_fields(), {}, spread);
  const std::string its_line = fmt::format("{}.{} varies", widest.section, widest.key);
  const auto found = std::ranges::find_if(lines, [&](const std::string& line) { return line.starts_with(its_line); });
  return found != lines.end() ? *found : lines.front();
}

void warn_of_doubts(const MachineProfile& profile, const std::filesystem::path& file) {
  const auto lines = doubts(profile);
  if (lines.empty()) return;
  spdlog::warn(
      "the calibration in {} looks wrong in {} {}, the worst: {}; predictions may be off: "
      "`tandem calibrate --show` lists all, `tandem calibrate` measures anew",
      file.string(), lines.size(), lines.size() == 1 ? "place" : "places", worst(lines, profile));
}

struct EndsWork {
  LayerWork embedding, head;
};

struct TrainedEnds {
  bool embedding = true, head = true;
};

void add_to(PassWork& to, const PassWork& more) {
  to.matmul_flops += more.matmul_flops;
  to.attention_flops += more.attention_flops;
  to.memory_bytes += more.memory_bytes;
  to.kernels += more.kernels;
}

/// Parts of a layer's passes that depend on what is frozen, has an adapter, or is stored in another format.
class LayoutWork {
 public:
  LayoutWork(const ModelConfig& c, const RunShape& shape, const ParameterLayout& layout)
      : config_(c),
        layout_(layout),
        tokens_(static_cast<double>(shape.batch * shape.sequence)),
        expert_rows_(mlp_work(c, shape).product_flops / (2.0 * static_cast<double>(c.width * c.ffn))),
        element_(static_cast<double>(size_of(shape.compute))),
        uses_(1.0 / static_cast<double>(shape.micro_batches)) {}

  /// Changes the work of a block, all of whose matrices it has as trained. `again`: forward runs again in backward.
  void apply(std::int64_t block, bool again, LayerWork& work) const {
    const Layer& layer = layout_.layer(static_cast<int>(block) + 1);
    for (const LinearLayer& of : linear_layers(config_)) {
      const double rows = of.experts > 0 ? expert_rows_ : tokens_;
      const auto inputs = static_cast<double>(of.inputs), outputs = static_cast<double>(of.outputs);
      if (frozen(layer, of.module + ".weight")) work.backward.matmul_flops -= 2.0 * rows * inputs * outputs;
      if (config_.lora && config_.lora->adapts(block, of.module)) add_adapter(rows, inputs, outputs, again, work);
    }
    for (const Parameter& p : layer.parameters) {
      if (p.coded()) add_decoding(p, work);
    }
  }
  /// Whether the output weight, or the token embedding, is trained.
  bool trains_head() const { return !frozen(layout_.layers().back(), "lm_head"); }
  bool trains_embedding() const { return !frozen(layout_.layers().front(), "tokens"); }

 private:
  static bool frozen(const Layer& layer, std::string_view name) {
    const int index = layer.find(name);
    return index >= 0 && !layer.parameters[static_cast<std::size_t>(index)].options.trainable;
  }

  /// The product by A and then by B, whose result is added to the layer's; in backward two products for each.
  void add_adapter(double rows, double inputs, double outputs, bool again, LayerWork& work) const {
    const double flops = 2.0 * rows * static_cast<double>(config_.lora->rank) * (inputs + outputs);
    const PassWork once{.matmul_flops = flops, .memory_bytes = 2.0 * rows * outputs * element_, .kernels = 3.0};
    add_to(work.forward, once);
    add_to(work.backward,
           {.matmul_flops = 2.0 * flops, .memory_bytes = 2.0 * rows * inputs * element_, .kernels = 5.0});
    if (again) add_to(work.backward, once);
  }
  /// Once in a use of the layer, which may serve several micro-batches.
  void add_decoding(const Parameter& p, LayerWork& work) const {
    const double bytes_each = static_cast<double>(code_bits(p.options.code)) / 8.0 + sizeof(bf16);
    const PassWork once{.memory_bytes = uses_ * bytes_each * static_cast<double>(p.count), .kernels = uses_};
    add_to(work.forward, once);
    add_to(work.backward, once);
  }

  const ModelConfig& config_;
  const ParameterLayout& layout_;
  double tokens_, expert_rows_, element_, uses_;
};

/// The head computes loss and gradients in one go: its matrix products count as backward. `trained`: what is trained
/// of it and of the embedding.
EndsWork ends_work(const ModelConfig& c, const RunShape& shape, TrainedEnds trained) {
  const auto tokens = static_cast<double>(shape.batch * shape.sequence);
  const auto width = static_cast<double>(c.width), vocabulary = static_cast<double>(c.vocabulary);
  const double stream = 2.0 * tokens * width * static_cast<double>(size_of(shape.compute));
  const double product = 2.0 * tokens * width * vocabulary;         // logits, their input's gradient, or the weight's
  const double logits = 3.0 * tokens * vocabulary * sizeof(float);  // made, read and replaced
  const double rows = tokens * width * sizeof(float);
  const bool whole = ends_gradient(c, shape) == DType::bf16;
  const bool of_tokens = whole && c.tied_head;  // then the embedding adds to the rows of its tokens alone
  EndsWork work;
  work.embedding.forward = work.head.forward = {.memory_bytes = stream, .kernels = 1.0};
  if (trained.embedding) work.embedding.backward = work.embedding.forward;
  if (trained.embedding && of_tokens) work.embedding.backward.memory_bytes += rows + 2.0 * tokens * width;
  if (trained.embedding && whole && !c.tied_head)
    work.embedding.backward.memory_bytes += 2.0 * vocabulary * width;  // zeros, mostly
  work.head.backward = {.matmul_flops = 2.0 * product, .memory_bytes = logits, .kernels = 5.0};
  const auto add_logits = [&](double more_bytes, double kernels) {
    work.head.backward.matmul_flops += product;
    work.head.backward.memory_bytes += logits + more_bytes;
    work.head.backward.kernels += kernels;
  };
  if (shape.preference_beta > 0.0F) add_logits(0.0, 2.0);  // for the losses of pairs, before those for gradients
  if (shape.reference_in_step) add_logits(stream, 5.0);    // and of its norm, for the reference
  if (!trained.head) return work;
  // The gradient of the weight is written once, or added to by the products of some rows at a time.
  constexpr double rows_at_once = 1024.0;
  const double each = whole ? 2.0 : 2.0 * std::ceil(tokens / rows_at_once) * sizeof(float);
  PassWork weight{.matmul_flops = product, .memory_bytes = each * vocabulary * width, .kernels = 3.0};
  if (whole && head_rows_at_once(c, shape) < c.vocabulary) {  // the logits are computed once more
    weight.matmul_flops += product;
    weight.memory_bytes += logits;
  }
  if (of_tokens) {
    weight.matmul_flops += 2.0 * tokens * tokens * width;
    weight.memory_bytes += rows;
    weight.kernels += 2.0;
  }
  const bool last = makes_table_last(c, shape);
  if (last) {  // the logits are computed once more
    weight.matmul_flops += product;
    weight.memory_bytes += logits;
    weight.kernels += 3.0;
  }
  PassWork& with = last ? work.embedding.backward : work.head.backward;
  with.matmul_flops += weight.matmul_flops;
  with.memory_bytes += weight.memory_bytes;
  with.kernels += weight.kernels;
  return work;
}

}  // namespace

std::vector<LayerWork> work_of(const ModelConfig& c, const RunShape& shape, const SequenceFacts& sequences,
                               const ParameterLayout* layout) {
  std::optional<LayoutWork> by_layout;
  if (layout != nullptr) by_layout.emplace(c, shape, *layout);
  TrainedEnds trained;
  if (by_layout) trained = {by_layout->trains_embedding(), by_layout->trains_head()};
  const EndsWork ends = ends_work(c, shape, trained);
  const Again of_kept = shape.selective ? Again::selected : Again::nothing;
  std::vector<LayerWork> work{ends.embedding};
  if (shape.reference_in_step) add_to(work.back().forward, ends.embedding.forward);
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const bool again = i < shape.recomputed_blocks;
    work.push_back(block_work(c, shape, sequences, i, again ? Again::all : of_kept));
    const PassWork without_adapters = work.back().forward;
    if (by_layout) by_layout->apply(i, again, work.back());
    if (shape.reference_in_step) add_to(work.back().forward, without_adapters);
  }
  work.push_back(ends.head);
  return work;
}

std::size_t offloaded_input_bytes(const ModelConfig& c, const RunShape& shape) noexcept {
  if (!shape.offload_inputs) return 0;
  return static_cast<std::size_t>(shape.batch * shape.sequence * c.width) * size_of(shape.compute);
}

MachineProfile as_emulated(MachineProfile profile, const TrainConfig& config) {
  if (config.link_bandwidth > 0.0) profile = with_link(std::move(profile), config.link_bandwidth);
  if (config.update_rate > 0.0) {
    // The emulated rate is that of the run's own format, profiles hold that of fp32 state.
    const auto of_fp32 = update_bytes_each(config.state) / update_bytes_each(StateFormat::fp32);
    profile = with_update_rate(std::move(profile), config.update_rate * of_fp32);
  }
  return profile;
}

std::optional<MachineProfile> find_calibration(const Device& device) {
  const std::filesystem::path cached = cached_profile_path(device);
  std::error_code hidden;  // in a folder that may not be looked into: not calibrated
  if (cached.empty() || !std::filesystem::exists(cached, hidden)) return std::nullopt;
  std::optional<MachineProfile> profile;
  try {
    profile = read_profile(cached);
  } catch (const Error& error) {
    spdlog::warn("the calibration of this machine is not used: {}", error.what());
    return std::nullopt;
  }
  if (const std::string differs = difference(*profile, identify(device)); !differs.empty()) {
    spdlog::warn("the calibration in {} is stale: {}; run `tandem calibrate`", cached.string(), differs);
    return std::nullopt;
  }
  warn_of_doubts(*profile, cached);
  return profile;
}

}  // namespace tandem
