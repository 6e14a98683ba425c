#include "train/runtime/loaded_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/base/error.hpp"
#include "core/device/watched_wait.hpp"
#include "core/numerics/bf16.hpp"
#include "data/window_sampler.hpp"
#include "models/transformer/reference_adapters.hpp"

namespace tandem {
namespace {

/// Number that changes with each of the engine's tasks, those that the model fetches and releases layers by included.
std::uint64_t progress_of(const OffloadEngine& engine) {
  const LaneSeconds busy = engine.counters().busy;
  return std::bit_cast<std::uint64_t>(busy.compute + busy.host_to_device + busy.device_to_host + busy.device_update +
                                      busy.cpu + busy.file_read + busy.file_write + busy.peers);
}

}  // namespace

LoadedModel::LoadedModel(RunSetup& setup, Trace* trace, Group* group) : setup_(setup) {
  Device& device = *setup.device;
  stream_ = device.make_stream("compute");
  activations_ = device.allocate(setup.activation_bytes, "activations and workspace");
  batches_ = device.allocate_pinned(host_batch_bytes(setup.model->shape(), setup.batch_slots), "batches");
  Arena arena(activations_.data(), activations_.bytes(), "activations and workspace");
  setup.model->bind(device, arena, stream_);
  engine_ = std::make_unique<OffloadEngine>(device, setup.layout, setup.options, setup.plan, trace, group);
  setup.memory.unpin(device.pageable_bytes());
}

LoadedModel::~LoadedModel() {
  try {
    setup_.device->synchronize(stream_);  // a step that was given up may have left copies of losses behind
  } catch (...) {                         // it is what has ended the run
  }
  setup_.model->unbind();
}

HostBatch LoadedModel::batch(std::size_t slot) const {
  return host_batch_in(batches_.data(), setup_.model->shape(), slot);
}

/// Fills a batch with rows of no targets, each one record.
void LoadedModel::clear(const HostBatch& batch) const {
  std::ranges::fill(batch.tokens, 0);
  std::ranges::fill(batch.targets, -1);
  std::ranges::fill(batch.record_first, 0);
  std::ranges::fill(batch.record_end, static_cast<std::int32_t>(setup_.model->shape().sequence));
  std::ranges::fill(batch.reference, 0.0F);
}

void LoadedModel::set_reference_adapters(const std::function<void(const Parameter&, std::span<float>)>& read) {
  for (const auto& block : setup_.model->reference_adapters()->blocks()) {
    for (const ReferenceAdapters::Matrix& matrix : block) {
      std::vector<float> values(static_cast<std::size_t>(matrix.values.count()));
      read(setup_.layout.parameter(matrix.full_name), values);
      std::vector<bf16> weights(values.size());
      std::ranges::transform(values, weights.begin(), numerics::weight_of_master);
      setup_.device->copy(matrix.values.data, weights.data(), matrix.values.bytes(), CopyKind::host_to_device, stream_);
      setup_.device->synchronize(stream_);  // `weights` goes
    }
  }
}

void LoadedModel::upload(const HostBatch& batch, std::int64_t micro) {
  const auto up = [&](const TensorView& view, const auto& values) {
    setup_.device->copy(view.data, values.data(), values.size_bytes(), CopyKind::host_to_device, stream_);
  };
  up(setup_.model->tokens(micro), batch.tokens);
  up(setup_.model->targets(micro), batch.targets);
  if (!batch.reference.empty()) up(setup_.model->reference(micro), batch.reference);
  if (batch.record_first.empty()) return;
  up(setup_.model->record_first(micro), batch.record_first);
  up(setup_.model->record_end(micro), batch.record_end);
}

void LoadedModel::download_losses(const HostBatch& batch, std::int64_t micro) {
  const auto down = [&](std::span<float> values, const TensorView& view) {
    setup_.device->copy(values.data(), view.data, values.size_bytes(), CopyKind::device_to_host, stream_);
  };
  down(batch.losses, setup_.model->losses(micro));
  if (!batch.pairs.empty()) down(batch.pairs, setup_.model->pairs(micro));
}

void LoadedModel::train(std::size_t first, std::size_t n, ParameterAccess& parameters, float gradient_scale) {
  for (std::size_t i = 0; i < n; ++i) upload(batch(first + i), static_cast<std::int64_t>(i));
  setup_.model->train(parameters, gradient_scale, stream_, static_cast<std::int64_t>(n));
  for (std::size_t i = 0; i < n; ++i) download_losses(batch(first + i), static_cast<std::int64_t>(i));
}

void LoadedModel::wait_for_losses() { wait("losses"); }

void LoadedModel::wait(std::string_view what) {
  const auto made = [this] { return progress_of(*engine_); };
  wait_or_give_up(*setup_.device, stream_, {what, setup_.options.watchdog_seconds, made});
}

std::optional<EvalResult> LoadedModel::evaluate(const TokenSource& source, const std::function<bool()>& stop) {
  const RunShape& shape = setup_.model->shape();
  const std::int64_t windows = require_windows(source, shape.sequence);
  const auto losses = batch(0).losses;
  const auto scope = engine_->evaluation();
  double sum = 0.0;
  std::int64_t tokens = 0;
  for (std::int64_t first = 0; first < windows; first += shape.batch) {
    if (stop && stop()) return std::nullopt;
    tokens += evaluate_batch(source, first, windows).targets;
    sum = std::accumulate(losses.begin(), losses.end(), sum);
  }
  return EvalResult{sum / static_cast<double>(tokens), tokens, windows};
}

EvaluatedBatch LoadedModel::evaluate_batch(const TokenSource& source, std::int64_t first, std::int64_t end,
                                           std::span<const float> reference) {
  const RunShape& shape = setup_.model->shape();
  const auto length = static_cast<std::size_t>(shape.sequence);
  const HostBatch host = batch(0);
  clear(host);
  EvaluatedBatch result{
      .first = first, .windows = std::clamp<std::int64_t>(end - first, 0, shape.batch), .values = host};
  for (std::int64_t i = 0; i < result.windows; ++i) {
    result.targets += read_window(source, first + i, host.window(static_cast<std::size_t>(i), length));
    if (!reference.empty()) {
      host.reference[static_cast<std::size_t>(i)] = reference[static_cast<std::size_t>(first + i)];
    }
  }
  upload(host);
  setup_.model->evaluate(*engine_, stream_);
  download_losses(host);
  wait_for_losses();
  return result;
}

void LoadedModel::logits(std::span<const std::int32_t> tokens, std::int64_t position, std::span<float> values) {
  const HostBatch host = batch(0);
  if (tokens.size() > host.tokens.size()) throw MisuseError("prompt longer than the model's sequence");
  clear(host);
  std::copy(tokens.begin(), tokens.end(), host.tokens.begin());
  const auto scope = engine_->evaluation();
  upload(host);
  download_logits(setup_.model->logits(*engine_, position, stream_), values);
}

void LoadedModel::download_logits(const TensorView& logits, std::span<float> values) {
  if (logits.bytes() != values.size_bytes()) throw MisuseError("logits into room of another size");
  wait("logits");  // before the device knows of memory that goes with an exception
  setup_.device->copy(values.data(), logits.data, values.size_bytes(), CopyKind::device_to_host, stream_);
  wait_to_the_end(*setup_.device, stream_, {"logits", setup_.options.watchdog_seconds});
}

std::vector<CachedPart> LoadedModel::upload_steps(std::span<const CachedStep> steps, bool decodes) {
  const RunShape& shape = setup_.model->shape();
  const HostBatch host = batch(0);
  std::vector<CachedPart> parts;
  std::size_t at = 0;
  for (const CachedStep& step : steps) {
    const auto count = static_cast<std::int64_t>(step.tokens.size());
    if (step.row < 0 || step.row >= shape.batch || step.position < 0 || count > shape.cached - step.position ||
        at + step.tokens.size() > host.tokens.size() || (decodes && count != 1)) {
      throw MisuseError("tokens that the cache has no room for");
    }
    const std::int64_t before = decodes ? static_cast<std::int64_t>(at) : 0;
    std::ranges::copy(step.tokens, host.tokens.begin() + static_cast<std::ptrdiff_t>(at));
    for (std::size_t i = at; i < at + step.tokens.size(); ++i) {
      host.cache_first[i] = static_cast<std::int32_t>(before - step.position);
      host.cache_rows[i] = static_cast<std::int32_t>(step.row);
    }
    at += step.tokens.size();
    parts.push_back({count, false});
  }
  const auto up = [&](const TensorView& to, std::span<const std::int32_t> from) {
    setup_.device->copy(to.data, from.data(), at * sizeof(std::int32_t), CopyKind::host_to_device, stream_);
  };
  up(setup_.model->tokens(), host.tokens);
  up(setup_.model->cache_first(), host.cache_first);
  up(setup_.model->cache_rows(), host.cache_rows);
  if (decodes) parts = {{static_cast<std::int64_t>(steps.size()), true}};
  return parts;
}

void LoadedModel::decode(std::span<const CachedStep> steps, bool decodes, std::span<float> values) {
  if (steps.empty()) return;
  const auto scope = engine_->evaluation();
  const std::vector<CachedPart> parts = upload_steps(steps, decodes);
  download_logits(setup_.model->decode(*engine_, parts, stream_), values);
}

}  // namespace tandem
