#pragma once
// An engine's state between steps: made, read, written, saved, and moved to where another plan has it.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/params/state_array.hpp"
#include "offload/engine/engine_parts.hpp"
#include "offload/engine/engine_status.hpp"
#include "offload/engine/engine_steps.hpp"
#include "offload/state/save_reader.hpp"

namespace tandem {

class EngineState {
 public:
  /// All arguments must outlive the object.
  EngineState(EngineParts& parts, EngineSteps& steps, StateStatus& status)
      : parts_(parts), steps_(steps), status_(status) {}

  /// Values of parameters in pieces, as OffloadEngine::initialize asks for them.
  using Values = std::function<void(const Parameter&, std::int64_t first, std::span<float>)>;
  /// Calls of OffloadEngine about its state; `initialize` in pieces of at most `largest_piece` elements.
  void initialize(const Values& values, const OffloadEngine::Codes& codes, std::int64_t largest_piece);
  void read(const Parameter& parameter, StateArray array, std::span<float> values);
  void write(const Parameter& parameter, StateArray array, std::span<const float> values);
  void write(const Parameter& parameter, StateArray array, std::int64_t first, std::span<const float> values);
  CodeSink& write_codes(const Parameter& parameter);
  void set_step(std::int64_t step);
  std::int64_t missed_updates(const Parameter& parameter) const;
  void set_missed_updates(const Parameter& parameter, std::int64_t updates);
  void adopt(const Plan& plan);
  std::shared_ptr<SaveReader> begin_save();
  std::string code_hash(const Parameter& parameter) const { return parts_.access.code_hash(parameter); }
  std::string digest();
  /// Begins a load: until `set_step`, the state is not that of a whole step. `what`: the call that begins it, for
  /// messages.
  void begin_load(const char* what);

 private:
  enum class Extent : std::uint8_t { part, whole };
  const Parameter& owned(const Parameter& parameter, Extent extent, std::int64_t first, std::size_t count) const;
  std::size_t index_of(const Parameter& parameter) const;
  void require_adoptable(const Plan& plan) const;

  EngineParts& parts_;
  EngineSteps& steps_;
  StateStatus& status_;
  std::weak_ptr<SaveReader> saving_;
};

}  // namespace tandem
