#include "train/state_io.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.hpp"
#include "core/topology.hpp"

namespace tandem {
namespace {

StateArray array_of(StatePart part) { return static_cast<StateArray>(static_cast<int>(part)); }
static_assert(static_cast<int>(StateArray::master) == static_cast<int>(StatePart::master));
static_assert(static_cast<int>(StateArray::v) == static_cast<int>(StatePart::v));

std::int64_t largest(const ParameterLayout& layout) {
  std::int64_t count = 0;
  for (const Parameter* p : layout.owned_parameters()) count = std::max(count, p->count);
  return count;
}

}  // namespace

std::vector<CheckpointParameter> checkpoint_parameters(const ParameterLayout& layout) {
  std::vector<CheckpointParameter> result;
  for (const Parameter* p : layout.owned_parameters()) {
    CheckpointParameter parameter{p->full_name, {}, p->options.trainable};
    for (int i = 0; i < p->shape.rank(); ++i) parameter.shape.push_back(p->shape[i]);
    result.push_back(std::move(parameter));
  }
  return result;
}

std::filesystem::path save_state(OffloadEngine& engine, const std::filesystem::path& root, Manifest& manifest) {
  const ParameterLayout& layout = engine.layout();
  const auto parameters = layout.owned_parameters();
  manifest.parameters = checkpoint_parameters(layout);
  manifest.adam_step = engine.step();
  std::vector<float> buffer(static_cast<std::size_t>(largest(layout)));
  auto path = write_checkpoint(root, manifest, buffer, [&](std::size_t index, StatePart part, std::span<float> values) {
    engine.read(*parameters.at(index), array_of(part), values);
  });
  sample_process_memory();  // the high-water mark of saving, before the buffer goes
  return path;
}

void check_belongs(const Checkpoint& checkpoint, const ParameterLayout& layout) {
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

void load_state(OffloadEngine& engine, const Checkpoint& checkpoint) {
  std::size_t index = 0;
  engine.initialize(
      [&](const Parameter&, std::span<float> values) { checkpoint.read(index++, StatePart::master, values); });
  std::vector<float> buffer(static_cast<std::size_t>(largest(engine.layout())));
  index = 0;
  for (const Parameter* p : engine.layout().owned_parameters()) {
    const auto values = std::span(buffer).first(static_cast<std::size_t>(p->count));
    for (const StatePart part : {StatePart::m, StatePart::v}) {
      if (!p->options.trainable) break;
      checkpoint.read(index, part, values);
      engine.write(*p, array_of(part), values);
    }
    ++index;
  }
  engine.set_step(checkpoint.manifest().adam_step);
}

}  // namespace tandem
