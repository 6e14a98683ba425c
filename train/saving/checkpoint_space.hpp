#pragma once
// Disk space that the checkpoints of a run take.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "core/params/parameter_layout.hpp"
#include "offload/engine/state_io.hpp"
#include "train/config/config.hpp"

namespace tandem {

struct CheckpointSpace {
  std::size_t bytes = 0;                   ///< bytes of one checkpoint, about
  std::int64_t at_once = 1;                ///< checkpoints that lie beside each other, at most; 0: of every save
  std::int64_t there = 0;                  ///< checkpoints that lie in the folder already
  std::optional<std::size_t> available{};  ///< free bytes on the disk of the folder; empty: unknown
  std::filesystem::path folder{};          ///< --out as typed; empty: none is given

  /// Bytes that the run writes beside what lies there.
  std::size_t needed() const noexcept;
  /// Text for the table of a plan, without a newline.
  std::string text() const;
  /// Throws WriteError where not even one checkpoint has room, or, unless the run is to go on without, not all that lie
  /// beside each other.
  void require(OnSaveFailure on_failure) const;
};

/// Space for the checkpoints of a run, as far as its configuration tells.
CheckpointSpace checkpoint_space(const TrainConfig& config, const ParameterLayout& layout, SavedState saved);
/// Looks at the disk of --out: how much is free there, and which checkpoints lie there already.
void look_at_disk(CheckpointSpace& space, const std::string& out);

}  // namespace tandem
