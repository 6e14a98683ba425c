// The engine's steps and passes: what is held, what is emitted, and the public face.
#include "offload/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "core/ops/update_kernels.hpp"
#include "offload/engine_impl.hpp"

namespace tandem {
namespace {

constexpr std::int64_t initial_piece = std::int64_t{1} << 20;  // values asked for at a time: 4 MiB

/// What a rank says of the plan that it is to go on with.
struct PlanOfRank {
  enum class Fits : std::uint64_t { yes, no_room, no };
  Fits fits = Fits::yes;
  std::array<unsigned char, 16> kind{};  ///< hash of what all plans have in common

  void require_as(const PlanOfRank& first, int rank) const {
    constexpr const char* advice = "make the plans of all ranks with the same options and ceilings";
    if (fits == Fits::no_room) throw PlanError(fmt::format("rank {} has no room for its plan", rank), {}, advice);
    if (fits == Fits::no) throw MisuseError(fmt::format("the plan of rank {} is not for its engine", rank), {}, advice);
    if (kind == first.kind) return;
    throw MisuseError(fmt::format("the plan of rank {} is not of one kind with that of rank 0", rank), {}, advice);
  }
};

}  // namespace

std::span<const Lane> worker_lanes(const Plan& plan) noexcept {
  static constexpr std::array lanes{Lane::cpu, Lane::file_read, Lane::file_write};
  return std::span(lanes).first(plan.file_buffers > 0 ? lanes.size() : 1);
}

void require_plan_of(const ParameterLayout& layout, const Plan& plan) {
  if (plan.storage_hash != layout.storage_hash()) {
    throw MisuseError("the plan was made for another layout", {}, "make one of this layout");
  }
}

void OffloadEngine::Impl::require_made_for(const Plan& plan, const ParameterLayout& layout,
                                           const OffloadOptions& options, Rank own) {
  check_options(layout, options);
  require_plan_of(layout, plan);
  if (plan.state != options.state || plan.max_micro_batches != options.max_micro_batches) {
    const auto words = [](StateFormat state, int micro_batches) {
      return fmt::format("{} state and {} micro-batches", name_of(state), micro_batches);
    };
    throw MisuseError("the plan was made with other options",
                      fmt::format("it is for {}, the options have {}", words(plan.state, plan.max_micro_batches),
                                  words(options.state, options.max_micro_batches)),
                      "give the engine those that the plan was made with");
  }
  if (plan.rank != own || options.rank != own) {
    const auto words = [](Rank rank) { return fmt::format("rank {} of {}", rank.index, rank.count); };
    throw MisuseError("the plan is another rank's",
                      fmt::format("it is for {}, the options are for {}, the group has the engine as {}",
                                  words(plan.rank), words(options.rank), words(own)));
  }
}

const Plan& OffloadEngine::Impl::checked(const Plan& plan, const ParameterLayout& layout, const OffloadOptions& options,
                                         Group* group) {
  const Rank own = group == nullptr ? Rank{} : group->rank();
  agree_on(group, plan, [&] { require_made_for(plan, layout, options, own); });
  return plan;
}

/// Ranks exchange what they have in the order in which their plans lower: where `require_fit` throws on one of them,
/// or plans are not of one kind, this throws on all.
void OffloadEngine::Impl::agree_on(Group* group, const Plan& plan, const std::function<void()>& require_fit) {
  if (group == nullptr) return require_fit();
  std::vector<PlanOfRank> all(static_cast<std::size_t>(group->rank().count));
  PlanOfRank& own = all[static_cast<std::size_t>(group->rank().index)];
  std::exception_ptr refusal;
  try {
    require_fit();
  } catch (const PlanError&) {
    refusal = std::current_exception();
    own.fits = PlanOfRank::Fits::no_room;
  } catch (const Error&) {
    refusal = std::current_exception();
    own.fits = PlanOfRank::Fits::no;
  }
  const std::string text = plan.common_text();
  Hash128 hash;
  hash.add(text.data(), text.size());
  own.kind = hash.bytes();
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    group->broadcast(Channel::engine, static_cast<int>(rank), std::as_writable_bytes(std::span(&all[rank], 1)));
  }
  if (refusal) std::rethrow_exception(refusal);
  for (std::size_t rank = 0; rank < all.size(); ++rank) all[rank].require_as(all[0], static_cast<int>(rank));
}

