#pragma once
// Layers whose weights or gradients the caller holds through guards.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/params/parameter_access.hpp"
#include "offload/engine/engine_parts.hpp"
#include "offload/engine/engine_status.hpp"
#include "offload/engine/present_gradients.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {

/// Gives weights and gradients out, and takes them back by the ticket of their guard.
class HeldLayers {
 public:
  /// `owner`: what the guards are given back to. All must outlive it.
  HeldLayers(ParameterAccess& owner, EngineParts& parts, OpenPass& pass, PresentGradients& present)
      : owner_(owner), parts_(parts), pass_(pass), present_(present) {}

  /// Calls of OffloadEngine about layers.
  WeightsGuard fetch(LayerIndex layer, StreamView stream);
  GradientsGuard gradients(LayerIndex layer, StreamView stream);
  TensorView resident_weights(const Parameter& parameter) const;
  void wait_for_weights(LayerIndex layer, StreamView stream);
  /// Calls of ParameterAccess by its guards.
  bool holds(std::uint64_t ticket) const noexcept;
  void also_used(std::uint64_t ticket, StreamView stream);
  void release(std::uint64_t ticket, StreamView stream);
  void leave_out(std::uint64_t ticket, std::size_t parameter);
  void commit(std::uint64_t ticket, StreamView stream);
  void abandon(std::uint64_t ticket);

  /// Takes back what guards hold, whose work the caller has queued so far: they are empty from then on.
  void empty_all();
  /// Throws MisuseError where a guard is held: `what` would wait for it for ever.
  void require_none(const char* what) const;
  /// Throws MisuseError where a guard of gradients is held.
  void require_no_gradients(const char* what) const;

 private:
  /// A stream of the caller's, which lives as long as a guard is of it.
  struct SharedStream {
    StreamView view;
    std::shared_ptr<StreamImpl> owner;
    SharedStream() = default;
    explicit SharedStream(StreamView of) : view(of), owner(of.share()) {}
  };
  struct Weights {
    std::uint64_t ticket = 0;
    LayerUse use;
    SharedStream stream;
    std::vector<SharedStream> also;
    LayerIndex decoded;  ///< layer whose weights it has in the buffer of decoded ones; none: no layer's
    int exceptions = 0;  ///< exceptions in flight when it was asked for
  };
  struct Gradients {
    std::uint64_t ticket = 0;
    GradientUse use;
    SharedStream stream;
    std::vector<std::size_t> left_out;  ///< indices of parameters in the layer
  };

  template <class Held>
  static Held take(std::vector<Held>& list, std::uint64_t ticket);
  const std::string& name_of(LayerIndex layer) const;
  void require_resident(LayerIndex layer) const;
  void require_open(const char* call, LayerIndex layer) const;
  LayerBases bases_of(const LayerUse& use) const;
  void require_decodable(LayerIndex layer) const;
  void decode(LayerIndex layer, const LayerBases& bases, StreamView stream);
  void release_decoded(const Weights& held, StreamView stream);
  void require_one_stream(LayerIndex layer, StreamView stream) const;
  void poison(const LayerUse& use, StreamView stream);
  void clear_gradients(const GradientPlace& place, StreamView stream);
  void clear_left_out(const Gradients& held, StreamView stream);

  ParameterAccess& owner_;
  EngineParts& parts_;
  OpenPass& pass_;
  PresentGradients& present_;
  std::vector<Weights> weights_;
  std::vector<Gradients> gradients_;
  std::uint64_t next_ticket_ = 1;
  std::optional<Event> decoded_free_;  ///< work on the decoded weights of the last use; none yet
};

}  // namespace tandem
