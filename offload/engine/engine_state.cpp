#include "offload/engine/engine_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.hpp"
#include "offload/engine/plan_agreement.hpp"
#include "offload/state/state_of_ranks.hpp"

namespace tandem {

/// The engine's own of a parameter, of which `count` elements from `first` on were given.
const Parameter& EngineState::owned(const Parameter& parameter, Extent extent, std::int64_t first,
                                    std::size_t count) const {
  const Parameter& p = parts_.layout.parameter(parameter.full_name);
  const bool inside = first >= 0 && first <= p.count && count <= static_cast<std::size_t>(p.count - first);
  if (!inside || (extent == Extent::whole && count < static_cast<std::size_t>(p.count))) {
    throw MisuseError("parameter " + p.full_name,
                      fmt::format("has {} elements, {} from {} on were given", p.count, count, first));
  }
  return p;
}

void EngineState::begin_load(const char* what) {
  steps_.require_idle(what);
  steps_.wait();
  parts_.lowering->invalidate_weights();
  status_.is = StateStatus::Is::unfinished;
}

void EngineState::initialize(const Values& values, const OffloadEngine::Codes& codes, std::int64_t largest_piece) {
  begin_load("initialize");
  std::vector<float> buffer;
  const auto in_pieces = [&](const Parameter& p, const auto& write) {
    for (std::int64_t first = 0; first < p.count; first += largest_piece) {
      buffer.assign(static_cast<std::size_t>(std::min(largest_piece, p.count - first)), 0.0F);
      values(p, first, buffer);
      write(first);
    }
  };
  for (const Parameter* p : parts_.layout.owned_parameters()) {
    if (p->coded()) {
      CodeSink& sink = parts_.access.write_codes(*p);
      if (codes && codes(*p, sink)) continue;
      WeightEncoder encoder(p->options.code, p->coded_shape(), p->full_name, sink);
      in_pieces(*p, [&](std::int64_t) { encoder.add(buffer); });
      encoder.finish();
      continue;
    }
    in_pieces(*p, [&](std::int64_t first) {
      parts_.access.write(*p, StateArray::master, first, buffer);
      std::fill(buffer.begin(), buffer.end(), 0.0F);
      parts_.access.write(*p, StateArray::m, first, buffer);
      parts_.access.write(*p, StateArray::v, first, buffer);
    });
  }
  set_step(0);
}

CodeSink& EngineState::write_codes(const Parameter& parameter) {
  steps_.require_idle("write_codes");
  steps_.wait();
  parts_.lowering->invalidate_weights();
  return parts_.access.write_codes(parameter);
}

void EngineState::read(const Parameter& parameter, StateArray array, std::span<float> values) {
  status_.require_whole();
  steps_.wait();
  const Parameter& p = owned(parameter, Extent::whole, 0, values.size());
  const auto read_own = [&](std::int64_t first, std::span<float> own) { parts_.access.read(p, array, first, own); };
  parts_.for_all_ranks(
      [&] { read_of_ranks(parts_.group, Channel::engine, Readers::all, parts_.layout, p, 0, values, read_own); });
}

void EngineState::write(const Parameter& parameter, StateArray array, std::span<const float> values) {
  write(owned(parameter, Extent::whole, 0, values.size()), array, 0, values);
}

void EngineState::write(const Parameter& parameter, StateArray array, std::int64_t first,
                        std::span<const float> values) {
  steps_.require_idle("write");
  steps_.wait();
  parts_.lowering->invalidate_weights();
  parts_.access.write(owned(parameter, Extent::part, first, values.size()), array, first, values);
}

void EngineState::set_step(std::int64_t step) {
  steps_.require_idle("set_step");
  if (step < 0) throw MisuseError("a negative step");
  status_.is = StateStatus::Is::whole;
  status_.step = step;
  status_.missed.clear();
}

/// Index of a parameter among the owned ones.
std::size_t EngineState::index_of(const Parameter& parameter) const {
  const Parameter& p = parts_.layout.parameter(parameter.full_name);
  const std::vector<const Parameter*> all = parts_.layout.owned_parameters();
  return static_cast<std::size_t>(std::ranges::find(all, &p) - all.begin());
}

std::int64_t EngineState::missed_updates(const Parameter& parameter) const {
  const std::size_t index = index_of(parameter);
  return status_.missed.empty() ? 0 : status_.missed[index];
}

void EngineState::set_missed_updates(const Parameter& parameter, std::int64_t updates) {
  steps_.require_idle("set_missed_updates");
  const std::size_t index = index_of(parameter);
  if (updates < 0 || updates > status_.step) {
    throw MisuseError(fmt::format("parameter {} with {} missed updates", parameter.full_name, updates),
                      fmt::format("the state has {}", status_.step));
  }
  if (status_.missed.empty()) status_.missed.resize(parts_.layout.owned_parameters().size());
  status_.missed[index] = updates;
}

void EngineState::require_adoptable(const Plan& plan) const {
  require_plan_of(parts_.layout, plan);
  if (plan.state != parts_.plan.state) {
    throw MisuseError(fmt::format("a plan for {} state", name_of(plan.state)),
                      fmt::format("the engine's is {}", name_of(parts_.plan.state)),
                      "save, and load under the other format");
  }
  if (parts_.plan.file_buffers > 0 || plan.file_buffers > 0) {
    throw PlanError("another plan with state in a file", "what is in a file stays where it is",
                    "save, and load under the other plan");
  }
  if (plan.rank != parts_.plan.rank) throw MisuseError("a plan of another rank");
  parts_.storage.require_room_for(plan);
}

void EngineState::adopt(const Plan& plan) {
  steps_.require_idle("adopt");
  status_.require_whole();
  steps_.wait();
  agree_on_plan(parts_.group, plan, [&] { require_adoptable(plan); });
  status_.is = StateStatus::Is::unfinished;  // until all is where it belongs
  parts_.for_all_ranks([&] { parts_.storage.carve_anew(parts_.device, parts_.layout, parts_.plan, plan); });
  status_.is = StateStatus::Is::whole;
  parts_.plan = plan;
  parts_.plan.memory.unpin(parts_.storage.pageable_bytes());
  parts_.lowering.emplace(parts_.layout, parts_.plan, parts_.lowering->count());
  parts_.runner.speculation().follow_plan();
}

std::shared_ptr<SaveReader> EngineState::begin_save() {
  steps_.require_idle("begin_save");
  status_.require_whole();
  if (!saving_.expired()) throw MisuseError("begin_save while another save is under way", {}, "let its scope go first");
  parts_.lowering->save(parts_.tasks);
  auto reader = std::make_shared<SaveReader>(parts_.executor, parts_.access, parts_.layout, parts_.group,
                                             std::vector<Task>(parts_.tasks.begin(), parts_.tasks.end()));
  parts_.submit();
  saving_ = reader;
  return reader;
}

std::string EngineState::digest() {
  steps_.require_idle("state_digest");
  status_.require_whole();
  steps_.wait();
  if (parts_.group == nullptr) return parts_.access.digest(status_.missed);
  const auto read = [this](const Parameter& p, StateArray array, std::int64_t first, std::span<float> values) {
    read_of_ranks(parts_.group, Channel::engine, Readers::rank_zero, parts_.layout, p, first, values,
                  [&](std::int64_t at, std::span<float> own) { parts_.access.read(p, array, at, own); });
  };
  std::string text;
  // All make the reads of a digest; rank 0, which gets the values, tells the others what it is.
  parts_.for_all_ranks(
      [&] { text = text_of_rank_zero(*parts_.group, Channel::engine, parts_.access.digest(status_.missed, read)); });
  return text;
}

}  // namespace tandem