/// Other ranks would wait for what does not come.
void OffloadEngine::Impl::leave_step(std::string_view what) {
  abandoned_ = true;
  if (group_ != nullptr) give_up(std::make_exception_ptr(DeviceError(what)));
}

/// For good: waits for what is in flight.
void OffloadEngine::Impl::end() {
  if (mode_ == Mode::step) leave_step("an engine ended inside a step");
  wait();
}

void OffloadEngine::Impl::require_idle(const char* what) {
  executor_.require_good();
  if (mode_ == Mode::step && abandoned_) abort_step();
  if (mode_ == Mode::idle) return;
  const bool step = mode_ == Mode::step;
  throw MisuseError(fmt::format("{} inside {}", what, step ? "a step" : "an evaluation"), {},
                    step ? "end it, or call abort_step" : "let its scope end");
}

/// What is held is never done: whoever waited for it would wait for ever.
void OffloadEngine::Impl::require_nothing_held(const char* what) const {
  if (!weights_.empty() || !gradients_.empty()) {
    throw MisuseError(fmt::format("{} while a layer is held", what), {}, "let guards go first");
  }
}

void OffloadEngine::Impl::wait() {
  require_nothing_held("waiting for updates");
  executor_.drain("waiting for updates");
}

void OffloadEngine::Impl::submit() {
  if (!tasks_.empty()) executor_.submit(tasks_);
}

void OffloadEngine::Impl::prefetch() {
  if (options_.overlap) lowering_->prefetch(tasks_);
}

// -- steps -----------------------------------------------------------------------------------------------

void OffloadEngine::Impl::begin_step(const StepOptions& options) {
  require_idle("begin_step");
  require_state();
  if (!std::isfinite(options.lr) || !std::isfinite(options.gradient_scale) || !(options.max_grad_norm >= 0.0)) {
    throw MisuseError(fmt::format("a step of lr {}, gradient scale {}, clipped at {}", options.lr,
                                  options.gradient_scale, options.max_grad_norm),
                      "the first two are finite, the last is not negative");
  }
  if (options.micro_batches < 1 || options.micro_batches > plan_.max_micro_batches) {
    throw MisuseError(fmt::format("a step of {} micro-batches", options.micro_batches),
                      fmt::format("the plan allows 1 to {}", plan_.max_micro_batches),
                      "plan with OffloadOptions::max_micro_batches");
  }
  step_options_ = options;
  mode_ = Mode::step;
  stalled_until(0.0);  // of a step that was abandoned
  lowering_->forget_before(executor_.oldest());
  // Nothing of a step need wait for its norm where that neither scales nor takes back an update.
  update_in_backward_ = options.max_grad_norm <= 0.0 && options_.on_nonfinite == OnNonfinite::stop;
  lowering_->begin_step(options.micro_batches, update_in_backward_);
  if (update_in_backward_) set_update(options.gradient_scale);
  prefetch();
  submit();
}

/// Of the caller's streams, in fetches up to `end`.
double OffloadEngine::Impl::stalled_until(double end) {
  try {
    return stalls_.take(end);
  } catch (...) {  // one of them stands still for good
    give_up(std::current_exception());
    throw;
  }
}

void OffloadEngine::Impl::abort_step() {
  if (mode_ != Mode::step) throw MisuseError("abort_step without a step");
  require_nothing_held("abort_step");
  mode_ = Mode::idle;  // also where what failed is thrown again
  abandoned_ = false;
  executor_.drain("abandoning the step");
  if (update_in_backward_ && !lowering_->norm_tasks().empty()) state_ = StateIs::unfinished;
  lowering_->end_pass();
}

