#include "models/transformer/transformer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "models/transformer/activations.hpp"
#include "models/transformer/input_store.hpp"

namespace tandem {
namespace {

void check(const ModelConfig& config, const RunShape& shape) {
  config.validate();
  if (shape.sequence < 1 || shape.sequence > config.positions) {
    throw UsageError(fmt::format("sequences of {} tokens", shape.sequence),
                     fmt::format("{} has {} positions", config.name, config.positions),
                     fmt::format("--seq-len 1 to {}", config.positions));
  }
  if (shape.batch < 1 || shape.batch > max_tokens / shape.sequence) {
    throw UsageError(fmt::format("a micro-batch of {} sequences of {} tokens", shape.batch, shape.sequence),
                     fmt::format("it must have 1 to {} tokens", max_tokens));
  }
  const std::int64_t most_routed = std::numeric_limits<std::int32_t>::max() / config.mlp_rows();
  if (shape.batch * shape.sequence > most_routed) {
    throw UsageError(fmt::format("a micro-batch of {} tokens", shape.batch * shape.sequence),
                     fmt::format("with {} experts for each it must have at most {}", config.mlp_rows(), most_routed));
  }
  if (shape.micro_batches < 1 || shape.micro_batches > max_tokens / (shape.batch * shape.sequence)) {
    throw UsageError(
        fmt::format("{} micro-batches of {} tokens at once", shape.micro_batches, shape.batch * shape.sequence),
        fmt::format("they must have 1 to {} tokens", max_tokens));
  }
  if (shape.micro_batches > 1 && !shape.training) throw MisuseError("several micro-batches at once without training");
  if (shape.recomputed_blocks < 0 || shape.recomputed_blocks > config.layers) {
    throw MisuseError(fmt::format("{} of {} blocks computed again", shape.recomputed_blocks, config.layers));
  }
  if (shape.offload_inputs && shape.recomputed_blocks < config.layers) {
    throw MisuseError("block inputs are offloaded only where all blocks are computed again");
  }
  if (shape.fp8 && shape.cached > 0) throw MisuseError("eight-bit products over a cache");
  if (shape.compute == DType::i32) throw MisuseError("the compute type of a transformer is i32");
  if (shape.preference_beta > 0.0F && shape.batch % 2 != 0) throw MisuseError("an odd number of sequences in pairs");
  if (shape.reference_in_step && (!shape.training || shape.preference_beta == 0.0F || !config.lora)) {
    throw MisuseError("a reference in the step of what has no preferences, or no adapters");
  }
  if (shape.reference_adapters && !shape.reference_in_step) throw MisuseError("adapters of a reference beforehand");
  if (shape.cached == 0) return;
  if (shape.cached < 0 || shape.cached > config.positions || shape.training || shape.packed) {
    throw MisuseError(fmt::format("a cache of {} positions", shape.cached),
                      fmt::format("{} has {}, for forward alone", config.name, config.positions));
  }
}

/// Needs of `decode`, which has no loss, and multiplies few rows without scratch.
WorkspaceNeeds decoding_needs(const ModelConfig& c, const RunShape& shape) {
  const std::int64_t attended = c.family == Family::gpt2 ? 3 * c.width : c.heads * c.head_dim;
  return {.tokens = most_cached_tokens(shape),
          .sequence = 1,
          .vocabulary = 1,
          .channels = std::max({c.width, c.ffn, c.experts, attended}),
          .head_dim = c.head_dim,
          .activations = shape.compute,
          .gradients = false,
          .experts = c.experts,
          .cached = true};
}

/// Needs of all calls; those of a block do without the vocabulary.
WorkspaceNeeds workspace_needs(const ModelConfig& c, const RunShape& shape) {
  if (shape.cached > 0) return decoding_needs(c, shape);
  const bool gpt2 = c.family == Family::gpt2;
  return {.tokens = shape.batch * shape.sequence,
          .sequence = shape.sequence,
          .vocabulary = c.vocabulary,
          .channels = std::max({c.width, c.ffn, c.experts, gpt2 ? 3 * c.width : c.heads * c.head_dim}),
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .head_dim = c.head_dim,
          .activations = shape.compute,
          .gradients = shape.training,
          .head_rows = ends_gradient(c, shape) == DType::bf16 ? head_rows_at_once(c, shape) : 0,
          .token_rows = c.tied_head,
          .experts = c.experts};
}

OpsNeeds needs_of(const ModelConfig& config, const RunShape& shape, const OpsRules& ops) {
  WorkspaceNeeds needs = workspace_needs(config, shape);
  const std::size_t ends = ops.workspace_bytes(needs);
  needs.vocabulary = 1;
  return {.block_scratch = ops.workspace_bytes(needs),
          .ends_scratch = ends,
          .repeats_gelu = ops.repeats_gelu(),
          .fp8 = fp8_sizes(config, shape, ops)};
}

/// A part's tokens: which of the pass, and where they lie in a layer's cache.
struct PartOfPass {
  std::int64_t first, end;
  CachedCall call;
  TensorView rows(TensorView pass) const { return pass.rows(first, end); }
  RecordsView records() const { return call.tokens.records; }
};

/// Parts of a pass of `decode` over the tokens of `batch`. Throws MisuseError.
std::vector<PartOfPass> parts_of_pass(const RunShape& shape, const MicroBatch& batch,
                                      std::span<const CachedPart> parts) {
  const std::int64_t room = shape.batch * shape.sequence;
  std::vector<PartOfPass> made;
  std::int64_t at = 0, logit_rows = 0;
  for (const CachedPart& part : parts) {
    const std::int64_t most = part.decodes ? shape.batch : shape.sequence;
    if (part.tokens < 1 || part.tokens > most || part.tokens > room - at) {
      throw MisuseError(fmt::format("a part of {} tokens", part.tokens),
                        fmt::format("the shape has room for {}", most));
    }
    // Ends of records serve backward alone.
    const std::int32_t* const first = batch.record_first.as<std::int32_t>() + at;
    made.push_back(
        {at, at + part.tokens, {{}, {batch.cache_rows.as<std::int32_t>() + at, {first, first}}, part.decodes}});
    at += part.tokens;
    logit_rows += part.decodes ? part.tokens : 1;
  }
  if (logit_rows > shape.batch) {
    throw MisuseError(fmt::format("logits of {} tokens", logit_rows), fmt::format("the shape has {}", shape.batch));
  }
  return made;
}

}  // namespace

std::string activations_of(const ModelConfig& config, const RunShape& shape) {
  if (shape.offload_inputs) return "recomputed, inputs offloaded";
  if (shape.recomputed_blocks == config.layers) return "recomputed";
  if (shape.recomputed_blocks == 0) return shape.selective ? "selectively recomputed" : "kept";
  return fmt::format("{} of {} blocks recomputed{}", shape.recomputed_blocks, config.layers,
                     shape.selective ? ", others selectively" : "");
}

struct Transformer::Impl {
  ModelConfig config;
  RunShape shape;
  std::int64_t token_count;
  int head_layer;
  std::size_t first_kept;  ///< this block and those after it have buffers of their own, for each micro-batch
  Device* device = nullptr;
  Ops* ops = nullptr;
  Activations buffers;
  std::optional<InputStore> inputs;  ///< from bind to unbind

