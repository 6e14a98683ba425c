#include "offload/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "core/update_kernels.hpp"
#include "offload/executor.hpp"
#include "offload/save_reader.hpp"
#include "offload/state_access.hpp"
#include "offload/storage.hpp"
#include "offload/task_runner.hpp"
#include "scheduler/unfold.hpp"

namespace tandem {
namespace {

constexpr std::int64_t initial_piece = std::int64_t{1} << 20;  // values asked for at a time: 4 MiB

}  // namespace

class OffloadEngine::Impl {
 public:
  Impl(OffloadEngine& engine, Device& device, const ParameterLayout& layout, const OffloadOptions& options,
       const Plan& plan, Trace* trace)
      : engine_(engine),
        device_(device),
        layout_(layout),
        options_(options),
        plan_(checked(plan, layout_)),
        storage_(device, layout_, plan_),
        access_(device, layout_, plan_, storage_),
        unfolder_(std::in_place, layout_, plan_),
        runner_(device, layout_, plan_, storage_),
        executor_(device, layout_, runner_, trace, options.watchdog_seconds, options.overlap) {
    if (!device.pins()) plan_.memory.unpin();
    executor_.on_submit = [this](const Task& task) { note_submitted(task); };
    executor_.on_done = [this](const Task& task) { note_done(task); };
  }

  void initialize(const std::function<void(const Parameter&, std::int64_t, std::span<float>)>& values,
                  std::int64_t largest_piece);
  void begin_step(const StepOptions& options);
  StepReport end_step();
  void abort_step();
  void begin_evaluation();
  void end_evaluation() noexcept;
  void wait();
  void give_up(std::exception_ptr error) { executor_.give_up(std::move(error)); }
  enum class Extent : std::uint8_t { part, whole };
  const Parameter& owned(const Parameter& parameter, Extent extent, std::int64_t first, std::size_t count) const;
  void read(const Parameter& parameter, StateArray array, std::span<float> values);
  void write(const Parameter& parameter, StateArray array, std::int64_t first, std::span<const float> values);
  void set_step(std::int64_t step);
  void adopt(const Plan& plan);
  std::shared_ptr<SaveReader> begin_save();
  std::string digest();

  WeightsGuard fetch(int layer, StreamView stream);
  GradientsGuard gradients(int layer, StreamView stream);
  void also_used(std::uint64_t ticket, StreamView stream);
  void release(std::uint64_t ticket, StreamView stream);
  void commit(std::uint64_t ticket, StreamView stream);
  void abandon(std::uint64_t ticket);

  EngineCounters counters();

  OffloadEngine& engine_;
  Device& device_;
  const ParameterLayout layout_;
  const OffloadOptions options_;
  Plan plan_;
  Storage storage_;
  StateAccess access_;
  std::int64_t step_ = 0;

 private:
  enum class Mode : std::uint8_t { idle, step, evaluation };
  struct HeldWeights {
    std::uint64_t ticket = 0;
    Visit visit;
    StreamView stream;
    std::vector<StreamView> also;
    int exceptions = 0;  ///< in flight when it was asked for
  };
  struct HeldGradients {
    std::uint64_t ticket = 0;
    GradientVisit visit;
    StreamView stream;
  };

  static const Plan& checked(const Plan& plan, const ParameterLayout& layout);
  void require_idle(const char* what);
  void require_nothing_held(const char* what) const;
  void require_one_stream(int layer, StreamView stream) const;
  void submit();
  void prefetch();
  double gradient_norm() const;
  double clip_factor(double norm) const;
  void set_update(double scale);
  void clear_gradients(const GradientPlace& place, StreamView stream);
  void refuse_half_updated() const;
  void note_submitted(const Task& task);
  void note_done(const Task& task);
  LayerBases bases_of(const Visit& visit) const;
  template <class Held>
  Held take(std::vector<Held>& list, std::uint64_t ticket);

  std::optional<Unfolder> unfolder_;  ///< never empty; another one for another plan
  TaskRunner runner_;
  TaskList tasks_;
  std::vector<HeldWeights> weights_;
  std::vector<HeldGradients> gradients_;
  std::uint64_t next_ticket_ = 1;
  Mode mode_ = Mode::idle;
  StepOptions step_options_;
  bool abandoned_ = false;
  bool update_in_backward_ = false;  ///< of the open step
  bool half_updated_ = false;        ///< a step that updated in backward could not be finished
  double exposed_ = 0.0;
  std::uint64_t skipped_ = 0;
  std::weak_ptr<SaveReader> saving_;

  // Under the executor's lock; the sum is read at any time.
  double update_began_ = 0.0;
  std::int64_t updates_left_ = 0;
  std::atomic<double> update_seconds_ = 0.0;

