#include "offload/engine/engine_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>

#include "core/base/error.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {
namespace {

void require_values_of(const GroupValues& group, const char* call) {
  if (!std::isfinite(group.lr)) throw MisuseError(fmt::format("{} with lr {}", call, group.lr), "it is finite");
  if (!group.adamw) return;
  try {
    check_adamw(*group.adamw);
  } catch (const UsageError& error) {
    throw MisuseError(fmt::format("{}: {}", call, error.what()));
  }
}

bool same(const GroupValues& a, const GroupValues& b) {
  if (a.lr != b.lr || a.adamw.has_value() != b.adamw.has_value()) return false;
  return !a.adamw || (a.adamw->beta1 == b.adamw->beta1 && a.adamw->beta2 == b.adamw->beta2 &&
                      a.adamw->eps == b.adamw->eps && a.adamw->weight_decay == b.adamw->weight_decay);
}

bool same(const UpdateValues& a, const UpdateValues& b) {
  const auto equal = [](const GroupValues& x, const GroupValues& y) { return same(x, y); };
  if (a.scale != b.scale || !std::ranges::equal(a.groups, b.groups, equal)) return false;
  return !a.groups.empty() || same({a.lr, a.adamw}, {b.lr, b.adamw});
}

}  // namespace

void EngineSteps::end() {
  if (pass_.kind == OpenPass::Kind::step) pass_.abandon(parts_, "an engine ended inside a step");
  wait();
}

void EngineSteps::require_idle(const char* what) {
  parts_.executor.require_good();
  if (pass_.kind == OpenPass::Kind::step && pass_.abandoned) abort_step();
  if (pass_.kind == OpenPass::Kind::none) return;
  const bool step = pass_.kind == OpenPass::Kind::step;
  throw MisuseError(fmt::format("{} inside {}", what, step ? "a step" : "an evaluation"), {},
                    step ? "end it, or call abort_step" : "let its scope end");
}

void EngineSteps::wait() {
  parts_.executor.require_good();
  held_.require_none("waiting for updates");
  parts_.executor.drain("waiting for updates");
}

// -- steps -----------------------------------------------------------------------------------------------

void EngineSteps::require_options(const StepOptions& options) const {
  if (!std::isfinite(options.gradient_scale) || !(options.max_grad_norm >= 0.0)) {
    throw MisuseError(
        fmt::format("a step of gradient scale {}, clipped at {}", options.gradient_scale, options.max_grad_norm),
        "the first is finite, the last is not negative");
  }
  require_groups(options.lr, options.adamw, options.groups, "begin_step");
  require_extent(options);
}

void EngineSteps::require_extent(const StepOptions& options) const {
  if (options.micro_batches < 1 || options.micro_batches > parts_.plan.max_micro_batches) {
    throw MisuseError(fmt::format("a step of {} micro-batches", options.micro_batches),
                      fmt::format("the plan allows 1 to {}", parts_.plan.max_micro_batches),
                      "plan with OffloadOptions::max_micro_batches");
  }
  if ((options.open_ended || options.absent != Absent::refuse) && parts_.plan.micro_batches_at_once > 1) {
    throw MisuseError(fmt::format("begin_step of {} step in which {} micro-batches pass through the layers at once",
                                  options.open_ended ? "an open-ended" : "a", parts_.plan.micro_batches_at_once),
                      options.open_ended ? "their number must be known" : "every layer must commit in all of them",
                      "plan with OffloadOptions::micro_batches_at_once = 1");
  }
  if (options.absent != Absent::refuse && updates_in_backward(options)) {
    throw MisuseError("begin_step with absent gradients, and updates in backward",
                      "a step that stops at a gradient that is not finite and does not clip updates in backward",
                      "set StepOptions::decides_at_end");
  }
}

/// Nothing of a step need wait for its norm where that neither scales nor takes back an update.
bool EngineSteps::updates_in_backward(const StepOptions& options) const {
  return options.max_grad_norm <= 0.0 && parts_.options.on_nonfinite == OnNonfinite::stop && !options.decides_at_end;
}

