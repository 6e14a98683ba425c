#pragma once
// The engine's state to and from checkpoints.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/host/parallel.hpp"
#include "core/memory/memory.hpp"
#include "io/checkpoint.hpp"
#include "offload/engine/engine.hpp"

namespace tandem {

/// The parameters of a layout as a checkpoint lists them.
std::vector<CheckpointParameter> checkpoint_parameters(const ParameterLayout& layout);
/// Parameters of an engine, with the updates that each has missed. Not inside a step.
std::vector<CheckpointParameter> checkpoint_parameters(const OffloadEngine& engine);

/// The state of a save: of an engine, or of all of a group.
class StateOfSave {
 public:
  /// Begins a save of each engine, rank by rank, as OffloadEngine::begin_save; all must outlive it. One engine of a
  /// group whose others are in other processes: these begin the same save, and make the same reads.
  explicit StateOfSave(std::span<OffloadEngine* const> engines);
  /// Reads as OffloadEngine::SaveScope::read. Where ranks are in other processes, a call of all of them, of which rank
  /// 0's gets the values.
  void read(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);

 private:
  const ParameterLayout& layout_;
  const int ranks_;
  std::vector<OffloadEngine::SaveScope> scopes_;
};

/// Parameters whose values a checkpoint holds: all, or the trained ones, where the frozen ones are those of a model
/// that is there anyway.
enum class SavedState : std::uint8_t { all, trained };

/// All that a checkpoint holds of an engine, in host memory, so that training can go on while it is written.
class StateCopy {
 public:
  /// Bytes it takes: 12 for each trained value, of Lion 8, and 4 for each frozen one that is saved.
  static std::size_t bytes(const ParameterLayout& layout, Optimizer optimizer, SavedState saved = SavedState::all);
  /// Takes the memory, its pages too, on `threads`. `layout` must outlive it.
  StateCopy(const ParameterLayout& layout, Optimizer optimizer, Parallel& threads, SavedState saved = SavedState::all);
  /// Copies the state of a save. Blocks; waits for the updates that came before it.
  void take(StateOfSave& state);
  /// One array of an owned parameter, as last taken; empty where the parameter does not have it.
  std::span<const float> part(std::size_t index, StateArray array) const;
  /// All of it, for other use until the next `take`.
  std::span<float> memory() const;

 private:
  std::span<float> writable(std::size_t index, StateArray array) const;
  SavedState saved_;
  std::vector<const Parameter*> parameters_;
  Optimizer optimizer_;
  std::vector<std::size_t> offsets_;  // in values, of each parameter's master
  MemoryBlock memory_;
};

/// Reads the state of a save into the buffer that the checkpoint writer gives. Both must outlive it.
StateReader state_reader(StateOfSave& state, const ParameterLayout& layout);
/// Reads the state of a save through one engine's scope.
StateReader state_reader(OffloadEngine::SaveScope& scope, const ParameterLayout& layout);

/// The reads of a save in the order of a checkpoint, of a group whose ranks are in several processes: each makes all of
/// them, whichever writes what they give.
class SaveReads {
 public:
  /// `layout` must outlive it, and what `read` refers to.
  SaveReads(StateReader read, const ParameterLayout& layout, Optimizer optimizer, SavedState saved = SavedState::all);
  /// The next read, of a writer.
  std::span<const float> read(std::size_t index, StateArray array, std::int64_t first, std::span<float> buffer);
  /// Makes the reads that are left, which only other ranks need, into `buffer`, of the writer's size.
  void make_rest(std::span<float> buffer);

 private:
  StateReader read_;
  std::vector<const Parameter*> parameters_;
  Optimizer optimizer_;
  SavedState saved_;
  std::int64_t made_ = 0;
};

/// Digest of the state of an engine, or of all of a group, whose frozen parameters have these hashes, by full name.
/// Where ranks are in other processes, a call of all of them. Blocks. Throws std::out_of_range where one is missing.
std::string digest_over_base(std::span<OffloadEngine* const> engines, const std::map<std::string, std::string>& base);

/// Values of the largest parameter.
std::size_t largest_parameter(const ParameterLayout& layout);
/// Values of the buffer through which state passes into a checkpoint: 4 MiB of them, or the largest parameter.
std::size_t save_buffer_values(const ParameterLayout& layout);

/// Throws InputError where the checkpoint belongs to another model, another --freeze, or another optimizer than that of
/// `state`.
void check_belongs(const Checkpoint& checkpoint, const ParameterLayout& layout, StateFormat state);

/// Restores every parameter and the step count, of an engine, or of all of a group. Blocks.
void load_state(std::span<OffloadEngine* const> engines, const Checkpoint& checkpoint);

}  // namespace tandem
