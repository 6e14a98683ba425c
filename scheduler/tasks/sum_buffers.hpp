#pragma once
// Buffers on the device in which the gradients of a step's micro-batches add up before they leave it.
#include <cstdint>
#include <vector>

#include "scheduler/tasks/lowering_state.hpp"

namespace tandem {

/// Each holds the sum of one layer's gradients, from its first micro-batch to its last.
class SumBuffers {
 public:
  /// The state must outlive it.
  explicit SumBuffers(LoweringState& state);

  /// Emits the addition of a piece to its layer's sum, in the buffer that it sets in the piece. The last micro-batch's
  /// leaves the sum, rounded, in staging. Throws MisuseError where no buffer is free.
  TaskId add(Task& piece, TaskList& out);
  /// The sum of a layer is complete.
  void release(LayerIndex layer) noexcept;
  void release_all() noexcept;
  void forget_before(TaskId id);
  int count() const noexcept { return static_cast<int>(buffers_.size()); }

 private:
  struct Buffer {
    int size_class = 0;
    LayerIndex layer;             ///< none: free
    std::vector<RangeUse> users;  ///< the last of each range, by range
  };
  using Users = std::vector<RangeUse>;

  int buffer_of(LayerIndex layer);
  static void replace(Users& users, Users::iterator first, Users::iterator last, const RangeUse& use);

  LoweringState& state_;
  std::vector<Buffer> buffers_;
};

}  // namespace tandem
