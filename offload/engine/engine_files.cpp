// Saving and loading of an engine's state: here, because the engine itself knows no files.
#include <fmt/format.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "io/checkpoint.hpp"
#include "offload/engine/engine.hpp"
#include "offload/engine/state_io.hpp"
#include "offload/state/state_of_ranks.hpp"

namespace tandem {

std::filesystem::path OffloadEngine::save(const std::filesystem::path& directory,
                                          const std::vector<std::filesystem::path>& files) {
  Manifest manifest;
  manifest.tandem_version = version;
  manifest.model_config = std::string("{}");
  manifest.step = manifest.adam_step = step();
  manifest.plan = plan().outline_json();
  manifest.optimizer = optimizer_of(plan().state);
  manifest.parameters = checkpoint_parameters(*this);
  std::vector<float> buffer(save_buffer_values(layout()));
  SaveScope scope = begin_save();
  SaveReads reads(state_reader(scope, layout()), layout(), manifest.optimizer);
  CheckpointContent content;
  content.manifest = &manifest;
  content.read = [&](std::size_t index, StateArray array, std::int64_t first, std::span<float> values) {
    return reads.read(index, array, first, values);
  };
  content.buffer = buffer;
  content.beside = {files.begin(), files.end()};
  if (group() == nullptr) return write_checkpoint(directory, content);
  std::filesystem::path written;
  std::exception_ptr failure;
  try {
    if (group()->rank().index == 0) written = write_checkpoint(directory, content);
  } catch (...) {
    failure = std::current_exception();
  }
  reads.make_rest(buffer);
  written = text_of_rank_zero(*group(), Channel::save, written.string());  // empty where it could not
  if (failure) std::rethrow_exception(failure);
  if (written.empty()) throw WriteError(directory.string(), "rank 0 could not write the checkpoint");
  return written;
}

std::filesystem::path OffloadEngine::load(const std::filesystem::path& directory) {
  wait();  // throws a failure of before, rather than tell of a checkpoint
  std::unique_ptr<Checkpoint> checkpoint;
  std::string passed_over;
  if (is_checkpoint(directory)) {
    checkpoint = std::make_unique<Checkpoint>(directory);
  } else {
    checkpoint = newest_checkpoint(directory, [&](const std::filesystem::path&, const std::string& why) {
      if (passed_over.empty()) passed_over = why;
    });
  }
  if (!checkpoint) {
    throw InputError(directory.string(), passed_over.empty() ? "there is no checkpoint in it" : passed_over);
  }
  check_belongs(*checkpoint, layout(), plan().state);
  if (!checkpoint->manifest().adapter.empty()) {
    throw InputError(fmt::format("checkpoint {}", checkpoint->directory().string()),
                     "it holds adapters, and not the weights that they were trained over",
                     "tandem export --merged makes a whole model of it");
  }
  begin_load();
  OffloadEngine* const self = this;
  load_state({&self, 1}, *checkpoint);
  return checkpoint->directory();
}

}  // namespace tandem
