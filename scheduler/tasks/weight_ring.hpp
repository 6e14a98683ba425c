#pragma once
// Weights on the device: which layer lies in which buffer, what is fetched into it, and who reads it.
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/tasks/layer_use.hpp"
#include "scheduler/tasks/lowering_state.hpp"

namespace tandem {

/// Weight buffers and resident layers, as the caller passes through the layers. Part of a `Lowering`, whose members of
/// the same names say what these do.
class WeightRing {
 public:
  /// The state must outlive it.
  explicit WeightRing(LoweringState& state);

  /// Pass that the caller is in; it decides in which order layers come next.
  enum class Direction : std::uint8_t { none, forward, backward, evaluation };
  void begin_step();
  void enter(Direction direction) noexcept;
  /// The caller asks for gradients of a layer: it goes backward.
  void enter_backward(LayerIndex layer) noexcept;

  LayerUse use(LayerIndex layer, TaskList& out);
  LayerUse use_resident(LayerIndex layer, TaskList& out);
  void release(const LayerUse& use);
  std::vector<WeightPlace> drop_idle(const LayerUse& use);
  void prefetch(TaskList& out);

  // An update of a layer's weights: it begins, its tasks wait for readers and are added, it ends.
  void begin_update(LayerIndex layer) { layers_[layer].weight_writers.clear(); }
  /// Readers since the last update: uses where resident, else fetches.
  const std::vector<TaskId>& readers(LayerIndex layer) const { return layers_[layer].uses; }
  /// A task that writes what fetches or uses read from now on.
  void add_writer(LayerIndex layer, TaskId task) { layers_[layer].weight_writers.push_back(task); }
  /// Emits the encoding of new weights that cross the link in codes.
  void end_update(LayerIndex layer, TaskList& out);

  void invalidate_weights();
  void forget_before(TaskId id);
  int buffer_count() const noexcept { return static_cast<int>(buffers_.size()); }

 private:
  struct Buffer {
    int size_class = 0;
    LayerIndex layer;  ///< layer that it holds; none: nothing valid
    int holders = 0;   ///< uses not yet released
    TaskId filled_by = no_task;
    std::vector<TaskId> users;  ///< to wait for before it is overwritten
  };
  struct LayerWeights {
    int buffer = -1;                   ///< buffer that holds valid weights; -1: none
    bool gradients_asked = false;      ///< gradients were asked for in the present step
    bool used_in_backward = false;     ///< used in backward of the present step
    bool needed_in_backward = true;    ///< false: its gradients came without its weights in the last step that had any
    std::vector<LayerIndex> touchers;  ///< layers whose use needs this layer's weights
    std::vector<TaskId> weight_writers;  ///< writers of the weights that fetches or uses read
    bool codes_stale = true;             ///< its codes on the host are none, or those of other weights
    TaskId encoded_by = no_task;         ///< task that made its codes
    bool stale = false;                  ///< resident, and other ranks have newer weights of their slices than this one
    std::vector<TaskId> stale_readers;   ///< readers of the slices that other ranks' newer weights will overwrite
    std::vector<TaskId> uses;            ///< readers since the last update: uses where resident, else fetches
  };

  LayerWeights& weights_of(LayerIndex layer) { return layers_[layer]; }
  LayerIndex last_layer() const noexcept { return state_.last_layer(); }
  bool is_layer(LayerIndex layer) const noexcept { return has_layer(state_.layout, layer); }
  int acquire(LayerIndex layer, bool only_idle, TaskList& out);
  std::string held_layers(int size_class) const;
  void load(LayerIndex layer, int buffer, TaskList& out);
  TaskId fetch(LayerIndex layer, int buffer, TaskList& out);
  TaskId decode(LayerIndex layer, int buffer, int code_buffer, TaskId fetched, TaskList& out);
  void encode(LayerIndex layer, int priority, TaskList& out);
  TaskId gather(LayerIndex layer, int buffer, TaskList& out);
  void gather_resident(LayerIndex layer, TaskList& out);
  void prefetch_resident(TaskList& out);
  void hold_valid(const std::vector<LayerIndex>& layers, int by);
  WeightPlace place_for_use(LayerIndex layer, TaskList& out);
  TaskId emit_use(LayerIndex layer, const Places<WeightPlace>& weights, TaskList& out);
  int distance_to(LayerIndex layer) const noexcept;
  int steps_until(LayerIndex layer) const noexcept;

  LoweringState& state_;
  std::vector<Buffer> buffers_;
  IndexedVector<LayerIndex, LayerWeights> layers_;
  BufferCycle code_buffers_;  ///< on the device, for codes that are to be decoded
  Direction direction_ = Direction::none;
  LayerIndex position_;         ///< layer used last; none: the caller is before the first
  int open_uses_ = 0;           ///< not yet released
  std::vector<TaskId> before_;  ///< dependencies of the next use, while it is emitted
};

}  // namespace tandem
