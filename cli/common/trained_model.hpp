#pragma once
// A trained model for forwards alone, as `eval` and `sample` use it.
#include <string_view>
#include <vector>

#include "cli/common/flags.hpp"
#include "core/base/error.hpp"
#include "train/hf/model_source.hpp"
#include "train/runtime/loaded_model.hpp"

namespace tandem {

/// `names` and the fields of the configuration that say which model, and where it runs.
std::vector<std::string_view> with_machine_fields(std::vector<std::string_view> names);

/// Checks a configuration that must name a model. Throws UsageError.
void require_model(const TrainConfig& config);

/// Adds the positional SOURCE of a command whose --model names a model by itself too.
void add_source(CLI::App& command, std::string& source);

/// Throws UsageError where SOURCE is nothing that is there, as a second value of a flag that takes one.
void require_source(std::string_view command, const std::string& source);

/// Trained model that a command is asked for: SOURCE, whose base --model says where it is, or where there is no SOURCE
/// that of --model. `config.model` becomes its name. Throws UsageError.
ModelSource find_named(std::string_view command, const std::string& source, TrainConfig& config);

/// Fills a model without optimizer state: every parameter frozen at the weight that training would compute with.
void load_weights(LoadedModel& model, const ModelSource& source, const RunSetup& setup);

/// Calls `parse` for a flag's value; an error names the flag.
template <class Parse>
auto value_of(std::string_view flag, const Parse& parse) {
  try {
    return parse();
  } catch (const UsageError& error) {
    throw UsageError(std::string(flag), error.what());
  }
}

}  // namespace tandem
