#pragma once
// Clock of modules: how long the model's stream computes in each kind of them, and how long it does something else.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device/stream_marks.hpp"
#include "train/setup/module_work.hpp"

namespace tandem {

/// Part of the time of the model's stream: a ModuleKind by its number, or one of these.
using StreamPart = std::size_t;
constexpr StreamPart weights_part = module_kinds;        ///< waits for a layer's weights, and decodes them
constexpr StreamPart gradients_part = module_kinds + 1;  ///< waits for a layer's gradient buffer, and zeroes it
constexpr StreamPart other_part = module_kinds + 2;  ///< batches up, losses down, and what a step waits for at its end
constexpr std::size_t stream_parts = module_kinds + 3;
constexpr StreamPart end_part = stream_parts;  ///< after all: nothing is counted there

struct PartFigures {
  double forward_seconds = 0.0;
  double backward_seconds = 0.0;  ///< recomputation included
  double matmul_flops = 0.0;      ///< FLOPs of the matrix products that were asked for
  double attention_flops = 0.0;   ///< FLOPs of attention, with the causal mask and windows but not records
  std::int64_t calls = 0;         ///< operations
  double seconds() const noexcept { return forward_seconds + backward_seconds; }
};
using StreamFigures = std::array<PartFigures, stream_parts>;

/// One thread uses it, for one stream.
class ModuleClock {
 public:
  /// `device` must outlive the clock, whose end waits until all marks have passed.
  ModuleClock(Device& device, double watchdog_seconds) : marks_(device, watchdog_seconds) {}

  /// Counts forward, or backward, from here on.
  void begin_pass(bool backward) noexcept { backward_ = backward; }
  /// Begins a part at this point of `stream`, until the next one begins. Does not block, nor does the stream.
  void begin(StreamPart part, StreamView stream);
  /// Counts an operation of a module.
  void count(ModuleKind kind, double matmul_flops, double attention_flops) noexcept;
  /// Waits until all marks have passed. Returns the time of each part since the last call, up to the last mark, and its
  /// operations. Throws StalledError as StreamMarks::take.
  StreamFigures take();

 private:
  struct Begun {
    StreamPart part = end_part;
    bool backward = false;
    bool operator==(const Begun&) const = default;
  };
  StreamMarks marks_;
  std::vector<Begun> begun_;  ///< parts that begin with the marks
  Begun queued_;              ///< the last of them, or of those before
  bool backward_ = false;
  Begun current_;  ///< part at the end of the last take
  double since_ = 0.0;
  StreamFigures figures_{};
};

}  // namespace tandem
