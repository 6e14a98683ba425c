#pragma once
// A run's memory, taken: engine, activations and batches. Forwards and micro-batches run here.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/trace.hpp"
#include "data/token_source.hpp"
#include "offload/engine/engine.hpp"
#include "train/runtime/pair_sums.hpp"
#include "train/setup/host_batch.hpp"
#include "train/setup/run_setup.hpp"

namespace tandem {

struct EvalResult {
  double loss = 0.0;  ///< mean over predicted tokens
  std::int64_t tokens = 0;
  std::int64_t windows = 0;
  std::optional<PairMetrics> pairs{};  ///< figures of preferences, where the loss is the mean over pairs
};

/// A batch of windows that has been evaluated.
struct EvaluatedBatch {
  std::int64_t first = 0, windows = 0;  ///< the first of its windows, and how many
  std::int64_t targets = 0;
  HostBatch values;  ///< values of its windows; further sequences are empty, with losses of zero
};

/// Tokens of a sequence that follow the first `position` ones, which lie in a row of the cache.
struct CachedStep {
  std::int64_t row = 0;
  std::int64_t position = 0;
  std::span<const std::int32_t> tokens;
};

/// One thread drives it. `setup` and `trace` (may be null) must outlive it.
class LoadedModel {
 public:
  /// Takes all memory of the plan. Blocks. Throws PlanError, DeviceError. `group`: as OffloadEngine has it; with it
  /// every rank trains and evaluates alike.
  LoadedModel(RunSetup& setup, Trace* trace, Group* group = nullptr);
  ~LoadedModel();
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;

  OffloadEngine& engine() noexcept { return *engine_; }
  Device& device() noexcept { return *setup_.device; }
  StreamView stream() const noexcept { return stream_; }
  HostBatch batch(std::size_t slot) const;

  /// Writes the adapters of the reference, of a shape that has them, as weights of the values that `read` gives of the
  /// parameters whose copies they are. Blocks.
  void set_reference_adapters(const std::function<void(const Parameter&, std::span<float>)>& read);

  /// Number of micro-batch `slot` of the next train() among all that the run trains, by which dropout draws.
  void set_draw(std::int64_t slot, std::uint64_t draw) { setup_.model->set_draw(slot, draw); }
  /// Queues `n` micro-batches that pass through each layer at once, at most as many as the model's shape has: tokens
  /// up, forward and backward through `parameters`, losses down into slots `first` ... `first` + n - 1. Asynchronous:
  /// the slots are the device's until `wait_for_losses`.
  void train(std::size_t first, std::size_t n, ParameterAccess& parameters, float gradient_scale);
  /// Blocks until everything queued so far on the stream is done. Throws what failed it, StalledError where nothing
  /// moves for OffloadOptions::watchdog_seconds.
  void wait_for_losses();

  /// Mean loss over all windows in order, of a shape without preferences. Blocks, and throws as `wait_for_losses` does.
  /// Not inside a step. `stop`, which may be empty, is asked before each micro-batch; where it says so there is no
  /// result.
  std::optional<EvalResult> evaluate(const TokenSource& source, const std::function<bool()>& stop = {});
  /// Evaluates windows [first, end), at most as many as a micro-batch has, in slot 0. Inside an evaluation of the
  /// engine. `reference`: log-probabilities of all windows under the reference, of a shape of preferences, or empty.
  /// Blocks, and throws as `wait_for_losses` does.
  EvaluatedBatch evaluate_batch(const TokenSource& source, std::int64_t first, std::int64_t end,
                                std::span<const float> reference = {});
  /// Logits (V) of position `position` after `tokens`, at most the sequence. Blocks, and throws as `wait_for_losses`
  /// does.
  void logits(std::span<const std::int32_t> tokens, std::int64_t position, std::span<float> values);
  /// Puts tokens of a cached shape through the model, behind what the cache has of their sequences, and logits (V)
  /// after the last token of each step into `values`, step by step. `decodes`: the steps are of one token each, whose
  /// bits depend on their own sequences alone; else each step is computed on its own. At most as many steps as the
  /// cache has rows, of at most the shape's sequence. Blocks, and throws as `wait_for_losses` does.
  void decode(std::span<const CachedStep> steps, bool decodes, std::span<float> values);

 private:
  void clear(const HostBatch& batch) const;
  void upload(const HostBatch& batch, std::int64_t micro = 0);
  std::vector<CachedPart> upload_steps(std::span<const CachedStep> steps, bool decodes);
  void download_logits(const TensorView& logits, std::span<float> values);
  void download_losses(const HostBatch& batch, std::int64_t micro = 0);
  void wait(std::string_view what);

  RunSetup& setup_;
  Stream stream_;
  MemoryBlock activations_;
  MemoryBlock batches_;
  std::unique_ptr<OffloadEngine> engine_;
};

}  // namespace tandem