/// Updates run ahead of the norm only by values and gradients that are known to be all there will be.
UpdateTime EngineSteps::time_of_updates(const StepOptions& options) const {
  if (updates_in_backward(options)) return UpdateTime::in_backward;
  const bool known = !options.open_ended && options.absent == Absent::refuse;
  return known && choice_.speculates() && parts_.plan.speculates() ? UpdateTime::speculative : UpdateTime::after_norm;
}

void EngineSteps::begin_speculation() {
  const double scale = std::abs(options_.gradient_scale);
  std::optional<double> most_norm;
  if (options_.max_grad_norm > 0.0 && scale > 0.0) most_norm = options_.max_grad_norm / scale;
  const bool runs = parts_.runner.speculation().begin(settings_of(expected()), parts_.lowering->step(), most_norm);
  if (!runs) update_time_ = UpdateTime::after_norm;
}

/// Counts what becomes of a step.
void EngineSteps::note_outcome(bool as_expected) {
  choice_.note(as_expected);
  if (update_time_ == UpdateTime::speculative) ++(as_expected ? confirmed_ : rolled_back_);
}

/// Emits what makes the state again what it was before the step, where some updates ran ahead.
void EngineSteps::take_back() {
  parts_.runner.speculation().close();
  parts_.lowering->retract(parts_.tasks);
  parts_.submit();
}

void EngineSteps::begin_step(const StepOptions& options) {
  require_idle("begin_step");
  status_.require_whole();
  require_options(options);
  options_ = options;
  pass_.kind = OpenPass::Kind::step;
  stalled_until(0.0);  // forget the stalls of a step that was abandoned
  parts_.lowering->forget_before(parts_.executor.oldest());
  update_time_ = time_of_updates(options);
  pass_.may_be_absent = options.absent != Absent::refuse;
  present_.begin_step(options.absent == Absent::skip);
  parts_.lowering->begin_step({options.micro_batches, options.open_ended, pass_.may_be_absent}, update_time_);
  if (updates_in_backward()) set_update(expected());
  if (update_time_ == UpdateTime::speculative) begin_speculation();
  parts_.prefetch();
  parts_.submit();
}

void EngineSteps::begin_micro_batch(bool last) {
  parts_.executor.require_good();
  if (pass_.kind != OpenPass::Kind::step) throw MisuseError("begin_micro_batch without a step");
  if (pass_.abandoned) throw MisuseError("begin_micro_batch of an abandoned step", {}, "call abort_step");
  if (pass_.gradients_ended) throw MisuseError("begin_micro_batch after end_gradients");
  held_.require_no_gradients("begin_micro_batch");
  if (parts_.plan.micro_batches_at_once > 1) {
    throw MisuseError("begin_micro_batch where several pass through the layers at once");
  }
  parts_.lowering->begin_micro_batch(last, parts_.tasks);
  parts_.prefetch();
  parts_.submit();
}

/// Seconds that the caller's streams stood still in fetches up to `end`.
double EngineSteps::stalled_until(double end) {
  try {
    return parts_.stalls.take(end);
  } catch (...) {  // one of them stands still for good
    parts_.give_up(std::current_exception());
    throw;
  }
}

void EngineSteps::abort_step() {
  if (pass_.kind != OpenPass::Kind::step) {
    parts_.executor.require_good();
    throw MisuseError("abort_step without a step");
  }
  held_.require_none("abort_step");
  pass_ = {};  // also where what failed is thrown again
  parts_.executor.drain("abandoning the step");
  take_back();
  parts_.executor.drain("taking updates back");
  if (updates_in_backward() && !parts_.lowering->norm_tasks().empty()) status_.is = StateStatus::Is::unfinished;
  parts_.lowering->end_pass();
}

