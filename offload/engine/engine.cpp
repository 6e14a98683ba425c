// The public face of the engine, and what it is composed of.
#include "offload/engine/engine.hpp"

#include <exception>
#include <limits>
#include <utility>

#include "core/base/error.hpp"
#include "offload/engine/engine_parts.hpp"
#include "offload/engine/engine_state.hpp"
#include "offload/engine/engine_status.hpp"
#include "offload/engine/engine_steps.hpp"
#include "offload/engine/held_layers.hpp"
#include "offload/state/save_reader.hpp"

namespace tandem {
namespace {

constexpr std::int64_t initial_piece = std::int64_t{1} << 20;  // values asked for at a time: 4 MiB

}  // namespace

class OffloadEngine::Impl {
 public:
  Impl(OffloadEngine& engine, Device& device, const ParameterLayout& layout, const OffloadOptions& options,
       const Plan& plan, Trace* trace, Group* group)
      : parts(device, layout, options, plan, trace, group),
        present(parts.layout, parts.plan.owners_make_gradients),
        held(engine, parts, pass, present),
        steps(parts, pass, held, present, status),
        state(parts, steps, status) {}

  EngineCounters counters();

  EngineParts parts;
  StateStatus status;
  OpenPass pass;
  PresentGradients present;
  HeldLayers held;
  EngineSteps steps;
  EngineState state;
};

EngineCounters OffloadEngine::Impl::counters() {
  EngineCounters counters = parts.runner.counters();
  counters.busy = parts.executor.busy();
  counters.skipped_steps = steps.skipped();
  counters.confirmed_steps = steps.confirmed();
  counters.rolled_back_steps = steps.rolled_back();
  counters.update_seconds = parts.updates.seconds();
  counters.save_wait_seconds = parts.executor.save_wait_seconds();
  return counters;
}

OffloadEngine::OffloadEngine(Device& device, const ParameterLayout& layout, const OffloadOptions& options,
                             const Plan& plan, Trace* trace, Group* group) try
    : impl_(std::make_unique<Impl>(*this, device, layout, options, plan, trace, group)) {
} catch (...) {
  if (group != nullptr) group->fail(std::current_exception());
}

OffloadEngine::~OffloadEngine() {
  try {
    impl_->steps.end();
  } catch (...) {  // any type; whoever waited for the work has had the error, or nobody wants it any more
  }
}

void OffloadEngine::initialize(const std::function<void(const Parameter&, std::span<float>)>& values) {
  const auto whole = [&values](const Parameter& p, std::int64_t, std::span<float> to) { values(p, to); };
  impl_->state.initialize(whole, {}, std::numeric_limits<std::int64_t>::max());
}
void OffloadEngine::initialize(const std::function<void(const Parameter&, std::int64_t, std::span<float>)>& values,
                               const Codes& codes) {
  impl_->state.initialize(values, codes, initial_piece);
}
void OffloadEngine::begin_step(const StepOptions& options) { impl_->steps.begin_step(options); }
void OffloadEngine::begin_micro_batch(bool last) { impl_->steps.begin_micro_batch(last); }
StepReport OffloadEngine::end_step() { return impl_->steps.end_step(); }
double OffloadEngine::end_gradients() { return impl_->steps.end_gradients(); }
StepReport OffloadEngine::update(const UpdateValues& values) { return impl_->steps.update(values); }
StepReport OffloadEngine::skip() { return impl_->steps.skip(); }
void OffloadEngine::abort_step() {
  if (impl_->pass.kind == OpenPass::Kind::step) impl_->held.empty_all();
  impl_->steps.abort_step();
}
WeightsGuard OffloadEngine::fetch(int layer, StreamView stream) { return impl_->held.fetch(LayerIndex(layer), stream); }
GradientsGuard OffloadEngine::gradients(int layer, StreamView stream) {
  return impl_->held.gradients(LayerIndex(layer), stream);
}
void OffloadEngine::wait() { impl_->steps.wait(); }
void OffloadEngine::read(const Parameter& parameter, StateArray array, std::span<float> values) {
  impl_->state.read(parameter, array, values);
}
void OffloadEngine::write(const Parameter& parameter, StateArray array, std::span<const float> values) {
  impl_->state.write(parameter, array, values);
}
void OffloadEngine::write(const Parameter& parameter, StateArray array, std::int64_t first,
                          std::span<const float> values) {
  impl_->state.write(parameter, array, first, values);
}
CodeSink& OffloadEngine::write_codes(const Parameter& parameter) { return impl_->state.write_codes(parameter); }
std::int64_t OffloadEngine::step() const noexcept { return impl_->status.step; }
void OffloadEngine::set_step(std::int64_t step) { impl_->state.set_step(step); }
std::int64_t OffloadEngine::missed_updates(const Parameter& parameter) const {
  return impl_->state.missed_updates(parameter);
}
void OffloadEngine::set_missed_updates(const Parameter& parameter, std::int64_t updates) {
  impl_->state.set_missed_updates(parameter, updates);
}
void OffloadEngine::begin_load() { impl_->state.begin_load("load"); }
void OffloadEngine::adopt(const Plan& plan) { impl_->state.adopt(plan); }
OffloadEngine::SaveScope OffloadEngine::begin_save() { return SaveScope(impl_->state.begin_save()); }
std::string OffloadEngine::code_hash(const Parameter& parameter) const { return impl_->state.code_hash(parameter); }
std::string OffloadEngine::state_digest() { return impl_->state.digest(); }
Device& OffloadEngine::device() const noexcept { return impl_->parts.device; }
Group* OffloadEngine::group() const noexcept { return impl_->parts.group; }
const Plan& OffloadEngine::plan() const noexcept { return impl_->parts.plan; }
const ParameterLayout& OffloadEngine::layout() const noexcept { return impl_->parts.layout; }
EngineCounters OffloadEngine::counters() const { return impl_->counters(); }
std::size_t OffloadEngine::device_bytes() const noexcept { return impl_->parts.storage.device_bytes(); }
std::size_t OffloadEngine::host_bytes() const noexcept { return impl_->parts.storage.host_bytes(); }
TensorView OffloadEngine::resident_weights(const Parameter& parameter) const {
  return impl_->held.resident_weights(parameter);
}
void OffloadEngine::wait_for_weights(int layer, StreamView stream) {
  impl_->held.wait_for_weights(LayerIndex(layer), stream);
}
bool OffloadEngine::holds(std::uint64_t ticket) const noexcept { return impl_->held.holds(ticket); }
void OffloadEngine::also_used(std::uint64_t ticket, StreamView stream) { impl_->held.also_used(ticket, stream); }
void OffloadEngine::release(std::uint64_t ticket, StreamView stream) noexcept {
  try {
    impl_->held.release(ticket, stream);
  } catch (...) {  // any type, from a stream of the caller's: the next call reports it
    impl_->parts.give_up(std::current_exception());
  }
}
void OffloadEngine::leave_out(std::uint64_t ticket, std::size_t parameter) {
  if (!impl_->pass.may_be_absent) return ParameterAccess::leave_out(ticket, parameter);  // refuses
  impl_->held.leave_out(ticket, parameter);
}
void OffloadEngine::commit(std::uint64_t ticket, StreamView stream) { impl_->held.commit(ticket, stream); }
void OffloadEngine::abandon(std::uint64_t ticket) noexcept {
  try {
    impl_->held.abandon(ticket);
  } catch (...) {  // any type, from a stream of the caller's: the next call reports it
    impl_->parts.give_up(std::current_exception());
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

OffloadEngine::Evaluation::Evaluation(OffloadEngine& engine) : engine_(engine) {
  engine.impl_->steps.begin_evaluation();
}
OffloadEngine::Evaluation::~Evaluation() { engine_.impl_->steps.end_evaluation(); }

}  // namespace tandem
