#pragma once
// The input of each block and of the head, (N, C) each, from forward to backward: on the device while there
// are buffers for all of them, else in a ring of a few, with copies to the host and back beside the mathematics.
#include <cstddef>
#include <vector>

#include "core/device.hpp"
#include "core/tensor.hpp"

namespace tandem {

/// Serves one pass at a time; all calls of a pass name the same stream and do not block. Input 0 is the
/// embedding's output, input `layers` the head's.
class InputStore {
 public:
  /// Buffers of a ring: one being read, one being written or fetched, one on its way out.
  static constexpr std::size_t ring = 3;

  /// `slots`: device memory that outlives it, at least two. `device` must outlive it. Where there are fewer slots
  /// than inputs, takes pinned memory for those that do not stay. Throws DeviceError.
  InputStore(Device& device, std::vector<TensorView> slots, std::size_t layers);
  InputStore(const InputStore&) = delete;
  InputStore& operator=(const InputStore&) = delete;
  /// Bytes of pinned memory that the constructor takes.
  static std::size_t host_bytes(std::size_t slots, std::size_t layers, std::size_t input_bytes) noexcept;

  /// `keep`: a backward will read the inputs again. Waits (on `stream`) for what an abandoned pass left under way.
  void begin_pass(bool keep, StreamView stream);
  /// Where input `i` is to be written, once `stream` may.
  TensorView begin_write(std::size_t i, StreamView stream);
  /// `stream` has written it.
  void end_write(std::size_t i, StreamView stream);
  /// Where forward finds input `i`, right after it was written.
  TensorView in_forward(std::size_t i) const { return slots_[slot(i)]; }
  /// Where backward finds it, from the last to the first, once `stream` may read.
  TensorView begin_read(std::size_t i, StreamView stream);
  /// Backward is done with input `i` on `stream`.
  void end_read(std::size_t i, StreamView stream);

 private:
  /// One that later inputs of the pass overwrite.
  bool leaves(std::size_t i) const noexcept { return keep_ && i + slots_.size() <= layers_; }
  std::size_t slot(std::size_t i) const noexcept { return i % (keep_ ? slots_.size() : 2); }
  void* host(std::size_t i) const noexcept;
  void fetch(std::size_t i, StreamView after);

  Device& device_;
  std::vector<TensorView> slots_;
  std::size_t layers_ = 0;
  bool keep_ = false;
  std::size_t stride_ = 0;       ///< bytes between inputs on the host
  MemoryBlock host_;
  std::vector<Event> copied_;    ///< a slot's content has left
  std::vector<Event> fetched_;   ///< has come back
  Event passed_;                 ///< the pass's stream has written or read
  Stream out_;  // streams go first: what they use is still there
  Stream in_;
};

}  // namespace tandem