void EngineSteps::require_complete(const char* call) const {
  parts_.executor.require_good();
  if (pass_.kind != OpenPass::Kind::step) throw MisuseError(fmt::format("{} without a step", call));
  held_.require_none(call);
  if (pass_.abandoned) throw MisuseError(fmt::format("{} of an abandoned step", call), {}, "call abort_step");
  if (pass_.gradients_ended) {
    throw MisuseError(fmt::format("{} after end_gradients", call), {}, "call update, skip or abort_step");
  }
  if (const std::string missing = parts_.lowering->missing_gradients(); !missing.empty()) {
    throw MisuseError(fmt::format("{} before every layer has committed its gradients in every micro-batch", call),
                      missing);
  }
}

void EngineSteps::require_ended(const char* call) const {
  parts_.executor.require_good();
  if (pass_.kind == OpenPass::Kind::step && pass_.abandoned) {
    throw MisuseError(fmt::format("{} of an abandoned step", call), {}, "call abort_step");
  }
  if (pass_.kind == OpenPass::Kind::step && pass_.gradients_ended) return;
  throw MisuseError(fmt::format("{} before end_gradients", call));
}

/// Values that begin_step was told.
UpdateValues EngineSteps::expected() const {
  return {options_.gradient_scale, options_.lr, options_.adamw, options_.groups};
}

void EngineSteps::require_groups(double lr, const std::optional<AdamW>& adamw, std::span<const GroupValues> groups,
                                 const char* call) const {
  require_values_of({lr, adamw}, call);
  for (const GroupValues& group : groups) require_values_of(group, call);
  const int count = parts_.layout.group_count();
  if (groups.empty() || std::ssize(groups) == count) return;
  throw MisuseError(fmt::format("{} with values of {} groups", call, groups.size()),
                    fmt::format("the layout's parameters are of {}", count));
}

void EngineSteps::require_values(const UpdateValues& values) const {
  if (!std::isfinite(values.scale)) {
    throw MisuseError(fmt::format("update with gradients times {}", values.scale), "that is finite");
  }
  require_groups(values.lr, values.adamw, values.groups, "update");
  if (!updates_in_backward() || same(expected(), values)) return;
  throw MisuseError("update with other values than begin_step was told, by which updates have run in backward", {},
                    "begin steps with StepOptions::decides_at_end");
}

double EngineSteps::end_gradients() {
  require_complete("end_gradients");
  agree_on_present();
  parts_.lowering->end_gradients(options_.absent == Absent::zero ? Missing::zeros : Missing::left, parts_.tasks);
  parts_.submit();
  norm_of_sum_ = norm_.wait();
  parts_.runner.speculation().close();
  exposed_ = stalled_until(parts_.updates.ended());
  pass_.gradients_ended = true;
  return norm_of_sum_;
}

/// The updates that ran in backward have used gradients that are not finite.
void EngineSteps::throw_unfinished() {
  if (updates_in_backward()) status_.is = StateStatus::Is::unfinished;
  throw TrainingError(fmt::format("update {}: the gradient norm is not finite", status_.step + 1), {},
                      "lower the learning rate, or go on from the last checkpoint");
}

/// Ends the pass, not what has become of it.
StepReport EngineSteps::close() {
  parts_.lowering->end_pass();
  pass_ = {};
  StepReport report;
  report.exposed_update_seconds = exposed_;
  report.step = status_.step;
  return report;
}

StepReport EngineSteps::update(const UpdateValues& values) {
  require_ended("update");
  require_values(values);
  const double norm = std::abs(values.scale) * norm_of_sum_;
  if (!std::isfinite(norm)) {
    if (!updates_in_backward()) throw MisuseError("update of gradients whose norm is not finite", {}, "call skip");
    close();
    throw_unfinished();
  }
  StepReport report = close();
  report.gradient_norm = norm;
  if (parts_.plan.speculate != Speculate::off) note_outcome(same(expected(), values));
  if (!updates_in_backward()) set_update(values);
  report.step = ++status_.step;
  count_missed();
  parts_.lowering->update(parts_.tasks);
  parts_.submit();
  if (!parts_.options.overlap) report.exposed_update_seconds += parts_.executor.drain("waiting for updates");
  return report;
}

