// The engine's state between steps: made, read, written, saved, and moved to where another plan has it.
#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.hpp"
#include "offload/engine_impl.hpp"
#include "offload/state_of_ranks.hpp"

namespace tandem {

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

void OffloadEngine::Impl::require_state() const {
  if (state_ == StateIs::unset) {
    throw MisuseError("the engine has no state yet", {}, "initialize it, or load a checkpoint");
  }
  if (state_ == StateIs::unfinished) {
    throw TrainingError("the state is of no step",
                        "an update during backward, a change of plan, or making or loading it did not come to its end",
                        "go on from the last checkpoint");
  }
}

/// From here to `set_step` the state is of no step.
void OffloadEngine::Impl::begin_load(const char* what) {
  require_idle(what);
  wait();
  lowering_->invalidate_weights();
  state_ = StateIs::unfinished;
}

void OffloadEngine::Impl::initialize(
    const std::function<void(const Parameter&, std::int64_t, std::span<float>)>& values, std::int64_t largest_piece) {
  begin_load("initialize");
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
  set_step(0);
}

void OffloadEngine::Impl::read(const Parameter& parameter, StateArray array, std::span<float> values) {
  require_state();
  wait();
  const Parameter& p = owned(parameter, Extent::whole, 0, values.size());
  const auto read_own = [&](std::int64_t first, std::span<float> own) { access_.read(p, array, first, own); };
  for_all_ranks([&] { read_of_ranks(group_, Channel::engine, layout_, p, 0, values, read_own); });
}

void OffloadEngine::Impl::write(const Parameter& parameter, StateArray array, std::int64_t first,
                                std::span<const float> values) {
  require_idle("write");
  wait();
  lowering_->invalidate_weights();
  access_.write(owned(parameter, Extent::part, first, values.size()), array, first, values);
}

void OffloadEngine::Impl::set_step(std::int64_t step) {
  require_idle("set_step");
  if (step < 0) throw MisuseError("a negative step");
  state_ = StateIs::whole;
  step_ = step;
}

void OffloadEngine::Impl::require_adoptable(const Plan& plan) const {
  require_plan_of(layout_, plan);
  if (plan.state != plan_.state) {
    throw MisuseError(fmt::format("a plan for {} state", name_of(plan.state)),
                      fmt::format("the engine's is {}", name_of(plan_.state)), "save, and load under the other format");
  }
  if (plan_.file_buffers > 0 || plan.file_buffers > 0) {
    throw PlanError("another plan with state in a file", "what is in a file stays where it is",
                    "save, and load under the other plan");
  }
  if (plan.rank != plan_.rank) throw MisuseError("a plan of another rank");
  storage_.require_room_for(plan);
}

void OffloadEngine::Impl::adopt(const Plan& plan) {
  require_idle("adopt");
  require_state();
  wait();
  agree_on(group_, plan, [&] { require_adoptable(plan); });
  state_ = StateIs::unfinished;  // until all is where it belongs
  for_all_ranks([&] { storage_.carve_anew(device_, layout_, plan_, plan); });
  state_ = StateIs::whole;
  plan_ = plan;
  plan_.memory.unpin(storage_.pageable_bytes());
  lowering_.emplace(layout_, plan_, lowering_->count());
}

std::shared_ptr<SaveReader> OffloadEngine::Impl::begin_save() {
  require_idle("begin_save");
  require_state();
  if (!saving_.expired()) throw MisuseError("begin_save while another save is under way", {}, "let its scope go first");
  lowering_->save(tasks_);
  auto reader = std::make_shared<SaveReader>(executor_, access_, layout_, group_,
                                             std::vector<Task>(tasks_.begin(), tasks_.end()));
  submit();
  saving_ = reader;
  return reader;
}

std::string OffloadEngine::Impl::digest() {
  require_idle("state_digest");
  require_state();
  wait();
  if (group_ == nullptr) return access_.digest();
  const auto read = [this](const Parameter& p, StateArray array, std::int64_t first, std::span<float> values) {
    read_of_ranks(group_, Channel::engine, layout_, p, first, values,
                  [&](std::int64_t at, std::span<float> own) { access_.read(p, array, at, own); });
  };
  std::string text;
  for_all_ranks([&] { text = access_.digest(read); });
  return text;
}

}  // namespace tandem
