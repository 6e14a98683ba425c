#include "scheduler/plan/plan_builder.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/error.hpp"
#include "core/tensor/layout_quantum.hpp"
#include "scheduler/plan/link_codes.hpp"
#include "scheduler/plan/memory_layout.hpp"
#include "scheduler/plan/resident_layers.hpp"

namespace tandem {
namespace {

// A gradient piece of 1 Mi elements is 2 MiB of bf16: long enough to reach the link's rate, short enough
// that rounding, copy and folding of neighbours overlap. Small models use smaller ones.
constexpr std::int64_t largest_piece = std::int64_t{1} << 20;
constexpr std::int64_t smallest_piece = std::int64_t{1} << 16;
// An update waits for the caller's kernel that runs, a millisecond or two, and the link goes on meanwhile: of state
// eight pieces are 2 ms at PCIe 5, and 0.1 GB.
constexpr int pieces_in_flight = 8;
constexpr int fewest_pieces_in_flight = 2;
// Pieces of a file in flight on the host: read, two each way of the link or on the CPU, and written.
constexpr int file_pieces_in_flight = 6;
// Large enough that an update's fixed cost does not show, small enough to divide a layer of any real model.
constexpr std::int64_t default_subgroup = std::int64_t{8} << 20;
// Distance of two layers from which the second's weights can come while the layers between compute.
constexpr int layers_apart = 8;
// Layers within this ratio of the largest of a class share its buffers.
constexpr double class_ratio = 0.5;

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

/// A rank's part of a layer's state, of which subgroups are cut: those with f32 weights, and those without.
struct StateParts {
  ElementRange fp32, rest;
  StateParts(const Layer& layer, Rank rank) : fp32(slice_of(layer, rank).trained), rest(fp32) {
    rest.begin = fp32.end = std::clamp(layer.fp32_elements, rest.begin, rest.end);
  }
};

/// Elements of a layer's state in the larger of these parts of the group's first rank.
std::int64_t elements_of_state(const Layer& layer, const OffloadOptions& options) {
  const StateParts parts(layer, {0, options.rank.count});
  return std::max(parts.fp32.count(), parts.rest.count());
}

/// Parameters of the largest subgroup.
std::int64_t subgroup_size(const ParameterLayout& layout, const OffloadOptions& options) {
  std::int64_t largest = 0;
  for (const Layer& layer : layout.layers()) largest = std::max(largest, elements_of_state(layer, options));
  const std::int64_t wanted = options.subgroup_size.value_or(default_subgroup);
  return std::max(layout_quantum, std::min(round_up(wanted, layout_quantum), largest));
}

std::int64_t subgroups_of(std::int64_t elements, std::int64_t size) { return (elements + size - 1) / size; }

/// Bytes that all other ranks send of a layer's gradient, each as many as the largest part has.
std::size_t receive_bytes(const Layer& layer, int ranks) {
  std::size_t largest = 0;
  for (const ByteRange& part : gradient_parts(layer, ranks)) largest = std::max(largest, part.size());
  return static_cast<std::size_t>(ranks - 1) * largest;
}

/// One of so many equal parts of a slice, in whole quanta; of a small one it may have nothing.
void cut(Subgroup& s, const ElementRange& slice, std::int64_t part, std::int64_t parts) {
  const std::int64_t blocks = slice.count() / layout_quantum;
  s.begin = slice.begin + blocks * part / parts * layout_quantum;
  s.end = slice.begin + blocks * (part + 1) / parts * layout_quantum;
}

/// Adds up the buffers of each row, as an arena aligns them.
class MemoryRows {
 public:
  explicit MemoryRows(MemoryPlan& memory) : memory_(memory) {}

  void row(std::string_view name, Place place) {
    end_row();
    name_ = name;
    place_ = place;
  }
  void take(Buffer, std::size_t, std::size_t bytes) { bytes_ += align_up(bytes); }
  void add(std::string_view name, Place place, std::size_t bytes) {
    row(name, place);
    bytes_ = bytes;
    row({}, place);
  }

 private:
  void end_row() {
    if (name_.empty()) return;
    memory_.add(std::string(name_), "run", place_, std::exchange(bytes_, 0));
  }

