#pragma once
// Steps and evaluations of an engine: what begins, what ends, and what an end decides.
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "offload/engine/engine.hpp"
#include "offload/engine/engine_parts.hpp"
#include "offload/engine/engine_status.hpp"
#include "offload/engine/gradient_norm.hpp"
#include "offload/engine/held_layers.hpp"
#include "offload/engine/present_gradients.hpp"
#include "offload/engine/speculation_choice.hpp"

namespace tandem {

class EngineSteps {
 public:
  /// All arguments must outlive the object.
  EngineSteps(EngineParts& parts, OpenPass& pass, const HeldLayers& held, PresentGradients& present,
              StateStatus& status)
      : parts_(parts),
        pass_(pass),
        held_(held),
        present_(present),
        status_(status),
        norm_(parts),
        choice_(parts.plan.speculate) {}

  /// Calls of OffloadEngine about steps.
  void begin_step(const StepOptions& options);
  void begin_micro_batch(bool last);
  StepReport end_step();
  double end_gradients();
  StepReport update(const UpdateValues& values);
  StepReport skip();
  void abort_step();
  void begin_evaluation();
  void end_evaluation() noexcept;
  void wait();
  /// Ends for good: waits for what is in flight.
  void end();
  /// Throws MisuseError inside a step or an evaluation, and what failed the engine. Drops a step that was abandoned.
  void require_idle(const char* what);

  std::uint64_t skipped() const noexcept { return skipped_; }
  /// Steps whose updates ran ahead of the norm, by what became of them.
  std::uint64_t confirmed() const noexcept { return confirmed_; }
  std::uint64_t rolled_back() const noexcept { return rolled_back_; }

 private:
  void require_options(const StepOptions& options) const;
  void require_extent(const StepOptions& options) const;
  void agree_on_present();
  void require_complete(const char* call) const;
  void require_ended(const char* call) const;
  void require_values(const UpdateValues& values) const;
  UpdateValues expected() const;
  void require_groups(double lr, const std::optional<AdamW>& adamw, std::span<const GroupValues> groups,
                      const char* call) const;
  bool updates_in_backward(const StepOptions& options) const;
  /// Whether the open step updates during backward, for good.
  bool updates_in_backward() const noexcept { return update_time_ == UpdateTime::in_backward; }
  UpdateTime time_of_updates(const StepOptions& options) const;
  void begin_speculation();
  void note_outcome(bool as_expected);
  void take_back();
  double stalled_until(double end);
  double clip_factor(double norm) const;
  UpdateSettings settings_of(const UpdateValues& values);
  void set_update(const UpdateValues& values);
  void gather_exceptions();
  void count_missed();
  StepReport close();
  [[noreturn]] void throw_unfinished();

  EngineParts& parts_;
  OpenPass& pass_;
  const HeldLayers& held_;
  PresentGradients& present_;
  StateStatus& status_;
  GradientNorm norm_;
  SpeculationChoice choice_;
  StepOptions options_;                              ///< options of the open step
  UpdateTime update_time_ = UpdateTime::after_norm;  ///< time of the open step's updates
  double norm_of_sum_ = 0.0;                         ///< norm of the added gradients, after end_gradients
  std::vector<GroupSettings> groups_;                ///< settings of the update that is set, group by group
  std::vector<ParameterException> exceptions_;       ///< exceptions from it, by owned parameter; empty: none
  double exposed_ = 0.0;                             ///< exposed update seconds of the step before, likewise
  std::uint64_t skipped_ = 0;                        ///< steps
  std::uint64_t confirmed_ = 0;                      ///< steps
  std::uint64_t rolled_back_ = 0;                    ///< steps
};

}  // namespace tandem
