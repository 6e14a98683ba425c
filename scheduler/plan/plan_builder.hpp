#pragma once
// Builds one plan from options and a few settings (divided_state.hpp).
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/index.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/indices.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

/// Number of subgroups that divide_state() cuts.
std::int64_t subgroup_count(const ParameterLayout& layout, const OffloadOptions& options);

/// Builder of one plan. Call the steps in the order of declaration. Layout and options must outlive it.
class PlanBuilder {
 public:
  PlanBuilder(const ParameterLayout& layout, const OffloadOptions& options);

  /// Cuts every layer's state into subgroups and gives each a tier and an updater, as the policy says.
  void divide_state();
  /// Sorts layers into size classes, and by what it is worth to keep each on the device. Up to here plans of the same
  /// options are the same: a builder may be copied.
  void order_layers();
  /// Moves at least `bytes` of the state on the host, or all of it, to a file.
  void place_in_file(std::size_t bytes);
  /// Keeps the weights of `resident_layers` layers on the device, those most worth it; the others share buffers of
  /// their size class: `prefetch` where its layers follow each other, one where many others lie between. Unless the
  /// options give the number of layers, a class that would need as many buffers as it has layers stays too.
  void place_weights(int resident_layers, int prefetch, int gradient_buffers);
  /// Lets the fp8_factors of layers that do not stay on the device cross the link in a byte. With one rank.
  void place_codes();
  /// Decides whether gradients of streamed subgroups stay on the device (those of resident ones always do), and whether
  /// others add up there before they leave, where all micro-batches of a step pass through a layer at once.
  void place_gradients(bool keep_streamed, bool send_sums);
  /// Gives subgroups that the CPU updates in memory what takes an update back, where some update waits for the norm. Of
  /// Lion's there is none.
  void speculate();
  /// Sizes pieces and buffers, and names every byte. `small_pieces`: as little memory for pieces in flight as still
  /// lets a copy and the work on its neighbour overlap.
  void book_memory(bool small_pieces);

  Plan take() && { return std::move(plan_); }

  /// The plan of the rank that the options name, from the plan of the group's first, whose slices are the largest: the
  /// same subgroups, of the rank's own slices.
  static Plan for_rank(const ParameterLayout& layout, const OffloadOptions& options, Plan first);

 private:
  using LayerFlags = IndexedVector<LayerIndex, bool>;

  void cut_subgroups();
  void cut_subgroups(LayerIndex layer, const ElementRange& range, bool fp32_weights);
  ElementRange slice_of_state(LayerIndex layer) const;
  void assign_static(double host_share);
  void assign_interleave();
  void assign_paths();
  void size_classes();
  LayerPlacement& placement(LayerIndex layer) { return placement_at(plan_, layer); }
  LayerFlags lenders() const;
  LayerFlags layers_with_held_gradients(const LayerFlags& lends) const;
  void size_weight_buffers(const LayerFlags& lends, int prefetch);
  void size_gradient_buffers(const LayerFlags& held, int gradient_buffers);
  std::vector<int> longest_rows(const LayerFlags& held) const;
  void place_sums();
  void size_buffers(bool small_pieces);
  void book_rows();

  const ParameterLayout& layout_;
  const OffloadOptions& options_;
  Plan plan_;
  std::vector<LayerIndex> worth_most_first_;
};

}  // namespace tandem
