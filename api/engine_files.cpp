// Saving and loading of an engine's state: here, because the engine itself knows no files.
#include <memory>

#include "api/state_io.hpp"
#include "core/version.hpp"
#include "io/checkpoint.hpp"
#include "offload/engine.hpp"

namespace tandem {

std::filesystem::path OffloadEngine::save(const std::filesystem::path& directory,
                                          const std::vector<std::filesystem::path>& files) {
  Manifest manifest;
  manifest.tandem_version = version;
  manifest.model_config = std::string("{}");
  manifest.step = manifest.adam_step = step();
  manifest.plan = plan().outline_json();
  manifest.parameters = checkpoint_parameters(layout());
  std::vector<float> buffer(save_buffer_values(layout()));
  SaveScope scope = begin_save();
  CheckpointContent content;
  content.manifest = &manifest;
  content.read = state_reader(scope, layout());
  content.buffer = buffer;
  content.beside = files;
  return write_checkpoint(directory, content);
}

std::filesystem::path OffloadEngine::load(const std::filesystem::path& directory) {
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
  check_belongs(*checkpoint, layout());
  begin_load();
  load_state(*this, *checkpoint);
  return checkpoint->directory();
}

}  // namespace tandem
