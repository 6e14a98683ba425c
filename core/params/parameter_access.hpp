#pragma once
// Access of a model to its parameters: it fetches a layer's weights, gets its gradients, and commits them. The offload
// engine implements it; so can a test that keeps everything in plain memory.
#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "core/device/device.hpp"
#include "core/params/parameter_layout.hpp"

namespace tandem {

class ParameterAccess;

/// Beginnings of the flat arrays of the layers that a guard covers: its own, and those it borrows from. `decoded`: the
/// bf16 values of the guard's own layer that are stored in another format; null: it has none.
struct LayerBases {
  static constexpr int capacity = 4;
  struct Entry {
    int layer = -1;
    void* base = nullptr;
  };
  std::array<Entry, capacity> entries{};
  int count = 0;
  void* decoded = nullptr;
  void add(int layer, void* base);
  void* of(int layer) const noexcept;  ///< null where absent
};

/// Link from a guard to its origin, null once that is gone.
using AccessLink = std::shared_ptr<ParameterAccess*>;

/// A layer's weights on the device, valid for work queued on the stream of the fetch (and on those of `also_used_on`)
/// while the guard lives. Destroying it releases the buffer after that work. Move-only. Not thread-safe. A guard that
/// outlives the engine, or a step that abort_step has dropped, is empty. The engine shares the streams of a guard with
/// their owners, who may let go of them first; a native stream that was wrapped must outlive the guard.
class [[nodiscard]] WeightsGuard {
 public:
  WeightsGuard() = default;
  WeightsGuard(ParameterAccess* access, const ParameterLayout* layout, int layer, std::uint64_t ticket,
               LayerBases bases, StreamView stream);
  WeightsGuard(WeightsGuard&& other) noexcept;
  WeightsGuard& operator=(WeightsGuard&& other) noexcept;
  WeightsGuard(const WeightsGuard&) = delete;
  WeightsGuard& operator=(const WeightsGuard&) = delete;
  ~WeightsGuard();

  /// Weights of one parameter, of its shape and the type that its options say. Throws MisuseError where the layer has
  /// no such parameter or the guard is empty.
  TensorView operator[](std::string_view name) const&;
  TensorView operator[](std::string_view name) const&& = delete;  // the view would outlive its guard
  /// Makes `stream` wait for the weights too: call it before queuing work there that reads them. The buffer is kept
  /// until all work on `stream` is done that was queued before the guard goes. Throws MisuseError where the guard is
  /// empty, or the stream is empty or belongs to another device.
  void also_used_on(StreamView stream);

 private:
  void release() noexcept;
  ParameterAccess* access() const noexcept;
  AccessLink access_;
  const ParameterLayout* layout_ = nullptr;
  int layer_ = -1;
  std::uint64_t ticket_ = 0;
  LayerBases bases_;
  StreamView stream_;
};

/// A layer's gradient buffers for one micro-batch: f32, zero at first, to be added to; or, where a parameter's options
/// say bf16, undefined at first, to be written whole. Must be committed once; destroying it uncommitted abandons the
/// step. Both layers of a tied parameter have one buffer, which holds the gradient that the other layer has committed
/// before. Empty as a guard of weights is.
class [[nodiscard]] GradientsGuard {
 public:
  GradientsGuard() = default;
  GradientsGuard(ParameterAccess* access, const ParameterLayout* layout, int layer, std::uint64_t ticket,
                 LayerBases bases);
  GradientsGuard(GradientsGuard&& other) noexcept;
  GradientsGuard& operator=(GradientsGuard&& other) noexcept;
  GradientsGuard(const GradientsGuard&) = delete;
  GradientsGuard& operator=(const GradientsGuard&) = delete;
  ~GradientsGuard();

  /// Gradient of one parameter, of its shape and the type that its options say; empty for a frozen parameter. Throws
  /// MisuseError where the layer has no such parameter, or the guard is empty or committed.
  TensorView operator[](std::string_view name) const&;
  TensorView operator[](std::string_view name) const&& = delete;  // the view would outlive its guard
  /// Says that one parameter has no gradient in this micro-batch, in a step that allows it (StepOptions::absent): what
  /// lies in its buffer does not count. Throws MisuseError where it does not allow it, the layer has no such trained
  /// parameter, or the guard is empty or committed.
  void leave_out(std::string_view name);
  /// Commits the gradients: all work that fills them has been queued, and `stream` is the last to run it. Work on other
  /// streams is the caller's to order: after the stream of `gradients`, which zeroes, and before this one. Does not
  /// block. Throws MisuseError where the guard is empty or committed, or the stream is empty or belongs to another
  /// device.
  void commit(StreamView stream);

 private:
  ParameterAccess* access() const noexcept;
  AccessLink access_;
  const ParameterLayout* layout_ = nullptr;
  int layer_ = -1;
  std::uint64_t ticket_ = 0;
  LayerBases bases_;
};

/// Source of weights and sink of gradients.
class ParameterAccess {
 public:
  ParameterAccess() = default;
  ParameterAccess(const ParameterAccess&) = delete;
  ParameterAccess& operator=(const ParameterAccess&) = delete;
  virtual ~ParameterAccess() { *link_ = nullptr; }
  /// Makes `stream` wait until the layer's weights are on the device. Blocks until everything that they wait for has
  /// been queued, updates on the CPU included. Throws MisuseError where there is no such layer, or the stream is empty
  /// or belongs to another device.
  virtual WeightsGuard fetch(int layer, StreamView stream) = 0;
  /// Makes `stream` wait until the layer's gradient buffer is free, and zero where it is to be added to. Blocks and
  /// throws as `fetch`.
  virtual GradientsGuard gradients(int layer, StreamView stream) = 0;

 protected:
  friend class WeightsGuard;
  friend class GradientsGuard;
  /// Whether the guard of a ticket still holds what it was given. After `abort_step` it does not.
  virtual bool holds(std::uint64_t) const noexcept { return true; }
  virtual void also_used(std::uint64_t ticket, StreamView stream) = 0;
  virtual void release(std::uint64_t ticket, StreamView stream) noexcept = 0;
  /// `parameter`: its index in its layer. Refuses unless overridden.
  virtual void leave_out(std::uint64_t ticket, std::size_t parameter);
  virtual void commit(std::uint64_t ticket, StreamView stream) = 0;
  virtual void abandon(std::uint64_t ticket) noexcept = 0;

 private:
  AccessLink link_ = std::make_shared<ParameterAccess*>(this);
};

}  // namespace tandem
