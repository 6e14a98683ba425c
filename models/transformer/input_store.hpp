#pragma once
// The inputs of each block and of the head, (N, C) each and one for each micro-batch, from forward to backward: on
// the device while there are buffers for all of them, else in a ring of a few, with copies to the host and back beside
// the mathematics.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device/device.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem {

/// Bytes of inputs that crossed the link.
struct InputTraffic {
  std::uint64_t to_host = 0;
  std::uint64_t to_device = 0;
};

/// Serves one pass at a time; all calls of a pass name the same stream and do not block. Input 0 of a micro-batch is
/// the embedding's output, input `layers` the head's. Forward writes and reads layer by layer, all micro-batches of
/// each in order; backward reads from the last layer to the first, again all micro-batches of each in order.
class InputStore {
 public:
  /// Buffers of a ring for `micro_batches` at once: theirs in the layer at work, one being written or fetched, one on
  /// its way out.
  static constexpr std::size_t ring(std::size_t micro_batches) noexcept { return micro_batches + 2; }

  /// `slots`: device memory that outlives it: one for each input, or a ring for `micro_batches`, the most of any pass,
  /// or two, for passes that keep nothing. `device` must outlive it. A ring takes pinned memory for the inputs that do
  /// not stay. Throws DeviceError.
  InputStore(Device& device, std::vector<TensorView> slots, std::size_t layers, std::size_t micro_batches);
  InputStore(const InputStore&) = delete;
  InputStore& operator=(const InputStore&) = delete;
  /// Bytes of pinned memory that the constructor takes for so many inputs.
  static std::size_t host_bytes(std::size_t slots, std::size_t inputs, std::size_t input_bytes) noexcept;

  /// `keep`: a backward will read the inputs again; else one micro-batch alone. Waits (on `stream`) for what an
  /// abandoned pass left under way.
  void begin_pass(std::size_t micro_batches, bool keep, StreamView stream);
  /// Place in which input `i` of a micro-batch is to be written, once `stream` may.
  TensorView begin_write(std::size_t i, std::size_t micro, StreamView stream);
  /// `stream` has written it.
  void end_write(std::size_t i, std::size_t micro, StreamView stream);
  /// Input in forward, before it writes the micro-batch's next but one.
  TensorView in_forward(std::size_t i, std::size_t micro) const { return slots_[slot(number(i, micro))]; }
  /// Input in backward, once `stream` may read.
  TensorView begin_read(std::size_t i, std::size_t micro, StreamView stream);
  /// Backward is done with it on `stream`.
  void end_read(std::size_t i, std::size_t micro, StreamView stream);

  /// Queued so far.
  const InputTraffic& traffic() const noexcept { return traffic_; }

 private:
  /// Inputs are numbered as forward writes them.
  std::size_t number(std::size_t i, std::size_t micro) const noexcept { return i * micro_batches_ + micro; }
  std::size_t count() const noexcept { return (layers_ + 1) * micro_batches_; }
  /// One that later inputs of the pass overwrite.
  bool leaves(std::size_t n) const noexcept { return keep_ && n + slots_.size() < count(); }
  /// Slot that forward fills, and in which an input that did not leave lies in backward.
  std::size_t slot(std::size_t n) const noexcept { return n % (keep_ ? slots_.size() : 2); }
  void* host(std::size_t n) const noexcept;
  void fetch_next(std::size_t slot, StreamView after);

  Device& device_;
  std::vector<TensorView> slots_;
  std::size_t layers_ = 0;
  std::size_t micro_batches_ = 1;  ///< micro-batches of the pass
  bool keep_ = false;
  std::size_t next_read_ = 0;            ///< first read of backward that has not been looked after
  std::vector<std::size_t> fetched_to_;  ///< slot of each input that left, by number
  InputTraffic traffic_;
  std::size_t stride_ = 0;  ///< bytes between inputs on the host
  MemoryBlock host_;
  std::vector<Event> copied_;   ///< a slot's content has left
  std::vector<Event> fetched_;  ///< has come back
  Event passed_;                ///< the pass's stream has written or read
  Stream out_;                  // streams go first: what they use is still there
  Stream in_;
};

}  // namespace tandem