StepReport EngineSteps::skip() {
  require_ended("skip");
  if (updates_in_backward()) {
    throw MisuseError("skip of a step whose updates have run in backward", {},
                      "begin steps with StepOptions::decides_at_end");
  }
  take_back();
  note_outcome(false);
  StepReport report = close();
  report.gradient_norm = std::abs(options_.gradient_scale) * norm_of_sum_;
  report.skipped = true;
  ++skipped_;
  return report;
}

StepReport EngineSteps::end_step() {
  require_complete("end_step");
  const double norm = std::abs(options_.gradient_scale) * end_gradients();
  const bool finite = std::isfinite(norm);
  if (!finite && parts_.options.on_nonfinite == OnNonfinite::stop) {
    take_back();
    close();
    throw_unfinished();
  }
  if (!finite) return skip();
  UpdateValues values = expected();
  values.scale *= clip_factor(norm);
  StepReport report = update(values);
  report.gradient_norm = norm;
  return report;
}

double EngineSteps::clip_factor(double norm) const {
  const double limit = options_.max_grad_norm;
  return limit > 0.0 && norm > limit ? limit / norm : 1.0;
}

UpdateSettings EngineSteps::settings_of(const UpdateValues& values) {
  const OffloadOptions& options = parts_.options;
  groups_.clear();
  for (const GroupValues& group : values.groups) groups_.push_back({group.lr, group.adamw.value_or(options.adamw)});
  if (groups_.empty()) {
    groups_.assign(static_cast<std::size_t>(parts_.layout.group_count()),
                   {values.lr, values.adamw.value_or(options.adamw)});
  }
  gather_exceptions();
  return {groups_, exceptions_, status_.step + 1, options.seed, values.scale};
}

void EngineSteps::set_update(const UpdateValues& values) {
  parts_.runner.set_update(settings_of(values), parts_.lowering->step());
}

/// Parameters that the update treats unlike the others: those without a gradient, and those that have missed some.
void EngineSteps::gather_exceptions() {
  exceptions_.clear();
  const std::span<const unsigned char> present = present_.all();
  if (!present_.tracks() && status_.missed.empty()) return;
  exceptions_.resize(present.size());
  for (std::size_t p = 0; p < present.size(); ++p) {
    exceptions_[p].absent = present_.tracks() && !present_.has(p);
    if (!status_.missed.empty()) exceptions_[p].missed_updates = status_.missed[p];
  }
}

/// Counts the parameters that the update which was set leaves as they are.
void EngineSteps::count_missed() {
  if (!present_.tracks()) return;
  status_.missed.resize(exceptions_.size());
  for (std::size_t p = 0; p < exceptions_.size(); ++p) status_.missed[p] += exceptions_[p].absent ? 1 : 0;
}

/// All ranks have gradients of the same parameters, or the step ends here for all.
void EngineSteps::agree_on_present() {
  if (parts_.group == nullptr || !present_.tracks()) return;
  parts_.for_all_ranks([&] {
    const std::span<const unsigned char> own = present_.all();
    std::vector<unsigned char> first(own.begin(), own.end());
    parts_.group->broadcast(Channel::engine, 0, std::as_writable_bytes(std::span(first)));
    if (std::ranges::equal(own, first)) return;
    throw MisuseError(fmt::format("rank {} has gradients of other parameters than rank 0", parts_.group->rank().index),
                      {}, "leave out the same ones on every rank");
  });
}

// -- evaluations -----------------------------------------------------------------------------------------

void EngineSteps::begin_evaluation() {
  require_idle("evaluation");
  status_.require_whole();
  pass_.kind = OpenPass::Kind::evaluation;
  parts_.lowering->forget_before(parts_.executor.oldest());
  parts_.lowering->begin_evaluation();
  parts_.prefetch();
  parts_.submit();
}

void EngineSteps::end_evaluation() noexcept {
  parts_.lowering->end_pass();
  pass_ = {};
}

}  // namespace tandem