/// A layer's blocks in order, whatever subgroups they lie in, and whichever ranks have them: each goes on from the sum
/// of those before it.
double OffloadEngine::Impl::squares_of(int layer) {
  if (group_ == nullptr) return add_squares(layer, 0.0);
  double sum = 0.0;
  for_all_ranks([&] {
    for (int rank = 0; rank < group_->rank().count; ++rank) {
      if (rank == group_->rank().index) sum = add_squares(layer, sum);
      group_->broadcast(Channel::engine, rank, std::as_writable_bytes(std::span(&sum, 1)));
    }
  });
  return sum;
}

double OffloadEngine::Impl::add_squares(int layer, double sum) const {
  const auto& all = plan_.subgroups;
  const auto first = std::ranges::lower_bound(all, layer, {}, &Subgroup::layer);
  const auto last = std::ranges::upper_bound(first, all.end(), layer, {}, &Subgroup::layer);
  for (auto subgroup = first; subgroup != last; ++subgroup) {
    const double* norms = storage_.subgroup(static_cast<int>(subgroup - all.begin())).host_norm;
    const std::int64_t blocks = subgroup->count() / layout_quantum;
    for (std::int64_t b = 0; b < blocks; ++b) sum += norms[b];
  }
  return sum;
}

/// Waits for the gradients. Each addition waits for the one before, several milliseconds for billions of parameters,
/// and nothing is updated before the last: so each layer's blocks are added while backward goes on below it.
double OffloadEngine::Impl::gradient_norm() {
  layer_squares_.assign(static_cast<std::size_t>(layout_.layer_count()), 0.0);
  std::span<const TaskId> tasks = lowering_->norm_tasks();
  std::size_t begin = 0;
  for (const auto& [layer, end] : lowering_->complete_layers()) {
    executor_.wait_done(tasks.subspan(begin, end - begin), "waiting for gradients");
    layer_squares_[static_cast<std::size_t>(layer)] = squares_of(layer);
    begin = end;
  }
  return std::sqrt(std::accumulate(layer_squares_.begin(), layer_squares_.end(), 0.0));
}

StepReport OffloadEngine::Impl::end_step() {
  if (mode_ != Mode::step) throw MisuseError("end_step without a step");
  require_nothing_held("end_step");
  if (abandoned_) throw MisuseError("end_step of an abandoned step", {}, "call abort_step");
  if (!lowering_->gradients_complete()) {
    throw MisuseError("end_step before every layer has committed its gradients in every micro-batch");
  }
  StepReport report;
  report.gradient_norm = std::abs(step_options_.gradient_scale) * gradient_norm();
  report.exposed_update_seconds = stalled_until(update_ended_);
  const bool finite = std::isfinite(report.gradient_norm);
  lowering_->end_pass();
  mode_ = Mode::idle;
  if (!finite && options_.on_nonfinite == OnNonfinite::stop) {
    if (update_in_backward_) state_ = StateIs::unfinished;
    throw TrainingError(fmt::format("update {}: the gradient norm is not finite", step_ + 1), {},
                        "lower the learning rate, or go on from the last checkpoint");
  }
  report.skipped = !finite;
  if (finite) {
    if (!update_in_backward_) set_update(step_options_.gradient_scale * clip_factor(report.gradient_norm));
    ++step_;
    lowering_->update(tasks_);
    submit();
    if (!options_.overlap) report.exposed_update_seconds += executor_.drain("waiting for updates");
  } else {
    ++skipped_;
  }
  report.step = step_;
  return report;
}

double OffloadEngine::Impl::clip_factor(double norm) const {
  const double limit = step_options_.max_grad_norm;
  return limit > 0.0 && norm > limit ? limit / norm : 1.0;
}

void OffloadEngine::Impl::set_update(double scale) {
  runner_.set_update({options_.adamw, step_ + 1, options_.seed, step_options_.lr, scale}, lowering_->step());
}

