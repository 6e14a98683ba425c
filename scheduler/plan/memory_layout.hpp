#pragma once
// The buffers of an offload engine, row by row of the memory table: one list, by which a plan counts bytes and an
// engine carves its blocks, so that the two cannot disagree.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/ops/undo_record.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/link_codes.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

/// Contents of a buffer. Its index is that of a layer, of a subgroup, or a number among the buffers of its kind.
enum class Buffer : std::uint8_t {
  layer_weights,      ///< weights of a layer: on the device whole, on the host the rank's slice
  weights,            ///< weights of one layer at a time, of a size class
  layer_codes,        ///< codes and scales of a layer's fp8_factors, on the host
  fetched_codes,      ///< codes of one layer at a time, on the device
  decoded,            ///< bf16 values of one layer's coded weights, while that is used
  gradient,           ///< gradient of one layer at a time, of a size class
  received,           ///< parts of one layer's gradient that all other ranks send
  sum,                ///< fp32 sum of a layer's gradients, of the rank's slice
  staging,            ///< a piece of gradient or weights on its way
  streamed_state,     ///< a piece of state that the device updates
  streamed_gradient,  ///< the piece of gradient beside it, where that comes from the host
  file_piece,         ///< a piece of state from a file, in whole blocks of the disk
  subgroup_gradient,  ///< final gradient of a step
  subgroup_sum,       ///< fp32 sum beside it
  subgroup_norm,      ///< fp64 sum of squares of each layout_quantum
  gradient_norm,      ///< fp64 sums of squares of a gradient buffer, of a size class
  subgroup_undo,      ///< record that takes an update back
  subgroup_state,     ///< master, m and v, each aligned; in a file piece by piece
};

/// Order of the states in host memory.
enum class HostStates : std::uint8_t {
  by_subgroup,     ///< plans that differ in who updates have state in the same places
  streamed_first,  ///< states that travel to the device come first, as the system may pin only the first part of a
                   ///< block
};

/// Walk through all buffers: calls `out.row(name, place)` before the buffers of each row, and `out.take(buffer, index,
/// bytes)` for each buffer, in the order in which they lie. Rows may be without buffers. `bytes` is not rounded up to
/// the alignment of an arena.
template <class Out>
class MemoryLayout {
 public:
  /// All arguments must outlive the object.
  MemoryLayout(const ParameterLayout& layout, const Plan& plan, Out& out) : layout_(layout), plan_(plan), out_(out) {}

  void on_device() {
    out_.row("weights, resident", Place::device);
    for_layers([&](const Layer& layer, const LayerPlacement& placed, std::size_t l) {
      if (placed.resident) out_.take(Buffer::layer_weights, l, layer.weight_offset(layer.elements));
    });
    out_.row("weights, streamed", Place::device);
    for_classes(Buffer::weights, &SizeClass::weight_buffers, [](const SizeClass& size) { return size.weight_bytes; });
    out_.row("weights, decoded", Place::device);
    if (const std::size_t bytes = decoded_bytes(); bytes > 0) out_.take(Buffer::decoded, 0, bytes);
    out_.row("weights, in a byte", Place::device);
    repeat(Buffer::fetched_codes, plan_.code_buffers, most_codes());
    out_.row("gradients, working", Place::device);
    for_classes(Buffer::gradient, &SizeClass::gradient_buffers,
                [](const SizeClass& size) { return size.gradient_bytes; });
    out_.row("gradients, of other ranks", Place::device);
    for_classes(Buffer::received, &SizeClass::receive_buffers,
                [](const SizeClass& size) { return size.receive_bytes; });
    out_.row("gradients, staging", Place::device);
    repeat(Buffer::staging, plan_.staging_pieces, bytes_of(plan_.piece_elements, bf16_bytes));
    out_.row("gradients, kept", Place::device);
    for_kept([&](const Subgroup& s, std::size_t i) {
      out_.take(Buffer::subgroup_gradient, i, gradient_bytes(plan_.format_of(s), s.count()));
    });
    out_.row("gradients, accumulated", Place::device);
    for_classes(Buffer::sum, &SizeClass::sum_buffers,
                [](const SizeClass& size) { return bytes_of(size.sum_elements, fp32_bytes); });
    if (plan_.gradients_of_step() > 1) {
      for_kept([&](const Subgroup& s, std::size_t i) {
        out_.take(Buffer::subgroup_sum, i, bytes_of(s.count(), fp32_bytes));
      });
    }
    out_.row("gradient norm", Place::device);
    for_kept([&](const Subgroup& s, std::size_t i) { out_.take(Buffer::subgroup_norm, i, norm_bytes(s)); });
    if (sends_norms()) {
      for_classes(Buffer::gradient_norm, &SizeClass::gradient_buffers,
                  [](const SizeClass& size) { return bytes_of(size.gradient_elements / layout_quantum, fp64_bytes); });
    }
    out_.row("optimizer, resident", Place::device);
    states_of(Tier::device, [](const Subgroup&) { return true; });
    out_.row("optimizer, streamed", Place::device);
    repeat(Buffer::streamed_state, plan_.state_buffers, booked_state_bytes(plan_.piece_elements, plan_.state));
    if (fetches_gradients()) {
      repeat(Buffer::streamed_gradient, plan_.state_buffers, bytes_of(plan_.piece_elements, bf16_bytes));
    }
  }

