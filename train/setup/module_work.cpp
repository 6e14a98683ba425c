#include "train/setup/module_work.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "models/transformer/adapter_modules.hpp"
#include "train/setup/fp8_work.hpp"

namespace tandem {
namespace {

LayerWork& of(LayerModules& modules, ModuleKind kind) { return modules[static_cast<std::size_t>(kind)]; }

void add(PassWork& to, const PassWork& more) noexcept {
  to.matmul_flops += more.matmul_flops;
  to.fp8_flops += more.fp8_flops;
  to.attention_flops += more.attention_flops;
  to.memory_bytes += more.memory_bytes;
  to.kernels += more.kernels;
}

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

/// Work of one block, by modules. Each method fills in one, all of whose matrices it has as trained.
class BlockWork {
 public:
  BlockWork(const ModelConfig& c, const RunShape& shape)
      : config_(c),
        shape_(shape),
        mlp_(mlp_work(c, shape)),
        tokens_(static_cast<double>(shape.batch * shape.sequence)),
        width_(static_cast<double>(c.width)),
        queries_(static_cast<double>(c.heads * c.head_dim)),
        keys_(static_cast<double>(c.kv_heads * c.head_dim)),
        matrices_(c.family == Family::gpt2 ? 2.0 : 3.0),
        row_bytes_(tokens_ * static_cast<double>(size_of(shape.compute))) {}

  LayerModules modules(const SequenceFacts& sequences, std::int64_t layer, Again again) const {
    LayerModules made;
    put(made, ModuleKind::norms, norms());
    of(made, ModuleKind::norms).backward.kernels = 4.0;
    put(made, ModuleKind::qkv, {.matmul_flops = 2.0 * tokens_ * width_ * (queries_ + 2.0 * keys_), .kernels = 3.0});
    put(made, ModuleKind::attention, attention(sequences, layer));
    put(made, ModuleKind::output, output());
    put(made, config_.experts > 0 ? ModuleKind::experts : ModuleKind::mlp, mlp(), config_.experts > 0 ? 3.0 : 0.0);
    if (config_.experts > 0) of(made, ModuleKind::router) = router();
    if (again == Again::selected) add_selected(made);
    if (again == Again::all) add_forward(made);
    return made;
  }

 private:
  /// Two products of each one of forward in backward, two and a half of attention's. `once`: kernels that are as many
  /// in backward; the others are twice as many.
  static void put(LayerModules& modules, ModuleKind kind, const PassWork& forward, double once = 0.0) {
    of(modules, kind) = {.forward = forward,
                         .backward = {.matmul_flops = 2.0 * forward.matmul_flops,
                                      .attention_flops = 2.5 * forward.attention_flops,
                                      .memory_bytes = 2.0 * forward.memory_bytes,
                                      .kernels = 2.0 * (forward.kernels - once) + once}};
  }
  /// Two norms, or twice as many, each of which reads and writes the width.
  PassWork norms() const {
    const double count = config_.norm_before && config_.norm_after ? 4.0 : 2.0;
    return {.memory_bytes = count * 2.0 * row_bytes_ * width_, .kernels = count};
  }
  /// Two products of (T, T) with each head, of which the causal mask leaves half, and a window or records less; and the
  /// rotations.
  PassWork attention(const SequenceFacts& sequences, std::int64_t layer) const {
    const double in_sight =
        positions_seen_in(sequences, shape_.sequence, config_.window_of(layer)) / positions_seen(shape_.sequence, 0);
    return {.attention_flops = 2.0 * tokens_ * static_cast<double>(shape_.sequence) * queries_ * in_sight,
            .memory_bytes = row_bytes_ * 2.0 * (queries_ + keys_),
            .kernels = 2.0};
  }
  /// A sum with the residual, which is more where it has a factor.
  double sum_bytes() const { return (config_.residual_factor != 1.0 ? 5.0 : 3.0) * row_bytes_ * width_; }
  PassWork output() const {
    return {.matmul_flops = 2.0 * tokens_ * width_ * queries_, .memory_bytes = sum_bytes(), .kernels = 2.0};
  }
  PassWork mlp() const {
    return {.matmul_flops = matrices_ * mlp_.product_flops,
            .memory_bytes = sum_bytes() + mlp_.activation_bytes + mlp_.sum_bytes + matrices_ * mlp_.weight_bytes,
            .kernels = config_.experts > 0 ? 6.0 : 3.0};
  }
  LayerWork router() const {
    return {.forward = {.matmul_flops = mlp_.router_flops, .kernels = 2.0},
            .backward = {.matmul_flops = 2.0 * mlp_.router_flops, .kernels = 2.0}};
  }
  /// Norms before attention and MLP and the activation of the MLP; norms of query and key and rotations, too.
  void add_selected(LayerModules& modules) const {
    const double norms = config_.norm_before ? 2.0 : 0.0, heads = queries_ + keys_;
    const bool qk_norm = config_.qk_norm != QkNorm::none;
    add(of(modules, ModuleKind::norms).backward,
        {.memory_bytes = row_bytes_ * (2.0 * norms * width_ + (qk_norm ? 2.0 * heads : 0.0)),
         .kernels = norms + (qk_norm ? 2.0 : 0.0)});
    if (qk_norm) {
      add(of(modules, ModuleKind::attention).backward, {.memory_bytes = row_bytes_ * 2.0 * heads, .kernels = 2.0});
    }
    add(of(modules, config_.experts > 0 ? ModuleKind::experts : ModuleKind::mlp).backward,
        {.memory_bytes = mlp_.activation_bytes, .kernels = 1.0});
  }
  /// All but the residual sum and the last product, unless a norm is of it: they only make the block's output.
  void add_forward(LayerModules& modules) const {
    for (LayerWork& module : modules) add(module.backward, module.forward);
    const bool product = config_.norm_after;
    add(of(modules, config_.experts > 0 ? ModuleKind::experts : ModuleKind::mlp).backward,
        {.matmul_flops = product ? 0.0 : -mlp_.product_flops,
         .memory_bytes = -3.0 * row_bytes_ * width_ - mlp_.sum_bytes - (product ? 0.0 : mlp_.weight_bytes),
         .kernels = -1.0});
  }