  MemoryPlan& memory_;
  std::string_view name_;
  Place place_ = Place::device;
  std::size_t bytes_ = 0;
};

}  // namespace

std::int64_t subgroup_count(const ParameterLayout& layout, const OffloadOptions& options) {
  const std::int64_t size = subgroup_size(layout, options);
  std::int64_t count = 0;
  for (const Layer& layer : layout.layers()) {
    const StateParts parts(layer, {0, options.rank.count});
    count += subgroups_of(parts.fp32.count(), size) + subgroups_of(parts.rest.count(), size);
  }
  return count;
}

PlanBuilder::PlanBuilder(const ParameterLayout& layout, const OffloadOptions& options)
    : layout_(layout), options_(options) {
  plan_.policy = options.policy;
  plan_.rank = {0, options.rank.count};
  plan_.max_micro_batches = options.max_micro_batches;
  plan_.update_threads = options.update_threads.value_or(0);
  plan_.micro_batches_at_once = std::min(options.micro_batches_at_once, options.max_micro_batches);
  plan_.owners_make_gradients = options.owners_make_gradients;
  plan_.offloaded_input_bytes = options.offloaded_input_bytes;
  plan_.updates_in_backward = !options.clips && options.on_nonfinite == OnNonfinite::stop;
  plan_.speculate = options.speculate;
  plan_.state = options.state;
  plan_.spare_device_memory = align_up(options.spare_device_memory);
  plan_.spare_host_memory = align_up(options.spare_host_memory);
}

void PlanBuilder::divide_state() {
  cut_subgroups();
  const Policy& policy = options_.policy;
  switch (policy.kind) {
    case Policy::Kind::device:
      assign_static(0.0);
      break;
    case Policy::Kind::static_share:
      assign_static(policy.host_share);
      break;
    case Policy::Kind::automatic:
    case Policy::Kind::host:
      assign_static(1.0);
      break;
    case Policy::Kind::interleave:
      assign_interleave();
      break;
    case Policy::Kind::stream:
      for (Subgroup& s : plan_.subgroups) s.updater = Updater::device;
      break;
  }
  if (options_.paths) assign_paths();
}

void PlanBuilder::assign_paths() {
  if (options_.paths->size() != plan_.subgroups.size()) {
    throw MisuseError("options give a path for each of another number of subgroups");
  }
  for (std::size_t i = 0; i < plan_.subgroups.size(); ++i) {
    Subgroup& s = plan_.subgroups[i];
    s.tier = (*options_.paths)[i] == UpdatePath::resident ? Tier::device : Tier::host;
    s.updater = (*options_.paths)[i] == UpdatePath::cpu ? Updater::cpu : Updater::device;
  }
}

/// Moves `bytes` of the state on the host to a file, evenly, so that neither reading nor the updates of state in memory
/// stand still for long.
void PlanBuilder::place_in_file(std::size_t bytes) {
  if (bytes == 0) return;
  const auto booked = [&](const Subgroup& s) { return booked_state_bytes(s.count(), plan_.format_of(s)); };
  double all = 0.0;
  for (const Subgroup& s : plan_.subgroups) all += s.tier == Tier::host ? static_cast<double>(booked(s)) : 0.0;
  const double share = std::min(1.0, static_cast<double>(bytes) / std::max(1.0, all));
  double passed = 0.0;
  double moved = 0.0;
  for (Subgroup& s : plan_.subgroups) {
    if (s.tier != Tier::host) continue;
    const auto size = static_cast<double>(booked(s));
    passed += size;
    if (moved >= share * passed) continue;
    s.tier = Tier::file;
    moved += size;
  }
}

void PlanBuilder::cut_subgroups() {
  plan_.subgroup_size = subgroup_size(layout_, options_);
  // In equal parts: whoever counts them, as interleaving does, divides the work and not the remainders of layers.
  for (const LayerIndex l : layers_of(layout_)) {
    const StateParts parts(layer_at(layout_, l), plan_.rank);
    cut_subgroups(l, parts.fp32, true);
    cut_subgroups(l, parts.rest, false);
  }
}

void PlanBuilder::cut_subgroups(LayerIndex layer, const ElementRange& range, bool fp32_weights) {
  const std::int64_t parts = subgroups_of(range.count(), plan_.subgroup_size);
  for (std::int64_t part = 0; part < parts; ++part) {
    Subgroup& s = plan_.subgroups.emplace_back();
    s.layer = layer.number();
    s.fp32_weights = fp32_weights;
    cut(s, range, part, parts);
  }
}

ElementRange PlanBuilder::slice_of_state(LayerIndex layer) const {
  return slice_of(layer_at(layout_, layer), plan_.rank).trained;
}

Plan PlanBuilder::for_rank(const ParameterLayout& layout, const OffloadOptions& options, Plan first) {
  PlanBuilder builder(layout, options);
  builder.plan_ = std::move(first);
  Plan& plan = builder.plan_;
  plan.rank = options.rank;
  plan.memory = {};
  for (auto s = plan.subgroups.begin(); s != plan.subgroups.end();) {
    const auto end = std::find_if(s, plan.subgroups.end(), [&](const Subgroup& other) {
      return other.layer != s->layer || other.fp32_weights != s->fp32_weights;
    });
    const StateParts of_layer(layout.layer(s->layer), plan.rank);
    const ElementRange& range = s->fp32_weights ? of_layer.fp32 : of_layer.rest;
    const std::int64_t parts = end - s;
    for (std::int64_t part = 0; s != end; ++s, ++part) cut(*s, range, part, parts);
  }
  builder.book_rows();
  return std::move(builder).take();
}

/// A subgroup is on the host where its middle lies within the first share: each share is met to half a
/// subgroup.
void PlanBuilder::assign_static(double host_share) {
  std::int64_t all = 0;
  for (const Subgroup& s : plan_.subgroups) all += s.count();
  const double boundary = host_share * static_cast<double>(all);
  std::int64_t before = 0;
  for (Subgroup& s : plan_.subgroups) {
    const double middle = static_cast<double>(before) + static_cast<double>(s.count()) / 2.0;
    const bool on_host = middle < boundary;
    s.tier = on_host ? Tier::host : Tier::device;
    s.updater = on_host ? Updater::cpu : Updater::device;
    before += s.count();
  }
}

void PlanBuilder::assign_interleave() {
  assign_static(1.0 - options_.policy.resident_share);
  std::int64_t index = 0;
  for (Subgroup& s : plan_.subgroups) {
    if (s.tier == Tier::device) continue;
    s.updater = ++index % options_.policy.stride == 0 ? Updater::device : Updater::cpu;
  }
}

void PlanBuilder::order_layers() {
  plan_.layers.resize(layout_.layers().size());
  size_classes();
  worth_most_first_ = by_worth_of_residence(layout_, plan_);
}

void PlanBuilder::place_weights(int resident_layers, int prefetch, int gradient_buffers) {
  for (const LayerIndex l : worth_most_first_) placement(l).resident = resident_layers-- > 0;
  const LayerFlags lends = lenders();
  size_weight_buffers(lends, prefetch);
  for (LayerPlacement& of_layer : plan_.layers) of_layer.host_copy = !of_layer.resident;
  for (const Subgroup& s : plan_.subgroups) {
    if (s.updater == Updater::cpu) placement(layer_of(s)).host_copy = true;
  }
  size_gradient_buffers(layers_with_held_gradients(lends), gradient_buffers);
}

/// Layers whose gradient buffers stay open while others pass: until all uses have added to them.
PlanBuilder::LayerFlags PlanBuilder::layers_with_held_gradients(const LayerFlags& lends) const {
  LayerFlags held = plan_.owners_make_gradients ? LayerFlags(lends.size()) : lends;
  for (const LayerIndex l : held.indices()) held[l] = held[l] || layer_at(layout_, l).uses > 1;
  return held;
}

/// Layers that others share parameters of: they stay held while others pass.
PlanBuilder::LayerFlags PlanBuilder::lenders() const {
  LayerFlags lends(layout_.layers().size());
  for (const Layer& layer : layout_.layers()) {
    for (const int owner : layer.borrows) lends[LayerIndex(owner)] = true;
  }
  return lends;
}

/// Sizes the weight buffers of each class: as many as are asked for where the layers that pass follow each other; one
/// where so many lie between that there is time to fill it. Unless their number is asked for, a class with a buffer for
/// each of its layers keeps them resident instead, in no more memory.
void PlanBuilder::size_weight_buffers(const LayerFlags& lends, int prefetch) {
  struct Passing {
    int streamed = 0, held = 0;
    LayerIndex last;        ///< last streamed layer that is not lent
    int row = 0, most = 0;  ///< layers of the present row close to each other, and of the longest
  };
  std::vector<Passing> classes(plan_.size_classes.size());
  for (const LayerIndex l : layers_of(layout_)) {
    Passing& of_class = classes[static_cast<std::size_t>(placement(l).size_class)];
    const bool streamed = !placement(l).resident, lent = lends[l];
    of_class.streamed += streamed ? 1 : 0;
    of_class.held += lent ? 1 : 0;
    if (!streamed || lent) continue;
    of_class.row = !of_class.last.none() && l - of_class.last < layers_apart ? of_class.row + 1 : 1;
    of_class.most = std::max(of_class.most, of_class.row);
    of_class.last = l;
  }
  for (std::size_t c = 0; c < classes.size(); ++c) {
    const Passing& p = classes[c];
    int& buffers = plan_.size_classes[c].weight_buffers;
    buffers = std::min(p.streamed, std::min(p.most, prefetch) + p.held);
    if (options_.resident_layers || buffers < p.streamed) continue;
    buffers = 0;
    for (LayerPlacement& l : plan_.layers) l.resident |= l.size_class == static_cast<int>(c);
  }
}

/// Sizes the gradient buffers: one is filled while another empties where the next layer's gradient is of the same
/// class, or, with micro-batches that follow each other, the same layer's. Buffers that are `held`, of shared layers,
/// wait for their own backward.
void PlanBuilder::size_gradient_buffers(const LayerFlags& held, int gradient_buffers) {
  const std::vector<int> in_a_row = longest_rows(held);
  std::vector<int> open(plan_.size_classes.size());
  std::vector<bool> closes(plan_.size_classes.size());  // has layers that share nothing
  for (const LayerIndex l : layers_of(layout_)) {
    const auto c = static_cast<std::size_t>(placement(l).size_class);
    if (!held[l]) {
      closes[c] = true;
    } else if (layer_at(layout_, l).state_elements > 0) {
      open[c] += plan_.micro_batches_at_once;
    }
  }
  for (std::size_t c = 0; c < open.size(); ++c) {
    SizeClass& size = plan_.size_classes[c];
    if (size.gradient_elements == 0) continue;
    const bool followed = plan_.micro_batches_at_once > 1 && closes[c];
    size.gradient_buffers = open[c] + (followed ? gradient_buffers : std::min(in_a_row[c], gradient_buffers));
    size.receive_buffers = size.receive_bytes > 0 ? gradient_buffers : 0;
  }
}

/// Longest row of layers with gradients, by size class, without layers whose buffers are held.
std::vector<int> PlanBuilder::longest_rows(const LayerFlags& held) const {
  std::vector<int> longest(plan_.size_classes.size());
  int row = 0;
  int row_class = -1;
  for (const LayerIndex l : layers_of(layout_)) {
    if (layer_at(layout_, l).state_elements == 0) continue;
    const int c = placement_at(plan_, l).size_class;
    const bool waits = held[l];
    row = waits ? 0 : c == row_class ? row + 1 : 1;
    row_class = waits ? -1 : c;
    longest[static_cast<std::size_t>(c)] = std::max(longest[static_cast<std::size_t>(c)], row);
  }
  return longest;
}

void PlanBuilder::size_classes() {
  std::vector<LayerIndex> order(layout_.layers().size());
  std::iota(order.begin(), order.end(), LayerIndex(0));
  const auto bytes_of = [&](LayerIndex l) {
    const Layer& layer = layer_at(layout_, l);
    return layer.weight_offset(layer.elements);
  };
  std::stable_sort(order.begin(), order.end(), [&](LayerIndex a, LayerIndex b) { return bytes_of(a) > bytes_of(b); });
  for (const LayerIndex l : order) {
    const Layer& layer = layer_at(layout_, l);
    const auto bytes = static_cast<double>(bytes_of(l));
    const bool opens =
        plan_.size_classes.empty() || bytes < class_ratio * static_cast<double>(plan_.size_classes.back().weight_bytes);
    if (opens) plan_.size_classes.push_back({.weight_bytes = bytes_of(l)});
    SizeClass& size = plan_.size_classes.back();
    size.weight_elements = std::max(size.weight_elements, layer.elements);
    size.gradient_elements = std::max(size.gradient_elements, layer.state_elements);
    size.gradient_bytes = std::max(size.gradient_bytes, layer.gradient_offset(layer.state_elements));
    size.sum_elements = std::max(size.sum_elements, slice_of_state(l).count());
    size.receive_bytes = std::max(size.receive_bytes, receive_bytes(layer, plan_.rank.count));
    placement(l).size_class = static_cast<int>(plan_.size_classes.size()) - 1;
  }
}

/// Two buffers on the device: one is decoded while the next fills.
void PlanBuilder::place_codes() {
  if (plan_.rank.count > 1) return;
  constexpr int most_buffers = 2;
  for (const LayerIndex l : layers_of(layout_)) {
    placement(l).in_codes = !placement(l).resident && code_bytes(layer_at(layout_, l)) > 0;
    if (placement(l).in_codes) plan_.code_buffers = std::min(plan_.code_buffers + 1, most_buffers);
  }
}

void PlanBuilder::place_gradients(bool keep_streamed, bool send_sums) {
  for (Subgroup& s : plan_.subgroups) {
    s.gradient_on_device = s.tier == Tier::device || (keep_streamed && s.updater == Updater::device);
  }
  const bool together = plan_.gradients_of_step() > 1 && plan_.micro_batches_at_once == plan_.max_micro_batches;
  plan_.sends_sums = send_sums && together && plan_.sends_gradients();
  if (plan_.sends_sums) place_sums();
}

/// One layer's gradients add up at a time, with those of the layers that it borrows from.
void PlanBuilder::place_sums() {
  LayerFlags sends(layout_.layers().size());
  for (const Subgroup& s : plan_.subgroups) {
    if (!s.gradient_on_device) sends[layer_of(s)] = true;
  }
  for (const LayerIndex l : layers_of(layout_)) {
    std::vector<int> needed(plan_.size_classes.size());
    const auto need = [&](LayerIndex layer) {
      if (sends[layer]) ++needed[static_cast<std::size_t>(placement(layer).size_class)];
    };
    need(l);
    for (const int owner : layer_at(layout_, l).borrows) {
      if (plan_.adds_to(owner, l.number())) need(LayerIndex(owner));
    }
    for (std::size_t c = 0; c < needed.size(); ++c) {
      plan_.size_classes[c].sum_buffers = std::max(plan_.size_classes[c].sum_buffers, needed[c]);
    }
  }
}

void PlanBuilder::speculate() {
  if (plan_.updates_in_backward || is_lion(plan_.state)) return;
  for (Subgroup& s : plan_.subgroups) s.speculates = s.updater == Updater::cpu && s.tier == Tier::host;
}

void PlanBuilder::book_memory(bool small_pieces) {
  size_buffers(small_pieces);
  book_rows();
}

void PlanBuilder::size_buffers(bool small_pieces) {
  std::int64_t largest = layout_quantum;
  bool fp32_weights = false;
  bool sends_gradients = false;
  bool stages_weights = false;
  bool streams_state = false;
  bool reads_file = false;
  for (const Subgroup& s : plan_.subgroups) {
    largest = std::max(largest, s.count());
    fp32_weights |= s.fp32_weights;
    sends_gradients |= !s.gradient_on_device;
    stages_weights |= plan_.stages_weights(s);
    streams_state |= s.path() == UpdatePath::streamed;
    reads_file |= s.tier == Tier::file;
  }
  const std::int64_t quarter = round_up((largest + 3) / 4, layout_quantum);
  const std::int64_t most = small_pieces ? smallest_piece : largest_piece;
  const int in_flight = small_pieces ? fewest_pieces_in_flight : pieces_in_flight;
  plan_.piece_elements = std::min(largest, std::clamp(quarter, smallest_piece, most));
  if (fp32_weights) plan_.piece_elements = std::max(plan_.piece_elements, 4 * layout_quantum);  // see Plan::piece_of
  plan_.staging_pieces = sends_gradients || stages_weights ? in_flight : 0;
  plan_.state_buffers = streams_state ? in_flight : 0;
  plan_.file_buffers = reads_file ? file_pieces_in_flight : 0;
}

void PlanBuilder::book_rows() {
  MemoryRows rows(plan_.memory);
  MemoryLayout out(layout_, plan_, rows);
  out.on_device();
  rows.add("spare", Place::device, plan_.spare_device_memory);
  out.on_host(HostStates::by_subgroup);
  rows.add("spare", Place::pinned, plan_.spare_host_memory);
}

}  // namespace tandem
