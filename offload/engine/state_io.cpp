#include "offload/engine/state_io.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/mapped_memory.hpp"
#include "core/params/state_digest.hpp"
#include "offload/state/state_of_ranks.hpp"

namespace tandem {
namespace {

template <class Source>
StateReader reader_of(Source& source, const ParameterLayout& layout) {
  return [&source, parameters = layout.owned_parameters()](std::size_t index, StateArray array, std::int64_t first,
                                                           std::span<float> buffer) {
    source.read(*parameters.at(index), array, first, buffer);
    return std::span<const float>(buffer);
  };
}

std::span<const StateArray> saved_arrays(const Parameter& p, Optimizer optimizer, SavedState saved) {
  if (saved == SavedState::trained && !p.options.trainable) return {};
  return arrays_of(p.options.trainable, optimizer);
}

/// Throws InputError where the checkpoint's state is another optimizer's than that of `state`.
void check_optimizer(const Checkpoint& checkpoint, StateFormat state) {
  const Optimizer stored = checkpoint.manifest().optimizer, wanted = optimizer_of(state);
  if (stored == wanted) return;
  throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()),
                   fmt::format("it holds the state of {}, and --state {} is of {}", name_of(stored), name_of(state),
                               name_of(wanted)),
                   fmt::format("resume with --state {}; to train on with {} begin a run with --model CHECKPOINT and "
                               "another --out",
                               stored == Optimizer::lion ? "lion" : "fp32 or another of AdamW", name_of(wanted)));
}

}  // namespace

std::vector<CheckpointParameter> checkpoint_parameters(const ParameterLayout& layout) {
  std::vector<CheckpointParameter> result;
  for (const Parameter* p : layout.owned_parameters()) {
    CheckpointParameter parameter{.name = p->full_name, .shape = {}, .trainable = p->options.trainable};
    for (int i = 0; i < p->shape.rank(); ++i) parameter.shape.push_back(p->shape[i]);
    result.push_back(std::move(parameter));
  }
  return result;
}

std::vector<CheckpointParameter> checkpoint_parameters(const OffloadEngine& engine) {
  std::vector<CheckpointParameter> result = checkpoint_parameters(engine.layout());
  const std::vector<const Parameter*> owned = engine.layout().owned_parameters();
  for (std::size_t i = 0; i < owned.size(); ++i) result[i].missed_updates = engine.missed_updates(*owned[i]);
  return result;
}

std::size_t largest_parameter(const ParameterLayout& layout) {
  std::int64_t count = 0;
  for (const Parameter* p : layout.owned_parameters()) count = std::max(count, p->count);
  return static_cast<std::size_t>(count);
}

std::size_t save_buffer_values(const ParameterLayout& layout) {
  constexpr std::size_t piece = std::size_t{1} << 20;  // the engine's own piece for state that it converts
  return std::min(piece, largest_parameter(layout));
}

StateOfSave::StateOfSave(std::span<OffloadEngine* const> engines)
    : layout_(engines.front()->layout()), ranks_(engines.front()->plan().rank.count) {
  for (OffloadEngine* engine : engines) scopes_.push_back(engine->begin_save());
}

void StateOfSave::read(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values) {
  if (std::ssize(scopes_) < ranks_) return scopes_.front().read(parameter, array, first, values);
  for (const OwnedPart& part : parts_of(layout_, parameter, first, std::ssize(values), ranks_)) {
    const auto at = static_cast<std::size_t>(part.first - first);
    scopes_[static_cast<std::size_t>(part.rank)].read_own(parameter, array, part.first,
                                                          values.subspan(at, static_cast<std::size_t>(part.count)));
  }
}

StateReader state_reader(StateOfSave& state, const ParameterLayout& layout) { return reader_of(state, layout); }
StateReader state_reader(OffloadEngine::SaveScope& scope, const ParameterLayout& layout) {
  return reader_of(scope, layout);
}

SaveReads::SaveReads(StateReader read, const ParameterLayout& layout, Optimizer optimizer, SavedState saved)
    : read_(std::move(read)), parameters_(layout.owned_parameters()), optimizer_(optimizer), saved_(saved) {}

std::span<const float> SaveReads::read(std::size_t index, StateArray array, std::int64_t first,
                                       std::span<float> buffer) {
  ++made_;
  return read_(index, array, first, buffer);
}

void SaveReads::make_rest(std::span<float> buffer) {
  const std::int64_t already = made_, piece = std::ssize(buffer);
  std::int64_t passed = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    for (const StateArray array : saved_arrays(*parameters_[i], optimizer_, saved_)) {
      const std::int64_t count = parameters_[i]->count;
      for (std::int64_t first = 0; first < count; first += piece) {
        if (passed++ < already) continue;
        read(i, array, first, buffer.first(static_cast<std::size_t>(std::min(piece, count - first))));
      }
    }
  }
}

