#pragma once
// Gradients that a step's caller has asked for and committed, by layer and micro-batch.
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/tasks/lowering_state.hpp"

namespace tandem {

/// Micro-batches and gradients of a step, as its caller begins it.
struct StepExtent {
  int micro_batches = 1;
  bool open_ended = false;     ///< so many at most: the step ends with those that have begun
  bool may_be_absent = false;  ///< layers need not commit gradients in every micro-batch
};

class StepCommits {
 public:
  /// The state must outlive it.
  explicit StepCommits(const LoweringState& state);

  void begin_step(const StepExtent& extent);
  /// The step has so many micro-batches fewer than it began with.
  void leave_out(int micro_batches) noexcept { micro_batches_ -= micro_batches; }
  /// Whether gradients were asked for in the micro-batches that pass at present.
  bool begun() const noexcept;
  /// Throws MisuseError where the present micro-batch may not be over, or is the last.
  void require_next_micro_batch() const;
  void begin_next_micro_batch();
  /// No micro-batch follows the present one.
  void close() noexcept { micro_batches_ = micro_end_; }
  /// No gradient follows.
  void end() noexcept;
  /// Goes on to the next pass where all gradients of the present one are sent, and it is not the last. Returns whether
  /// it did.
  bool next_pass();
  /// Why the step is not complete, in words; empty: it is.
  std::string missing() const;

  int micro_batches() const noexcept { return micro_batches_; }
  bool is_last(int micro) const noexcept { return micro == micro_batches_ - 1; }

  /// Micro-batch of the gradients that the caller asks for next in a layer.
  int next_micro_batch(LayerIndex layer) const { return of(layer).asked / of(layer).uses; }
  /// Throws MisuseError where the caller may not ask for gradients of a layer now: its micro-batches come one after
  /// another, so that their sum has one order.
  void require_next(LayerIndex layer) const;
  void ask(LayerIndex layer);
  void commit(LayerIndex layer) { ++of(layer).committed; }

  /// Commits that make a layer's gradient of a micro-batch: its own and its borrowers'.
  int contributions(LayerIndex layer) const { return of(layer).contributions; }
  /// Counts a gradient of one micro-batch, which is on its way to the layer's final one. Returns whether it is the
  /// first.
  bool send(LayerIndex layer) { return of(layer).sent++ == 0; }
  /// Counts one that was complete, not cut short by the end of its micro-batch.
  void count_gradient() noexcept { --gradients_left_; }
  int sent(LayerIndex layer) const { return of(layer).sent; }
  void set_final(LayerIndex layer) { of(layer).is_final = true; }
  /// Whether a layer's final gradient is there, or will be when the tasks emitted so far are done.
  bool is_final(LayerIndex layer) const { return of(layer).is_final; }

 private:
  struct LayerCommits {
    int uses = 1;           ///< uses of the layer in each micro-batch
    int asked = 0;          ///< uses for which the caller has asked for gradients
    int committed = 0;      ///< uses in which it has committed them
    int contributions = 0;  ///< result of contributions()
    int sent = 0;           ///< gradients of the step that are on their way to the final one
    bool is_final = false;  ///< result of is_final()
  };

  LayerCommits& of(LayerIndex layer) { return layers_[layer]; }
  const LayerCommits& of(LayerIndex layer) const { return layers_[layer]; }
  void open_micro_batches(int first);
  std::string missing_in_pass() const;

  const LoweringState& state_;
  IndexedVector<LayerIndex, LayerCommits> layers_;
  StepExtent extent_;
  int micro_batches_ = 1;     ///< micro-batches of the step, at most where it is open-ended
  int micro_begin_ = 0;       ///< first of the micro-batches that pass through the layers at present
  int micro_end_ = 1;         ///< end of them
  LayerIndex layer_at_work_;  ///< layer whose gradients were asked for last
  int layers_to_commit_ = 0;
  int gradients_left_ = 0;  ///< gradients that are not complete, of all layers in these micro-batches
};

}  // namespace tandem