  Impl(ModelConfig c, RunShape s)
      : config(std::move(c)),
        shape(s),
        token_count(shape.batch * shape.sequence),
        head_layer(static_cast<int>(config.layers) + 1),
        first_kept(static_cast<std::size_t>(config.layers - kept_blocks(config, shape))) {}

  void check_ready(bool needs_training) const;
  void lend(const TensorView& scratch) { ops->bind_workspace(scratch.data, scratch.bytes()); }
  /// Embedding and all blocks with `n` micro-batches; leaves the head's inputs in the store and the ops with the head's
  /// scratch. Scratch is lent anew with each part, also because another model may have lent its own in between. `keep`:
  /// every layer's inputs stay, for backward. Where the reference is computed too, its forward comes before that of the
  /// model, whose buffers it uses, and in each micro-batch's `normed`, which is not needed before the head.
  void forward(ParameterAccess& parameters, std::size_t n, bool keep, StreamView stream);
  void embed(ParameterAccess& parameters, std::size_t n, bool keep, StreamView stream);
  bool has_reference(bool keep) const { return keep && shape.reference_in_step; }
  TensorView head_input() const { return inputs->in_forward(static_cast<std::size_t>(config.layers), 0); }
  /// Scales x in place; does nothing where the factor is 1.
  void scale(TensorView x, double factor, StreamView stream) {
    if (factor != 1.0) ops->add_scaled(x, static_cast<float>(factor), {}, x, stream);
  }
  NormWeight norm_weight(const WeightsGuard& head) const {
    return {head["norm.weight"], static_cast<float>(config.norm_offset)};
  }
  /// The norm, and the factor of the logits, which are linear in its result.
  void normalize(const WeightsGuard& head, TensorView x, TensorView y, StreamView stream);
  /// Losses and their gradients in one visit of the head.
  void head_step(ParameterAccess& parameters, std::size_t n, float gradient_scale, StreamView stream);
  void head_loss(const WeightsGuard& head, const GradientsGuard& gradients, const MicroBatch& batch, TensorView x,
                 float gradient_scale, StreamView stream);
  const Fp8Buffers* fp8() const { return buffers.fp8 ? &*buffers.fp8 : nullptr; }
  bool table_last() const { return makes_table_last(config, shape); }
  /// The loss of a micro-batch from the normalised input of the head, and the gradients that are asked for.
  void loss(const MicroBatch& batch, TensorView x, TensorView weight, float gradient_scale, TensorView dx,
            TensorView dweight, StreamView stream);
  /// Log-probabilities of a micro-batch under the reference, from its forward's result in `normed`.
  void reference_scores(const WeightsGuard& head, const MicroBatch& batch, StreamView stream);
  /// The losses of a micro-batch alone, and with a beta those of its pairs and the factors that `loss` takes.
  void losses(const MicroBatch& batch, TensorView x, TensorView weight, float beta, StreamView stream);
  void normalize_backward(const WeightsGuard& head, const GradientsGuard& gradients, TensorView x, TensorView dx,
                          StreamView stream);
  void backward(ParameterAccess& parameters, std::size_t n, float gradient_scale, StreamView stream);
  void backward_block(ParameterAccess& parameters, std::size_t index, std::size_t n, StreamView stream);
  void backward_embedding(ParameterAccess& parameters, std::size_t n, float gradient_scale, StreamView stream);
  /// A block's buffers for one of `n` micro-batches. Those that keep nothing work in the first, also where it is a kept
  /// block's: they run before it in forward, and after it in backward.
  std::size_t slot(std::size_t index, std::size_t micro, std::size_t n) const {
    return index < first_kept ? 0 : (index - first_kept) * n + micro;
  }
  TensorView decode(ParameterAccess& parameters, std::span<const CachedPart> parts, StreamView stream);
  TensorView decoded_logits(const WeightsGuard& head, std::span<const PartOfPass> parts, StreamView stream);
  std::int64_t decoded_positions = 0;
  const MicroBatch& micro_batch(std::int64_t i) const {
    if (i < 0 || i >= std::ssize(buffers.micro)) throw MisuseError(fmt::format("micro-batch {} at once", i));
    return buffers.micro[static_cast<std::size_t>(i)];
  }
  TensorView flat(TensorView batch) const { return batch.reshaped({token_count}); }
};

void Transformer::Impl::check_ready(bool needs_training) const {
  if (ops == nullptr) throw MisuseError("transformer used before bind");
  if (needs_training && !shape.training) throw MisuseError("transformer of a forward-only shape asked to train");
}

void Transformer::Impl::embed(ParameterAccess& parameters, std::size_t n, bool keep, StreamView stream) {
  lend(buffers.ends_scratch);
  const WeightsGuard weights = parameters.fetch(0, stream);
  const TensorView positions = config.family == Family::gpt2 ? weights["positions"] : TensorView{};
  for (std::size_t micro = 0; micro < n; ++micro) {
    const TensorView out = inputs->begin_write(0, micro, stream);
    const MicroBatch& batch = buffers.micro[micro];
    const auto embed_into = [&](TensorView x) {
      ops->embedding(flat(batch.tokens), weights["tokens"], positions, {shape.sequence, batch.records()}, x, stream);
      scale(x, config.embedding_factor, stream);
    };
    embed_into(out);
    inputs->end_write(0, micro, stream);
    if (has_reference(keep)) embed_into(batch.normed);
  }
}

void Transformer::Impl::forward(ParameterAccess& parameters, std::size_t n, bool keep, StreamView stream) {
  inputs->begin_pass(n, keep, stream);
  embed(parameters, n, keep, stream);
  lend(buffers.block_scratch);
  const auto layers = static_cast<std::size_t>(config.layers);
  for (std::size_t i = 0; i < layers; ++i) {
    const WeightsGuard weights = parameters.fetch(static_cast<int>(i) + 1, stream);
    for (std::size_t micro = 0; micro < n; ++micro) {
      const TensorView x = inputs->in_forward(i, micro), y = inputs->begin_write(i + 1, micro, stream);
      const MicroBatch& batch = buffers.micro[micro];
      const std::size_t kept = keep ? slot(i, micro, n) : 0;
      BlockForward call{*ops, stream, weights, static_cast<std::int64_t>(i), batch.records(), x, y};
      call.fp8 = fp8();
      if (has_reference(keep)) {
        BlockForward first = call;
        first.x = first.y = batch.normed;
        first.of_reference = true;
        first.reference_adapters = buffers.reference ? &*buffers.reference : nullptr;
        buffers.block->forward(first, kept);
      }
      if (keep) call.draw = &batch.draw;
      buffers.block->forward(call, kept);
      inputs->end_write(i + 1, micro, stream);
    }
  }
  lend(buffers.ends_scratch);
}

void Transformer::Impl::normalize(const WeightsGuard& head, TensorView x, TensorView y, StreamView stream) {
  const auto eps = static_cast<float>(config.norm_eps);
  const std::int64_t rows = x.shape[0];
  const TensorView rstd = buffers.rstd.rows(0, rows);
  if (config.family == Family::gpt2) {
    ops->layer_norm(x, head["norm.weight"], head["norm.bias"], y, buffers.mean.rows(0, rows), rstd, eps, stream);
  } else {
    ops->rms_norm(x, norm_weight(head), y, rstd, eps, stream);
  }
  scale(y, 1.0 / config.logits_divisor, stream);
}

void Transformer::Impl::normalize_backward(const WeightsGuard& head, const GradientsGuard& gradients, TensorView x,
                                           TensorView dx, StreamView stream) {
  scale(buffers.dnormed, 1.0 / config.logits_divisor, stream);
  if (config.family == Family::gpt2) {
    ops->layer_norm_backward(buffers.dnormed, x, head["norm.weight"], buffers.mean, buffers.rstd, dx, false,
                             gradients["norm.weight"], gradients["norm.bias"], stream);
  } else {
    ops->rms_norm_backward(buffers.dnormed, x, norm_weight(head), buffers.rstd, dx, false, gradients["norm.weight"],
                           stream);
  }
}

void Transformer::Impl::head_loss(const WeightsGuard& head, const GradientsGuard& gradients, const MicroBatch& batch,
                                  TensorView x, float gradient_scale, StreamView stream) {
  if (shape.reference_in_step) reference_scores(head, batch, stream);
  const TensorView normed = table_last() ? batch.head_input : batch.normed;
  normalize(head, x, normed, stream);
  if (shape.preference_beta > 0.0F) losses(batch, normed, head["lm_head"], shape.preference_beta, stream);
  loss(batch, normed, head["lm_head"], gradient_scale, buffers.dnormed,
       table_last() ? TensorView{} : gradients["lm_head"], stream);
  // Whatever its values were, they have served: from here on it is the gradient that runs backward.
  normalize_backward(head, gradients, x, batch.normed, stream);
}

void Transformer::Impl::loss(const MicroBatch& batch, TensorView x, TensorView weight, float gradient_scale,
                             TensorView dx, TensorView dweight, StreamView stream) {
  HeadLoss head{.x = x,
                .weight = weight,
                .targets = flat(batch.targets),
                .losses = batch.losses,
                .gradient_scale = gradient_scale,
                .dx = dx,
                .dweight = dweight,
                .sequence_factors = batch.factors};
  if (head.writes_weight()) head.rows_at_once = head_rows_at_once(config, shape);
  if (head.writes_weight() && batch.token_rows) {
    head.tokens = flat(batch.tokens);
    head.token_rows = batch.token_rows;
  }
  ops->head_loss(head, stream);
}

void Transformer::Impl::losses(const MicroBatch& batch, TensorView x, TensorView weight, float beta,
                               StreamView stream) {
  ops->head_loss({.x = x,
                  .weight = weight,
                  .targets = flat(batch.targets),
                  .losses = batch.losses,
                  .gradient_scale = 1.0F,
                  .dx = {},
                  .dweight = {}},
                 stream);
  if (beta == 0.0F) return;
  ops->preference_loss({.losses = batch.losses.reshaped({shape.batch, shape.sequence}),
                        .reference = batch.reference,
                        .beta = beta,
                        .sequence_factors = batch.factors,
                        .pairs = batch.pairs},
                       stream);
}

/// A reward with a beta of 1, over a reference of 0, is the log-probability itself.
void Transformer::Impl::reference_scores(const WeightsGuard& head, const MicroBatch& batch, StreamView stream) {
  normalize(head, batch.normed, buffers.dnormed, stream);
  device->fill_zero(batch.reference.data, batch.reference.bytes(), stream);
  losses(batch, buffers.dnormed, head["lm_head"], 1.0F, stream);
  auto *const scores = batch.reference.as<float>(), *const pairs = batch.pairs.as<float>();
  for (std::int64_t i = 0; i < shape.batch; i += 2) {
    device->copy(scores + i, pairs + 3 * (i / 2) + 1, 2 * sizeof(float), CopyKind::device_to_device, stream);
  }
}

void Transformer::Impl::head_step(ParameterAccess& parameters, std::size_t n, float gradient_scale, StreamView stream) {
  const auto last = static_cast<std::size_t>(config.layers);
  WeightsGuard weights = parameters.fetch(head_layer, stream);
  for (std::size_t micro = 0; micro < n; ++micro) {
    GradientsGuard gradients = parameters.gradients(head_layer, stream);
    head_loss(weights, gradients, buffers.micro[micro], inputs->begin_read(last, micro, stream), gradient_scale,
              stream);
    inputs->end_read(last, micro, stream);
    if (micro + 1 == n) weights = {};  // before the commit: the update that this may begin waits for the release
    gradients.commit(stream);
  }
}

void Transformer::Impl::backward_block(ParameterAccess& parameters, std::size_t index, std::size_t n,
                                       StreamView stream) {
  const int layer = static_cast<int>(index) + 1;
  WeightsGuard weights = parameters.fetch(layer, stream);
  for (std::size_t micro = 0; micro < n; ++micro) {
    const TensorView x = inputs->begin_read(index, micro, stream);
    const std::size_t kept = slot(index, micro, n);
    const MicroBatch& batch = buffers.micro[micro];
    const BlockForward again{*ops, stream, weights, layer - 1, batch.records(), x, {}, nullptr, &batch.draw, fp8()};
    if (index < first_kept) {
      buffers.block->forward(again, kept);
    } else if (keeps_selectively(config, shape)) {
      buffers.block->complete(again, kept);
    }
    GradientsGuard gradients = parameters.gradients(layer, stream);
    buffers.block->backward(
        {*ops, stream, weights, gradients, layer - 1, batch.records(), x, batch.normed, batch.draw, fp8()}, kept);
    inputs->end_read(index, micro, stream);
    if (micro + 1 == n) weights = {};  // lets the weights go before the commit, as in head_step
    gradients.commit(stream);
  }
}

/// Needs no weights, which are fetched in forward alone, unless the head's part of the gradient is made here.
void Transformer::Impl::backward_embedding(ParameterAccess& parameters, std::size_t n, float gradient_scale,
                                           StreamView stream) {
  WeightsGuard weights;
  for (std::size_t micro = 0; micro < n; ++micro) {
    const MicroBatch& batch = buffers.micro[micro];
    GradientsGuard gradients = parameters.gradients(0, stream);
    const TensorView tokens = gradients["tokens"];
    const TensorView positions = config.family == Family::gpt2 ? gradients["positions"] : TensorView{};
    if (tokens && table_last()) {
      if (micro == 0) weights = parameters.fetch(0, stream);
      loss(batch, batch.head_input, weights["tokens"], gradient_scale, {}, tokens, stream);
      if (micro + 1 == n) weights = {};  // lets the weights go before the commit, as in head_step
    }
    if (tokens || positions) {
      scale(batch.normed, config.embedding_factor, stream);
      const bool whole = tokens && tokens.dtype == DType::bf16;
      ops->embedding_backward(batch.normed, flat(batch.tokens), {shape.sequence, batch.records()}, tokens, positions,
                              whole ? batch.token_rows : TensorView{}, stream);
    }
    gradients.commit(stream);
  }
}

void Transformer::Impl::backward(ParameterAccess& parameters, std::size_t n, float gradient_scale, StreamView stream) {
  lend(buffers.block_scratch);
  for (auto i = static_cast<std::size_t>(config.layers); i-- > 0;) backward_block(parameters, i, n, stream);
  lend(buffers.ends_scratch);
  backward_embedding(parameters, n, gradient_scale, stream);
}

TensorView Transformer::Impl::decode(ParameterAccess& parameters, std::span<const CachedPart> parts,
                                     StreamView stream) {
  std::vector<PartOfPass> pass = parts_of_pass(shape, buffers.micro.front(), parts);
  inputs->begin_pass(1, /*keep=*/false, stream);
  lend(buffers.ends_scratch);
  {
    const WeightsGuard weights = parameters.fetch(0, stream);
    const TensorView positions = config.family == Family::gpt2 ? weights["positions"] : TensorView{};
    const TensorView out = inputs->begin_write(0, 0, stream), tokens = flat(buffers.micro.front().tokens);
    for (const PartOfPass& part : pass) {
      ops->embedding(part.rows(tokens), weights["tokens"], positions, {part.end - part.first, part.records()},
                     part.rows(out), stream);
      scale(part.rows(out), config.embedding_factor, stream);
    }
    inputs->end_write(0, 0, stream);
  }
  lend(buffers.block_scratch);
  for (std::size_t i = 0; i < static_cast<std::size_t>(config.layers); ++i) {
    const WeightsGuard weights = parameters.fetch(static_cast<int>(i) + 1, stream);
    const TensorView x = inputs->in_forward(i, 0), y = inputs->begin_write(i + 1, 0, stream);
    for (PartOfPass& part : pass) {
      part.call.cache = buffers.caches[i];
      buffers.block->forward(
          {*ops, stream, weights, static_cast<std::int64_t>(i), part.records(), part.rows(x), part.rows(y), &part.call},
          0);
    }
    inputs->end_write(i + 1, 0, stream);
  }
  lend(buffers.ends_scratch);
  decoded_positions += pass.empty() ? 0 : pass.back().end;
  const WeightsGuard head = parameters.fetch(head_layer, stream);
  return decoded_logits(head, pass, stream);
}

TensorView Transformer::Impl::decoded_logits(const WeightsGuard& head, std::span<const PartOfPass> parts,
                                             StreamView stream) {
  const TensorView normed = buffers.micro.front().normed;
  std::int64_t made = 0;
  for (const PartOfPass& part : parts) {
    const std::int64_t first = part.call.decodes ? part.first : part.end - 1, count = part.end - first;
    normalize(head, head_input().rows(first, part.end), normed.rows(made, made + count), stream);
    made += count;
  }
  const TensorView logits = buffers.logits.rows(0, made);
  ops->linear_rows(normed.rows(0, made), head["lm_head"], {}, logits, stream);
  return logits;
}

Transformer::Transformer(ModelConfig config, RunShape shape) {
  check(config, shape);
  impl_ = std::make_unique<Impl>(std::move(config), shape);
}

Transformer::~Transformer() = default;

const ModelConfig& Transformer::config() const noexcept { return impl_->config; }
const RunShape& Transformer::shape() const noexcept { return impl_->shape; }

std::vector<ActivationEntry> Transformer::memory(const OpsRules& ops) const {
  ActivationRows rows;
  take_activations(impl_->config, impl_->shape, needs_of(impl_->config, impl_->shape, ops), rows);
  const std::vector<ActivationEntry> all = {{"batch", rows.batch.bytes()},
                                            {"activations, kept", rows.kept.bytes()},
                                            {"activations, offloaded", rows.offloaded_bytes, Place::pinned},
                                            {"workspace", rows.workspace.bytes()},
                                            {"tables", rows.tables.bytes()},
                                            {"activations, keys and values", rows.cache.bytes()},
                                            {"reference adapters", rows.reference.bytes()}};
  std::vector<ActivationEntry> entries;
  std::ranges::copy_if(all, std::back_inserter(entries), [](const ActivationEntry& e) { return e.bytes > 0; });
  return entries;
}

void Transformer::bind(Device& device, Arena& arena, StreamView stream) {
  Impl& m = *impl_;
  const std::vector<ActivationEntry> entries = memory(device.ops());
  const auto place = [&](std::string_view row) {
    const auto found = std::ranges::find(entries, row, &ActivationEntry::name);
    return Carver(found == entries.end() ? nullptr : arena.carve(found->bytes, row));
  };
  ActivationRows rows{place("batch"),
                      place("activations, kept"),
                      place("workspace"),
                      place("tables"),
                      place("activations, keys and values"),
                      place("reference adapters")};
  m.buffers = take_activations(m.config, m.shape, needs_of(m.config, m.shape, device.ops()), rows);
  m.inputs.emplace(device, m.buffers.inputs, static_cast<std::size_t>(m.config.layers),
                   static_cast<std::size_t>(m.shape.micro_batches));
  m.device = &device;
  m.ops = &device.ops();
  m.buffers.block->write_tables(device, stream);
}

void Transformer::compute_with(Ops& ops) {
  if (impl_->ops == nullptr) throw MisuseError("transformer used before bind");
  impl_->ops = &ops;
}

void Transformer::unbind() noexcept {
  impl_->inputs.reset();
  impl_->device = nullptr;
  impl_->ops = nullptr;
}

InputTraffic Transformer::input_traffic() const noexcept {
  return impl_->inputs ? impl_->inputs->traffic() : InputTraffic{};
}

TensorView Transformer::tokens(std::int64_t micro) const { return impl_->micro_batch(micro).tokens; }
TensorView Transformer::targets(std::int64_t micro) const { return impl_->micro_batch(micro).targets; }
TensorView Transformer::record_first(std::int64_t micro) const { return impl_->micro_batch(micro).record_first; }
TensorView Transformer::record_end(std::int64_t micro) const { return impl_->micro_batch(micro).record_end; }
void Transformer::set_draw(std::int64_t micro, std::uint64_t draw) {
  impl_->micro_batch(micro);
  impl_->buffers.micro[static_cast<std::size_t>(micro)].draw = draw;
}
TensorView Transformer::cache_first() const { return impl_->micro_batch(0).record_first; }
TensorView Transformer::cache_rows() const { return impl_->micro_batch(0).cache_rows; }
TensorView Transformer::losses(std::int64_t micro) const { return impl_->micro_batch(micro).losses; }
TensorView Transformer::reference(std::int64_t micro) const { return impl_->micro_batch(micro).reference; }
const ReferenceAdapters* Transformer::reference_adapters() const noexcept {
  return impl_->buffers.reference ? &*impl_->buffers.reference : nullptr;
}
TensorView Transformer::pairs(std::int64_t micro) const { return impl_->micro_batch(micro).pairs; }

void Transformer::train(ParameterAccess& parameters, float gradient_scale, StreamView stream, std::int64_t n) {
  impl_->check_ready(/*needs_training=*/true);
  if (n < 1 || n > impl_->shape.micro_batches) {
    throw MisuseError(fmt::format("{} micro-batches at once", n),
                      fmt::format("the shape has room for {}", impl_->shape.micro_batches));
  }
  const auto count = static_cast<std::size_t>(n);
  impl_->forward(parameters, count, /*keep=*/true, stream);
  impl_->head_step(parameters, count, gradient_scale, stream);
  impl_->backward(parameters, count, gradient_scale, stream);
}

void Transformer::evaluate(ParameterAccess& parameters, StreamView stream) {
  Impl& m = *impl_;
  m.check_ready(/*needs_training=*/false);
  m.forward(parameters, 1, /*keep=*/false, stream);
  const MicroBatch& batch = m.buffers.micro.front();
  const WeightsGuard weights = parameters.fetch(m.head_layer, stream);
  m.normalize(weights, m.head_input(), batch.normed, stream);
  m.losses(batch, batch.normed, weights["lm_head"], m.shape.preference_beta, stream);
}

TensorView Transformer::decode(ParameterAccess& parameters, std::span<const CachedPart> parts, StreamView stream) {
  impl_->check_ready(/*needs_training=*/false);
  if (impl_->shape.cached == 0) throw MisuseError("transformer of a shape without a cache asked to decode");
  return impl_->decode(parameters, parts, stream);
}

std::int64_t Transformer::decoded_positions() const noexcept { return impl_->decoded_positions; }

TensorView Transformer::logits(ParameterAccess& parameters, std::int64_t position, StreamView stream) {
  Impl& m = *impl_;
  m.check_ready(/*needs_training=*/false);
  if (position < 0 || position >= m.shape.sequence) {
    throw MisuseError(fmt::format("logits of position {}", position),
                      fmt::format("sequences have {}", m.shape.sequence));
  }
  m.forward(parameters, 1, /*keep=*/false, stream);
  const WeightsGuard weights = parameters.fetch(m.head_layer, stream);
  const TensorView row = m.buffers.micro.front().normed.rows(0, 1);
  m.normalize(weights, m.head_input().rows(position, position + 1), row, stream);
  m.ops->linear(row, weights["lm_head"], {}, m.buffers.logits, stream);
  return m.buffers.logits.reshaped({m.config.vocabulary});
}

}  // namespace tandem