  const ModelConfig& config_;
  const RunShape& shape_;
  MlpWork mlp_;
  double tokens_, width_, queries_, keys_;
  double matrices_;   ///< matrices of the MLP
  double row_bytes_;  ///< bytes of one value of each token
};

struct TrainedEnds {
  bool embedding = true, head = true;
};

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
  void apply(std::int64_t block, bool again, LayerModules& modules) const {
    const Layer& layer = layout_.layer(static_cast<int>(block) + 1);
    for (const LinearLayer& linear : linear_layers(config_)) {
      const double rows = linear.experts > 0 ? expert_rows_ : tokens_;
      const auto inputs = static_cast<double>(linear.inputs), outputs = static_cast<double>(linear.outputs);
      if (frozen(layer, linear.module + ".weight")) {
        of(modules, kind_of_linear(linear.module)).backward.matmul_flops -= 2.0 * rows * inputs * outputs;
      }
    }
    if (config_.lora) {
      for (const AdapterModule& module : adapter_modules(config_)) {
        add_adapter(block, module, again, of(modules, ModuleKind::adapters));
      }
    }
    for (const Parameter& p : layer.parameters) {
      if (p.coded()) add_decoding(p, of(modules, ModuleKind::decoding));
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

  /// The product by A, and that by each B, whose result is added to its layer's; in backward two products for each.
  void add_adapter(std::int64_t block, const AdapterModule& module, bool again, LayerWork& work) const {
    const LoraModule* const lora = config_.lora->find(block, module.name);
    if (lora == nullptr) return;
    const double rows = module.experts() > 0 ? expert_rows_ : tokens_;
    const auto inputs = static_cast<double>(module.inputs()), outputs = static_cast<double>(module.outputs());
    const auto layers = static_cast<double>(module.layers.size());
    const double flops = 2.0 * rows * static_cast<double>(lora->rank) * (inputs + outputs);
    const PassWork once{
        .matmul_flops = flops, .memory_bytes = 2.0 * rows * outputs * element_, .kernels = 2.0 + layers};
    add(work.forward, once);
    add(work.backward,
        {.matmul_flops = 2.0 * flops, .memory_bytes = 2.0 * rows * inputs * element_, .kernels = 2.0 + 3.0 * layers});
    if (again) add(work.backward, once);
  }
  /// Once in a use of the layer, which may serve several micro-batches.
  void add_decoding(const Parameter& p, LayerWork& work) const {
    const double bytes_each = static_cast<double>(code_bits(p.options.code)) / 8.0 + sizeof(bf16);
    const PassWork once{.memory_bytes = uses_ * bytes_each * static_cast<double>(p.count), .kernels = uses_};
    add(work.forward, once);
    add(work.backward, once);
  }
  const ModelConfig& config_;
  const ParameterLayout& layout_;
  double tokens_, expert_rows_, element_, uses_;
};

/// Adds the forward of DPO's reference, with adapters of its own or without any, over weights that are there.
void add_reference(const RunShape& shape, LayerModules& modules) {
  if (!shape.reference_in_step) return;
  for (std::size_t kind = 0; kind < module_kinds; ++kind) {
    const auto of_kind = static_cast<ModuleKind>(kind);
    if (of_kind == ModuleKind::decoding || of_kind == ModuleKind::head) continue;
    if (of_kind == ModuleKind::adapters && !shape.reference_adapters) continue;
    const PassWork once = modules[kind].forward;
    add(modules[kind].forward, once);
  }
}

/// Modules of the first layer and the last one.
struct EndsModules {
  LayerModules first, last;
};

/// The head computes loss and gradients in one go: its matrix products count as backward. `trained`: what is trained
/// of it and of the embedding.
EndsModules ends_work(const ModelConfig& c, const RunShape& shape, TrainedEnds trained) {
  const auto tokens = static_cast<double>(shape.batch * shape.sequence);
  const auto width = static_cast<double>(c.width), vocabulary = static_cast<double>(c.vocabulary);
  const double stream = 2.0 * tokens * width * static_cast<double>(size_of(shape.compute));
  const double product = 2.0 * tokens * width * vocabulary;         // logits, their input's gradient, or the weight's
  const double logits = 3.0 * tokens * vocabulary * sizeof(float);  // made, read and replaced
  const double rows = tokens * width * sizeof(float);
  const bool whole = ends_gradient(c, shape) == DType::bf16;
  const bool of_tokens = whole && c.tied_head;  // then the embedding adds to the rows of its tokens alone
  EndsModules work;
  LayerWork& embedding = of(work.first, ModuleKind::embedding);
  embedding.forward = of(work.last, ModuleKind::norms).forward = {.memory_bytes = stream, .kernels = 1.0};
  if (trained.embedding) embedding.backward = embedding.forward;
  if (trained.embedding && of_tokens) embedding.backward.memory_bytes += rows + 2.0 * tokens * width;
  if (trained.embedding && whole && !c.tied_head)
    embedding.backward.memory_bytes += 2.0 * vocabulary * width;  // zeros, mostly
  LayerWork& head = of(work.last, ModuleKind::head);
  head.backward = {.matmul_flops = 2.0 * product, .memory_bytes = logits, .kernels = 5.0};
  const PassWork losses{.matmul_flops = product, .memory_bytes = logits, .kernels = 2.0};
  if (shape.preference_beta > 0.0F) add(head.backward, losses);  // losses of pairs, before those for gradients
  if (shape.reference_in_step) {                                 // and for the reference, with its norm
    add(head.backward, losses);
    add(of(work.last, ModuleKind::norms).backward, {.memory_bytes = stream, .kernels = 3.0});
  }
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
  add(last ? of(work.first, ModuleKind::head).backward : head.backward, weight);
  return work;
}

}  // namespace

void add(LayerWork& to, const LayerWork& more) noexcept {
  add(to.forward, more.forward);
  add(to.backward, more.backward);
}

std::string_view name_of(ModuleKind kind) noexcept {
  constexpr std::array<std::string_view, module_kinds> names{
      "embedding", "norms", "QKV projections", "attention", "output projection", "MLP", "experts",
      "router",    "head",  "adapters",        "decoding"};
  return names[static_cast<std::size_t>(kind)];
}

ModuleKind kind_of_linear(std::string_view module) noexcept {
  if (module.starts_with("mlp.experts.")) return ModuleKind::experts;
  if (module == "mlp.gate") return ModuleKind::router;
  if (module.starts_with("mlp.")) return ModuleKind::mlp;
  return module == "attn.c_proj" || module == "self_attn.o_proj" ? ModuleKind::output : ModuleKind::qkv;
}

std::vector<LayerModules> module_work_of(const ModelConfig& c, const RunShape& shape, const SequenceFacts& sequences,
                                         const ParameterLayout* layout) {
  std::optional<LayoutWork> by_layout;
  if (layout != nullptr) by_layout.emplace(c, shape, *layout);
  TrainedEnds trained;
  if (by_layout) trained = {by_layout->trains_embedding(), by_layout->trains_head()};
  const EndsModules ends = ends_work(c, shape, trained);
  const Again of_kept = shape.selective ? Again::selected : Again::nothing;
  const BlockWork block(c, shape);
  std::vector<LayerModules> work{ends.first};
  add_reference(shape, work.back());
  for (std::int64_t i = 0; i < c.layers; ++i) {
    const bool again = i < shape.recomputed_blocks;
    work.push_back(block.modules(sequences, i, again ? Again::all : of_kept));
    if (by_layout) by_layout->apply(i, again, work.back());
    count_fp8(c, shape, again, work.back());
    add_reference(shape, work.back());
  }
  work.push_back(ends.last);
  return work;
}

}  // namespace tandem