void OffloadEngine::Impl::note_submitted(const Task& task) {
  if (is_update(task.kind) && updates_left_++ == 0) update_began_ = trace_now();
}

void OffloadEngine::Impl::note_done(const Task& task) {
  if (!is_update(task.kind) || --updates_left_ > 0) return;
  update_ended_ = trace_now();
  update_seconds_ = update_seconds_ + (update_ended_ - update_began_);
}

void OffloadEngine::Impl::begin_evaluation() {
  require_idle("evaluation");
  require_state();
  mode_ = Mode::evaluation;
  lowering_->forget_before(executor_.oldest());
  lowering_->begin_evaluation();
  prefetch();
  submit();
}

void OffloadEngine::Impl::end_evaluation() noexcept {
  lowering_->end_pass();
  mode_ = Mode::idle;
}

// -- weights and gradients ---------------------------------------------------------------------------------

template <class Held>
Held OffloadEngine::Impl::take(std::vector<Held>& list, std::uint64_t ticket) {
  const auto it = std::find_if(list.begin(), list.end(), [&](const Held& h) { return h.ticket == ticket; });
  if (it == list.end()) throw MisuseError("a guard was given back twice, or belongs to another engine");
  Held held = std::move(*it);
  list.erase(it);
  return held;
}

LayerBases OffloadEngine::Impl::bases_of(const LayerUse& use) const {
  LayerBases bases;
  for (const WeightPlace& place : use.weights) {
    bases.add(place.layer,
              place.buffer >= 0 ? storage_.weight_buffer(place.buffer) : storage_.resident_weights(place.layer));
  }
  return bases;
}

WeightsGuard OffloadEngine::Impl::fetch(int layer, StreamView stream) {
  if (mode_ == Mode::idle) throw MisuseError("fetch outside a step and an evaluation");
  device_.require_own(stream);
  HeldWeights held;
  held.ticket = next_ticket_++;
  held.stream = stream;
  held.exceptions = std::uncaught_exceptions();
  held.use = lowering_->use(layer, tasks_);
  prefetch();
  submit();
  weights_.push_back(held);
  WeightsGuard guard(&engine_, &layout_, layer, held.ticket, bases_of(held.use), stream);
  const bool updating = mode_ == Mode::step && updates_left_ > 0;
  const std::uint32_t place = updating ? stalls_.reach(stream) : 0;
  executor_.begin_caller_task(held.use.id, stream, "fetching layer");
  if (updating) stalls_.leave(place, stream);
  return guard;
}

void OffloadEngine::Impl::also_used(std::uint64_t ticket, StreamView stream) {
  device_.require_own(stream);
  for (HeldWeights& held : weights_) {
    if (held.ticket != ticket) continue;
    executor_.begin_caller_task(held.use.id, stream, "fetching layer");
    held.also.push_back(stream);
    return;
  }
  throw MisuseError("a guard was used after it was given back");
}

void OffloadEngine::Impl::release(std::uint64_t ticket, StreamView stream) {
  const HeldWeights held = take(weights_, ticket);
  const bool unwinding = std::uncaught_exceptions() > held.exceptions;  // the caller
  if (unwinding && mode_ == Mode::step) leave_step("an exception left a step");
  for (const StreamView other : held.also) {
    const Event joined = device_.make_event();
    device_.record(joined, other);
    device_.wait(stream, joined);
  }
  lowering_->release(held.use);
  executor_.finish_caller_task(held.use.id, stream);
  prefetch();
  submit();
}

/// Two layers that share parameters add to one buffer, which only one stream does in order.
void OffloadEngine::Impl::require_one_stream(int layer, StreamView stream) const {
  const std::vector<int>& borrows = layout_.layer(layer).borrows;
  for (const HeldGradients& held : gradients_) {
    if (held.stream == stream) continue;
    for (const GradientPlace& place : held.use.gradients) {
      if (place.layer != layer && std::find(borrows.begin(), borrows.end(), place.layer) == borrows.end()) continue;
      throw MisuseError(fmt::format("gradients of layers '{}' and '{}', which share parameters, on two streams",
                                    layout_.layer(held.use.layer).name, layout_.layer(layer).name),
                        {}, "commit the one before asking for the other");
    }
  }
}