std::size_t StateCopy::bytes(const ParameterLayout& layout, Optimizer optimizer, SavedState saved) {
  std::size_t values = 0;
  for (const Parameter* p : layout.owned_parameters()) {
    values += static_cast<std::size_t>(p->count) * saved_arrays(*p, optimizer, saved).size();
  }
  return align_up(values * sizeof(float));
}

StateCopy::StateCopy(const ParameterLayout& layout, Optimizer optimizer, Parallel& threads, SavedState saved)
    : saved_(saved), parameters_(layout.owned_parameters()), optimizer_(optimizer) {
  std::size_t offset = 0;
  for (const Parameter* p : parameters_) {
    offsets_.push_back(offset);
    offset += static_cast<std::size_t>(p->count) * saved_arrays(*p, optimizer, saved).size();
  }
  const std::size_t size = bytes(layout, optimizer, saved);
  // With its pages: the first save must not hold training up any longer than the next.
  memory_ = MemoryBlock(MappedMemory::provide(size, nullptr, threads), size, &MappedMemory::unmap);
}

std::span<float> StateCopy::writable(std::size_t index, StateArray array) const {
  const Parameter& p = *parameters_.at(index);
  const auto index_of_array = static_cast<std::size_t>(array);
  if (index_of_array >= saved_arrays(p, optimizer_, saved_).size()) return {};
  const auto count = static_cast<std::size_t>(p.count);
  return {static_cast<float*>(memory_.data()) + offsets_[index] + index_of_array * count, count};
}

std::span<const float> StateCopy::part(std::size_t index, StateArray array) const { return writable(index, array); }

std::span<float> StateCopy::memory() const {
  return {static_cast<float*>(memory_.data()), memory_.bytes() / sizeof(float)};
}

void StateCopy::take(StateOfSave& state) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    for (const StateArray array : state_arrays) {
      const auto values = writable(i, array);
      if (!values.empty()) state.read(*parameters_[i], array, 0, values);
    }
  }
}

std::string digest_over_base(std::span<OffloadEngine* const> engines, const std::map<std::string, std::string>& base) {
  const OffloadEngine& first = *engines.front();
  StateOfSave state(engines);
  StateDigest digest;
  std::vector<float> buffer(save_buffer_values(first.layout()));
  for (const Parameter* p : first.layout().owned_parameters()) {
    if (!p->options.trainable) {
      digest.add_parameter(p->full_name, base.at(p->full_name));
      continue;
    }
    digest.begin_parameter(p->full_name);
    for (const StateArray array : state_arrays) {
      const bool stored = static_cast<std::size_t>(array) < arrays_of(true, optimizer_of(first.plan().state)).size();
      for (std::int64_t at = 0; at < p->count; at += std::ssize(buffer)) {
        const auto part =
            std::span(buffer).first(static_cast<std::size_t>(std::min(std::ssize(buffer), p->count - at)));
        if (stored) state.read(*p, array, at, part);
        if (!stored) std::ranges::fill(part, 0.0F);
        digest.add(part.data(), std::ssize(part));
      }
      digest.end_array();
    }
    digest.end_parameter(first.missed_updates(*p));
  }
  if (std::ssize(engines) == first.plan().rank.count) return digest.text();
  return text_of_rank_zero(*first.group(), Channel::save, digest.text());
}

void check_belongs(const Checkpoint& checkpoint, const ParameterLayout& layout, StateFormat state) {
  check_optimizer(checkpoint, state);
  const auto expected = checkpoint_parameters(layout);
  const auto& stored = checkpoint.manifest().parameters;
  const auto refuse = [&](const std::string& why) {
    throw InputError(fmt::format("checkpoint {}", checkpoint.directory().string()), why,
                     "resume with the model and --freeze it was saved with");
  };
  if (stored.size() != expected.size()) {
    refuse(fmt::format("it has {} parameters, the model {}", stored.size(), expected.size()));
  }
  for (std::size_t i = 0; i < stored.size(); ++i) {
    if (stored[i].name != expected[i].name || stored[i].shape != expected[i].shape) {
      refuse(fmt::format("its parameter {} does not fit the model's {}", stored[i].name, expected[i].name));
    }
    if (stored[i].trainable != expected[i].trainable) {
      refuse(fmt::format("parameter {} is frozen in one and trained in the other", stored[i].name));
    }
  }
}

void load_state(std::span<OffloadEngine* const> engines, const Checkpoint& checkpoint) {
  const auto parameters = engines.front()->layout().owned_parameters();
  checkpoint.stream([&](std::size_t index, StateArray array, std::int64_t first, std::span<const float> values) {
    for (OffloadEngine* engine : engines) engine->write(*parameters.at(index), array, first, values);
  });
  const std::vector<CheckpointParameter>& stored = checkpoint.manifest().parameters;
  for (OffloadEngine* engine : engines) {
    engine->set_step(checkpoint.manifest().adam_step);
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (stored[i].missed_updates > 0) engine->set_missed_updates(*parameters.at(i), stored[i].missed_updates);
    }
  }
}

}  // namespace tandem