  /// Buffers on the host, the most copied first, as the system may pin only the first part of a block. Buffers for
  /// pieces of a file are whole blocks at the beginning of a page, as only such bypass the page cache.
  void on_host(HostStates order) {
    out_.row("optimizer, from a file", Place::pinned);
    repeat(Buffer::file_piece, plan_.file_buffers, file_state_bytes(plan_.piece_elements, plan_.state));
    out_.row("weights", Place::pinned);
    for_layers([&](const Layer& layer, const LayerPlacement& placed, std::size_t l) {
      if (!placed.host_copy) return;
      out_.take(Buffer::layer_weights, l, weight_bytes(layer, slice_of(layer, plan_.rank)));
    });
    out_.row("weights, in a byte", Place::pinned);
    for_layers([&](const Layer& layer, const LayerPlacement& placed, std::size_t l) {
      if (placed.in_codes) out_.take(Buffer::layer_codes, l, code_bytes(layer));
    });
    out_.row("gradients", Place::pinned);
    for_sent([&](const Subgroup& s, std::size_t i) {
      out_.take(Buffer::subgroup_gradient, i, gradient_bytes(plan_.format_of(s), s.count()));
    });
    out_.row("gradient norm", Place::pinned);
    for_subgroups([&](const Subgroup& s, std::size_t i) { out_.take(Buffer::subgroup_norm, i, norm_bytes(s)); });
    out_.row("optimizer", Place::pinned);
    if (order == HostStates::by_subgroup) {
      states_of(Tier::host, [](const Subgroup&) { return true; });
    } else {
      states_of(Tier::host, [](const Subgroup& s) { return s.updater == Updater::device; });
      states_of(Tier::host, [](const Subgroup& s) { return s.updater != Updater::device; });
    }
    out_.row("optimizer, in a file", Place::file);
    for_subgroups([&](const Subgroup& s, std::size_t i) {
      if (s.tier == Tier::file) out_.take(Buffer::subgroup_state, i, plan_.file_bytes(s));
    });
    out_.row("gradients, accumulated", Place::pinned);
    if (plan_.gradients_of_step() > 1 && !plan_.sends_sums) {
      for_sent([&](const Subgroup& s, std::size_t i) {
        out_.take(Buffer::subgroup_sum, i, bytes_of(s.count(), fp32_bytes));
      });
    }
    out_.row("optimizer, undo", Place::pinned);
    for_subgroups([&](const Subgroup& s, std::size_t i) {
      if (s.speculates) out_.take(Buffer::subgroup_undo, i, undo_bytes(plan_.format_of(s), s.count()));
    });
  }

 private:
  static constexpr std::size_t bf16_bytes = 2, fp32_bytes = 4, fp64_bytes = 8;

  static std::size_t bytes_of(std::int64_t elements, std::size_t bytes_each) {
    return static_cast<std::size_t>(elements) * bytes_each;
  }
  static std::size_t norm_bytes(const Subgroup& s) { return bytes_of(s.count() / layout_quantum, fp64_bytes); }

  /// Bytes of the decoded weights of the layer that has most; 0: none has any.
  std::size_t decoded_bytes() const {
    std::int64_t most = 0;
    for (const Layer& layer : layout_.layers()) most = std::max(most, layer.decoded_elements);
    return bytes_of(most, bf16_bytes);
  }

  /// Bytes of the codes of the layer that has most, of those that cross in codes.
  std::size_t most_codes() const {
    std::size_t most = 0;
    for_layers([&](const Layer& layer, const LayerPlacement& placed, std::size_t) {
      if (placed.in_codes) most = std::max(most, code_bytes(layer));
    });
    return most;
  }

  /// Whether some streamed subgroup's gradient lies on the host.
  bool fetches_gradients() const {
    for (const Subgroup& s : plan_.subgroups) {
      if (!s.gradient_on_device && s.updater == Updater::device) return true;
    }
    return false;
  }

  /// Whether some gradient goes to the host whose norm the device makes.
  bool sends_norms() const { return plan_.norms_on_device() && plan_.sends_gradients(); }

  template <class Call>
  void for_layers(Call call) const {
    for (const LayerIndex l : layers_of(layout_)) call(layer_at(layout_, l), placement_at(plan_, l), l.position());
  }

  template <class Call>
  void for_subgroups(Call call) const {
    for (std::size_t i = 0; i < plan_.subgroups.size(); ++i) call(plan_.subgroups[i], i);
  }

  /// Subgroups whose final gradient stays on the device.
  template <class Call>
  void for_kept(Call call) const {
    for_subgroups([&](const Subgroup& s, std::size_t i) {
      if (s.gradient_on_device) call(s, i);
    });
  }

  /// Subgroups whose gradient goes to the host.
  template <class Call>
  void for_sent(Call call) const {
    for_subgroups([&](const Subgroup& s, std::size_t i) {
      if (!s.gradient_on_device) call(s, i);
    });
  }

  template <class Chosen>
  void states_of(Tier tier, Chosen chosen) {
    for_subgroups([&](const Subgroup& s, std::size_t i) {
      if (s.tier == tier && chosen(s))
        out_.take(Buffer::subgroup_state, i, booked_state_bytes(s.count(), plan_.format_of(s)));
    });
  }

  void repeat(Buffer buffer, int count, std::size_t bytes) {
    for (int i = 0; i < count; ++i) out_.take(buffer, static_cast<std::size_t>(i), bytes);
  }

  /// Takes the buffers of all size classes, numbered from the first class to the last.
  template <class Bytes>
  void for_classes(Buffer buffer, int SizeClass::*count, Bytes bytes) {
    std::size_t index = 0;
    for (const SizeClass& size : plan_.size_classes) {
      for (int i = 0; i < size.*count; ++i) out_.take(buffer, index++, bytes(size));
    }
  }

  const ParameterLayout& layout_;
  const Plan& plan_;
  Out& out_;
};

}  // namespace tandem