GradientsGuard OffloadEngine::Impl::gradients(int layer, StreamView stream) {
  if (mode_ != Mode::step) throw MisuseError("gradients outside a step");
  device_.require_own(stream);
  if (layer >= 0 && layer < layout_.layer_count()) require_one_stream(layer, stream);
  HeldGradients held;
  held.ticket = next_ticket_++;
  held.stream = stream;
  held.use = lowering_->gradients(layer, tasks_);
  submit();
  gradients_.push_back(held);
  LayerBases bases;
  for (const GradientPlace& place : held.use.gradients) bases.add(place.layer, storage_.gradient_buffer(place.buffer));
  GradientsGuard guard(&engine_, &layout_, layer, held.ticket, bases);
  executor_.begin_caller_task(held.use.id, stream, "gradients of layer");
  for (const GradientPlace& place : held.use.gradients) {
    if (place.fresh) clear_gradients(place, stream);
  }
  return guard;
}

/// What callers add to, and the padding of what they write.
void OffloadEngine::Impl::clear_gradients(const GradientPlace& place, StreamView stream) {
  const Layer& layer = layout_.layer(place.layer);
  std::byte* const buffer = storage_.gradient_buffer(place.buffer);
  const auto clear = [&](std::int64_t begin, std::int64_t end) {
    const std::size_t first = layer.gradient_offset(begin), last = layer.gradient_offset(end);
    if (last > first) device_.fill_zero(buffer + first, last - first, stream);
  };
  clear(0, layer.summed_elements);
  for (const Parameter& p : layer.parameters) {
    if (p.tied() || !p.options.trainable || p.offset < layer.summed_elements) continue;
    clear(p.offset + p.count, p.offset + p.padded_count);
  }
}

void OffloadEngine::Impl::commit(std::uint64_t ticket, StreamView stream) {
  device_.require_own(stream);
  const HeldGradients held = take(gradients_, ticket);
  lowering_->commit(held.use, tasks_);
  submit();
  executor_.finish_caller_task(held.use.id, stream);
}

void OffloadEngine::Impl::abandon(std::uint64_t ticket) {
  const HeldGradients held = take(gradients_, ticket);
  leave_step("gradients were not committed");
  lowering_->abandon(held.use);
  executor_.finish_caller_task(held.use.id, held.stream);
}

EngineCounters OffloadEngine::Impl::counters() {
  EngineCounters counters = runner_.counters();
  counters.busy = executor_.busy();
  counters.skipped_steps = skipped_;
  counters.update_seconds = update_seconds_;
  counters.save_wait_seconds = executor_.save_wait_seconds();
  return counters;
}

// -- the public face ---------------------------------------------------------------------------------------

OffloadEngine::OffloadEngine(Device& device, const ParameterLayout& layout, const OffloadOptions& options,
                             const Plan& plan, Trace* trace, Group* group) try
    : impl_(std::make_unique<Impl>(*this, device, layout, options, plan, trace, group)) {
} catch (...) {
  if (group != nullptr) group->fail(std::current_exception());
}

OffloadEngine::~OffloadEngine() {
  try {
    impl_->end();
  } catch (...) {  // of any type; whoever waited for the work has had it, or nobody wants it any more
  }
}