  Executor executor_;  // last: it stops before what its tasks use goes
};

const Plan& OffloadEngine::Impl::checked(const Plan& plan, const ParameterLayout& layout) {
  if (plan.storage_hash != layout.storage_hash()) {
    throw MisuseError("the plan was made for another layout", {}, "make one of this layout");
  }
  return plan;
}

void OffloadEngine::Impl::require_idle(const char* what) {
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

/// The engine's own of a parameter, of which `count` elements from `first` on were given.
const Parameter& OffloadEngine::Impl::owned(const Parameter& parameter, Extent extent, std::int64_t first,
                                            std::size_t count) const {
  const Parameter& p = layout_.parameter(parameter.full_name);
  const bool inside = first >= 0 && first <= p.count && count <= static_cast<std::size_t>(p.count - first);
  if (!inside || (extent == Extent::whole && count < static_cast<std::size_t>(p.count))) {
    throw MisuseError("parameter " + p.full_name,
                      fmt::format("has {} elements, {} from {} on were given", p.count, count, first));
  }
  return p;
}

void OffloadEngine::Impl::refuse_half_updated() const {
  if (half_updated_) {
    throw TrainingError("the state is updated in part",
                        "a step that updates during backward, or a change of plan, did not come to its end",
                        "go on from the last checkpoint");
  }
}

void OffloadEngine::Impl::submit() {
  if (!tasks_.empty()) executor_.submit(tasks_);
}

void OffloadEngine::Impl::prefetch() {
  if (options_.overlap) unfolder_->prefetch(tasks_);
}

// -- state -----------------------------------------------------------------------------------------------

void OffloadEngine::Impl::initialize(
    const std::function<void(const Parameter&, std::int64_t, std::span<float>)>& values, std::int64_t largest_piece) {
  require_idle("initialize");
  wait();
  half_updated_ = false;
  unfolder_->invalidate_weights();
  std::vector<float> buffer;
  for (const Parameter* p : layout_.owned_parameters()) {
    for (std::int64_t first = 0; first < p->count; first += largest_piece) {
      buffer.assign(static_cast<std::size_t>(std::min(largest_piece, p->count - first)), 0.0F);
      values(*p, first, buffer);
      access_.write(*p, StateArray::master, first, buffer);
      std::fill(buffer.begin(), buffer.end(), 0.0F);
      access_.write(*p, StateArray::m, first, buffer);
      access_.write(*p, StateArray::v, first, buffer);
    }
  }
  step_ = 0;
}

void OffloadEngine::Impl::read(const Parameter& parameter, StateArray array, std::span<float> values) {
  refuse_half_updated();
  wait();
  access_.read(owned(parameter, Extent::whole, 0, values.size()), array, 0, values);
}

void OffloadEngine::Impl::write(const Parameter& parameter, StateArray array, std::int64_t first,
                                std::span<const float> values) {
  require_idle("write");
  wait();
  unfolder_->invalidate_weights();
  access_.write(owned(parameter, Extent::part, first, values.size()), array, first, values);
}

void OffloadEngine::Impl::set_step(std::int64_t step) {
  require_idle("set_step");
  if (step < 0) throw MisuseError("a negative step");
  half_updated_ = false;
  step_ = step;
}

void OffloadEngine::Impl::adopt(const Plan& plan) {
  require_idle("adopt");
  refuse_half_updated();
  wait();
  checked(plan, layout_);
  if (plan.state != plan_.state) {
    throw MisuseError(fmt::format("a plan for {} state", name_of(plan.state)),
                      fmt::format("the engine's is {}", name_of(plan_.state)), "save, and load under the other format");
  }
  storage_.require_room_for(plan);
  half_updated_ = true;  // until all is where it belongs
  storage_.carve_anew(device_, layout_, plan_, plan);
  half_updated_ = false;
  plan_ = plan;
  if (!device_.pins()) plan_.memory.unpin();
  unfolder_.emplace(layout_, plan_, unfolder_->count());
}

std::shared_ptr<SaveReader> OffloadEngine::Impl::begin_save() {
  require_idle("begin_save");
  refuse_half_updated();
  if (!saving_.expired()) throw MisuseError("begin_save while another save is under way", {}, "let its scope go first");
  unfolder_->save(tasks_);
  auto reader = std::make_shared<SaveReader>(executor_, access_, std::vector<Task>(tasks_.begin(), tasks_.end()));
  submit();
  saving_ = reader;
  return reader;
}

std::string OffloadEngine::Impl::digest() {
  require_idle("state_digest");
  refuse_half_updated();
  wait();
  return access_.digest();
}

// -- steps -----------------------------------------------------------------------------------------------

void OffloadEngine::Impl::begin_step(const StepOptions& options) {
  require_idle("begin_step");
  refuse_half_updated();
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
  exposed_ = 0.0;
  unfolder_->forget_before(executor_.oldest());
  // Nothing of a step need wait for its norm where that neither scales nor takes back an update.
  update_in_backward_ = options.max_grad_norm <= 0.0 && options_.on_nonfinite == OnNonfinite::stop;
  unfolder_->begin_step(options.micro_batches, update_in_backward_);
  if (update_in_backward_) set_update(options.gradient_scale);
  prefetch();
  submit();
}

void OffloadEngine::Impl::abort_step() {
  if (mode_ != Mode::step) throw MisuseError("abort_step without a step");
  require_nothing_held("abort_step");
  mode_ = Mode::idle;  // also where what failed is thrown again
  abandoned_ = false;
  executor_.drain("abandoning the step");
  half_updated_ = update_in_backward_ && !unfolder_->norm_tasks().empty();
  unfolder_->end_pass();
}

double OffloadEngine::Impl::gradient_norm() const {
  double sum = 0.0;
  for (std::size_t i = 0; i < plan_.subgroups.size(); ++i) {
    const double* norms = storage_.subgroup(static_cast<int>(i)).host_norm;
    const std::int64_t blocks = plan_.subgroups[i].count() / layout_quantum;
    for (std::int64_t b = 0; b < blocks; ++b) sum += norms[b];
  }
  return std::sqrt(sum);
}

StepReport OffloadEngine::Impl::end_step() {
  if (mode_ != Mode::step) throw MisuseError("end_step without a step");
  require_nothing_held("end_step");
  if (abandoned_) throw MisuseError("end_step of an abandoned step", {}, "call abort_step");
  if (!unfolder_->gradients_complete()) {
    throw MisuseError("end_step before every layer has committed its gradients in every micro-batch");
  }
  executor_.wait_done(unfolder_->norm_tasks(), "waiting for gradients");
  StepReport report;
  report.gradient_norm = std::abs(step_options_.gradient_scale) * gradient_norm();
  report.exposed_update_seconds = exposed_;
  const bool finite = std::isfinite(report.gradient_norm);
  unfolder_->end_pass();
  mode_ = Mode::idle;
  if (!finite && options_.on_nonfinite == OnNonfinite::stop) {
    half_updated_ = update_in_backward_;
    throw TrainingError(fmt::format("update {}: the gradient norm is not finite", step_ + 1), {},
                        "lower the learning rate, or go on from the last checkpoint");
  }
  report.skipped = !finite;
  if (finite) {
    if (!update_in_backward_) set_update(step_options_.gradient_scale * clip_factor(report.gradient_norm));
    ++step_;
    unfolder_->update(tasks_);
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
  runner_.set_update({options_.adamw, step_ + 1, options_.seed, step_options_.lr, scale}, unfolder_->step());
}

void OffloadEngine::Impl::note_submitted(const Task& task) {
  if (is_update(task.kind) && updates_left_++ == 0) update_began_ = trace_now();
}

void OffloadEngine::Impl::note_done(const Task& task) {
  if (is_update(task.kind) && --updates_left_ == 0) update_seconds_ = update_seconds_ + (trace_now() - update_began_);
}

void OffloadEngine::Impl::begin_evaluation() {
  require_idle("evaluation");
  refuse_half_updated();
  mode_ = Mode::evaluation;
  unfolder_->forget_before(executor_.oldest());
  unfolder_->begin_evaluation();
  prefetch();
  submit();
}

void OffloadEngine::Impl::end_evaluation() noexcept {
  unfolder_->end_pass();
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

LayerBases OffloadEngine::Impl::bases_of(const Visit& visit) const {
  LayerBases bases;
  for (const WeightPlace& place : visit.weights) {
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
  held.visit = unfolder_->visit(layer, tasks_);
  prefetch();
  submit();
  weights_.push_back(held);
  WeightsGuard guard(&engine_, &layout_, layer, held.ticket, bases_of(held.visit), stream);
  exposed_ += executor_.begin_caller_task(held.visit.id, stream, "fetching layer");
  return guard;
}

void OffloadEngine::Impl::also_used(std::uint64_t ticket, StreamView stream) {
  device_.require_own(stream);
  for (HeldWeights& held : weights_) {
    if (held.ticket != ticket) continue;
    executor_.begin_caller_task(held.visit.id, stream, "fetching layer");
    held.also.push_back(stream);
    return;
  }
  throw MisuseError("a guard was used after it was given back");
}

void OffloadEngine::Impl::release(std::uint64_t ticket, StreamView stream) {
  const HeldWeights held = take(weights_, ticket);
  if (std::uncaught_exceptions() > held.exceptions) abandoned_ = mode_ == Mode::step;  // the caller has lost its way
  for (const StreamView other : held.also) {
    const Event joined = device_.make_event();
    device_.record(joined, other);
    device_.wait(stream, joined);
  }
  unfolder_->release(held.visit);
  executor_.finish_caller_task(held.visit.id, stream);
  prefetch();
  submit();
}

/// Two layers that share parameters add to one buffer, which only one stream does in order.
void OffloadEngine::Impl::require_one_stream(int layer, StreamView stream) const {
  const std::vector<int>& borrows = layout_.layer(layer).borrows;
  for (const HeldGradients& held : gradients_) {
    if (held.stream == stream) continue;
    for (const GradientPlace& place : held.visit.gradients) {
      if (place.layer != layer && std::find(borrows.begin(), borrows.end(), place.layer) == borrows.end()) continue;
      throw MisuseError(fmt::format("gradients of layers '{}' and '{}', which share parameters, on two streams",
                                    layout_.layer(held.visit.layer).name, layout_.layer(layer).name),
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
  held.visit = unfolder_->gradients(layer, tasks_);
  submit();
  gradients_.push_back(held);
  LayerBases bases;
  for (const GradientPlace& place : held.visit.gradients)
    bases.add(place.layer, storage_.gradient_buffer(place.buffer));
  GradientsGuard guard(&engine_, &layout_, layer, held.ticket, bases);
  executor_.begin_caller_task(held.visit.id, stream, "gradients of layer");
  for (const GradientPlace& place : held.visit.gradients) {
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
  unfolder_->commit(held.visit, tasks_);
  submit();
  executor_.finish_caller_task(held.visit.id, stream);
}

void OffloadEngine::Impl::abandon(std::uint64_t ticket) {
  const HeldGradients held = take(gradients_, ticket);
  abandoned_ = true;
  unfolder_->abandon(held.visit);
  executor_.finish_caller_task(held.visit.id, held.stream);
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
                             const Plan& plan, Trace* trace)
    : impl_(std::make_unique<Impl>(*this, device, layout, options, plan, trace)) {}

OffloadEngine::~OffloadEngine() {
  try {
    impl_->wait();
  } catch (const std::exception&) {  // whoever waited for the work has had it, or nobody wants it any more
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
void OffloadEngine::adopt(const Plan& plan) { impl_->adopt(plan); }
OffloadEngine::SaveScope OffloadEngine::begin_save() { return SaveScope(impl_->begin_save()); }
std::string OffloadEngine::state_digest() { return impl_->digest(); }
Device& OffloadEngine::device() const noexcept { return impl_->device_; }
const Plan& OffloadEngine::plan() const noexcept { return impl_->plan_; }
const ParameterLayout& OffloadEngine::layout() const noexcept { return impl_->layout_; }
EngineCounters OffloadEngine::counters() const { return impl_->counters(); }
std::size_t OffloadEngine::device_bytes() const noexcept { return impl_->storage_.device_bytes(); }
std::size_t OffloadEngine::host_bytes() const noexcept { return impl_->storage_.host_bytes(); }
void OffloadEngine::also_used(std::uint64_t ticket, StreamView stream) { impl_->also_used(ticket, stream); }
void OffloadEngine::release(std::uint64_t ticket, StreamView stream) noexcept {
  try {
    impl_->release(ticket, stream);
  } catch (const std::exception&) {  // the next call reports it
    impl_->give_up(std::current_exception());
  }
}
void OffloadEngine::commit(std::uint64_t ticket, StreamView stream) { impl_->commit(ticket, stream); }
void OffloadEngine::abandon(std::uint64_t ticket) noexcept {
  try {
    impl_->abandon(ticket);
  } catch (const std::exception&) {  // as above
    impl_->give_up(std::current_exception());
  }
}

OffloadEngine::SaveScope::SaveScope(std::shared_ptr<SaveReader> reader) : reader_(std::move(reader)) {}
OffloadEngine::SaveScope::SaveScope(SaveScope&&) noexcept = default;
OffloadEngine::SaveScope::~SaveScope() = default;
void OffloadEngine::SaveScope::read(const Parameter& parameter, StateArray array, std::int64_t first,
                                    std::span<float> values) {
  if (!reader_) throw MisuseError("a save scope was read after it was moved from");
  reader_->read(parameter, array, first, values);
}

OffloadEngine::Evaluation::Evaluation(OffloadEngine& engine) : engine_(engine) { engine.impl_->begin_evaluation(); }
OffloadEngine::Evaluation::~Evaluation() { engine_.impl_->end_evaluation(); }

}  // namespace tandem
