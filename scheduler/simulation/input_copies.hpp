#pragma once
// The inputs of layers may wait on the host from forward to backward, and the caller then copies them there and back.
// In which order these copies go, and which work waits for them: for the simulator.
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace tandem {

/// One step's. The inputs of a pass lie in a ring of buffers. Forward sends each to the host, and waits before it
/// writes into a buffer that has not been sent; the last ones stay. Backward brings the next one back into each buffer
/// that it is done with. Work is named here in the order in which it is queued, and may run later.
class InputCopies {
 public:
  /// Buffers of the ring beside those of the layer at work: one being written or fetched, one on its way out.
  static constexpr std::size_t buffers_ahead = 2;
  enum class Way : std::uint8_t { to_host, to_device };
  static constexpr std::array ways{Way::to_host, Way::to_device};

  /// Copies that a piece of work on the caller's stream waits for before it runs, and copies that it starts once it has
  /// run.
  struct Part {
    std::array<std::int64_t, ways.size()> waits_for{};  ///< each way: until so many of the step's copies are done
    std::array<double, ways.size()> starts{};           ///< each way: a copy of so many inputs; 0: none
  };

  /// `inputs`: of a micro-batch. `at_once`: the most micro-batches of any pass.
  InputCopies(std::size_t inputs, std::size_t at_once) : inputs_(inputs), slots_(at_once + buffers_ahead) {}

  void begin_pass(std::size_t micro_batches);
  /// Work of forward that writes the next input, which stands for `stands_for` of them where micro-batches are in
  /// coarse pieces.
  Part written(double stands_for);
  /// Work of backward that reads the next input: from the last layer to the first, all micro-batches of each in order.
  Part read();

  bool may_run(const Part& part) const noexcept;
  void ran(const Part& part);
  /// How many inputs the next copy stands for; 0: none can start.
  double next(Way way) const noexcept;
  void copied(Way way);

 private:
  std::size_t count() const noexcept { return inputs_ * micro_batches_; }
  /// One that later inputs of the pass overwrite.
  bool leaves(std::size_t n) const noexcept { return n + slots_ < count(); }
  /// The number, as forward counts, of backward's k-th.
  std::size_t number_read(std::size_t k) const noexcept {
    return (inputs_ - 1 - k / micro_batches_) * micro_batches_ + k % micro_batches_;
  }
  double next_fetch();

  std::size_t inputs_;
  std::size_t slots_;
  std::size_t micro_batches_ = 1;  ///< micro-batches of the pass
  std::vector<double> stand_for_;  ///< inputs that each stands for, of those that forward has written in this pass
  std::size_t read_ = 0;           ///< inputs that backward has read
  std::size_t looked_after_ = 0;   ///< reads of backward whose inputs stay, or are asked for
  std::array<std::int64_t, ways.size()> awaited_{};  ///< copies of the step that queued work waits for
  std::array<std::int64_t, ways.size()> copied_{};
  std::array<std::deque<double>, ways.size()> queues_;
};

}  // namespace tandem