void OffloadEngine::initialize(const std::function<void(const Parameter&, std::span<float>)>& values) {
  const auto whole = [&values](const Parameter& p, std::int64_t, std::span<float> to) { values(p, to); };
  impl_->initialize(whole, std::numeric_limits<std::int64_t>::max());
}
void OffloadEngine::initialize(const std::function<void(const Parameter&, std::int64_t, std::span<float>)>& values) {
  impl_->initialize(values, initial_piece);
}
void OffloadEngine::begin_step(const StepOptions& options) { impl_->begin_step(options); }
StepReport OffloadEngine::end_step() { return impl_->end_step(); }
void OffloadEngine::abort_step() { impl_->abort_step(); }
WeightsGuard OffloadEngine::fetch(int layer, StreamView stream) { return impl_->fetch(layer, stream); }
GradientsGuard OffloadEngine::gradients(int layer, StreamView stream) { return impl_->gradients(layer, stream); }
void OffloadEngine::wait() { impl_->wait(); }
void OffloadEngine::read(const Parameter& parameter, StateArray array, std::span<float> values) {
  impl_->read(parameter, array, values);
}
void OffloadEngine::write(const Parameter& parameter, StateArray array, std::span<const float> values) {
  impl_->write(impl_->owned(parameter, Impl::Extent::whole, 0, values.size()), array, 0, values);
}
void OffloadEngine::write(const Parameter& parameter, StateArray array, std::int64_t first,
                          std::span<const float> values) {
  impl_->write(parameter, array, first, values);
}
std::int64_t OffloadEngine::step() const noexcept { return impl_->step_; }
void OffloadEngine::set_step(std::int64_t step) { impl_->set_step(step); }
void OffloadEngine::begin_load() { impl_->begin_load("load"); }
void OffloadEngine::adopt(const Plan& plan) { impl_->adopt(plan); }
OffloadEngine::SaveScope OffloadEngine::begin_save() { return SaveScope(impl_->begin_save()); }
std::string OffloadEngine::state_digest() { return impl_->digest(); }
Device& OffloadEngine::device() const noexcept { return impl_->device_; }
Group* OffloadEngine::group() const noexcept { return impl_->group_; }
const Plan& OffloadEngine::plan() const noexcept { return impl_->plan_; }
const ParameterLayout& OffloadEngine::layout() const noexcept { return impl_->layout_; }
EngineCounters OffloadEngine::counters() const { return impl_->counters(); }
std::size_t OffloadEngine::device_bytes() const noexcept { return impl_->storage_.device_bytes(); }
std::size_t OffloadEngine::host_bytes() const noexcept { return impl_->storage_.host_bytes(); }
void OffloadEngine::also_used(std::uint64_t ticket, StreamView stream) { impl_->also_used(ticket, stream); }
void OffloadEngine::release(std::uint64_t ticket, StreamView stream) noexcept {
  try {
    impl_->release(ticket, stream);
  } catch (...) {  // of any type, from a stream of the caller's: the next call reports it
    impl_->give_up(std::current_exception());
  }
}
void OffloadEngine::commit(std::uint64_t ticket, StreamView stream) { impl_->commit(ticket, stream); }
void OffloadEngine::abandon(std::uint64_t ticket) noexcept {
  try {
    impl_->abandon(ticket);
  } catch (...) {  // as above
    impl_->give_up(std::current_exception());
  }
}

OffloadEngine::SaveScope::SaveScope(std::shared_ptr<SaveReader> reader) : reader_(std::move(reader)) {}
OffloadEngine::SaveScope::SaveScope(SaveScope&&) noexcept = default;
OffloadEngine::SaveScope::~SaveScope() = default;
SaveReader& OffloadEngine::SaveScope::reader() const {
  if (!reader_) throw MisuseError("a save scope was read after it was moved from");
  return *reader_;
}
void OffloadEngine::SaveScope::read(const Parameter& parameter, StateArray array, std::int64_t first,
                                    std::span<float> values) {
  reader().read(parameter, array, first, values);
}
void OffloadEngine::SaveScope::read_own(const Parameter& parameter, StateArray array, std::int64_t first,
                                        std::span<float> values) {
  reader().read_own(parameter, array, first, values);
}

OffloadEngine::Evaluation::Evaluation(OffloadEngine& engine) : engine_(engine) { engine.impl_->begin_evaluation(); }
OffloadEngine::Evaluation::~Evaluation() { engine_.impl_->end_evaluation(); }

}  // namespace tandem
