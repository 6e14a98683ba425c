#pragma once
// What the engine is made of, between the files that implement it.
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/engine.hpp"
#include "offload/executor.hpp"
#include "offload/save_reader.hpp"
#include "offload/stall_clock.hpp"
#include "offload/state_access.hpp"
#include "offload/storage.hpp"
#include "offload/task_runner.hpp"
#include "scheduler/tasks/lowering.hpp"

namespace tandem {

/// Those of no stream that a plan has tasks for.
std::span<const Lane> worker_lanes(const Plan& plan) noexcept;
/// Throws MisuseError where the plan was made for another layout.
void require_plan_of(const ParameterLayout& layout, const Plan& plan);

class OffloadEngine::Impl {
 public:
  Impl(OffloadEngine& engine, Device& device, const ParameterLayout& layout, const OffloadOptions& options,
       const Plan& plan, Trace* trace, Group* group)
      : engine_(engine),
        device_(device),
        group_(group),
        layout_(layout),
        options_(options),
        plan_(checked(plan, layout_, options_, group)),
        storage_(device, layout_, plan_, options.state_folder, options.watchdog_seconds),
        access_(device, layout_, plan_, storage_, options.watchdog_seconds),
        lowering_(std::in_place, layout_, plan_),
        runner_(device, layout_, plan_, storage_, group),
        stalls_(device, options.watchdog_seconds, 2 * static_cast<std::size_t>(layout_.layer_count())),
        executor_(device, layout_, runner_, trace, options.watchdog_seconds, options.overlap,
                  storage_.pageable_bytes() > 0 ? Copies::block : Copies::async, worker_lanes(plan_), group) {
    plan_.memory.unpin(storage_.pageable_bytes());
    executor_.on_submit = [this](const Task& task) { note_submitted(task); };
    executor_.on_done = [this](const Task& task) { note_done(task); };
  }

  void initialize(const std::function<void(const Parameter&, std::int64_t, std::span<float>)>& values,
                  std::int64_t largest_piece);
  void begin_step(const StepOptions& options);
  StepReport end_step();
  void abort_step();
  void begin_evaluation();
  void end_evaluation() noexcept;
  void wait();
  void give_up(std::exception_ptr error) { executor_.give_up(std::move(error)); }
  void end();
  enum class Extent : std::uint8_t { part, whole };
  const Parameter& owned(const Parameter& parameter, Extent extent, std::int64_t first, std::size_t count) const;
  void read(const Parameter& parameter, StateArray array, std::span<float> values);
  void write(const Parameter& parameter, StateArray array, std::int64_t first, std::span<const float> values);
  void set_step(std::int64_t step);
  void begin_load(const char* what);
  void adopt(const Plan& plan);
  std::shared_ptr<SaveReader> begin_save();
  std::string digest();

  WeightsGuard fetch(int layer, StreamView stream);
  GradientsGuard gradients(int layer, StreamView stream);
  void also_used(std::uint64_t ticket, StreamView stream);
  void release(std::uint64_t ticket, StreamView stream);
  void commit(std::uint64_t ticket, StreamView stream);
  void abandon(std::uint64_t ticket);

  EngineCounters counters();

  OffloadEngine& engine_;
  Device& device_;
  Group* group_;  ///< null where there is one rank
  const ParameterLayout layout_;
  const OffloadOptions options_;
  Plan plan_;
  Storage storage_;
  StateAccess access_;
  std::int64_t step_ = 0;

 private:
  enum class Mode : std::uint8_t { idle, step, evaluation };
  /// `unfinished`: what was to change the state could not be finished.
  enum class StateIs : std::uint8_t { unset, whole, unfinished };
  struct HeldWeights {
    std::uint64_t ticket = 0;
    LayerUse use;
    StreamView stream;
    std::vector<StreamView> also;
    int exceptions = 0;  ///< in flight when it was asked for
  };
  struct HeldGradients {
    std::uint64_t ticket = 0;
    GradientUse use;
    StreamView stream;
  };

  static const Plan& checked(const Plan& plan, const ParameterLayout& layout, const OffloadOptions& options,
                             Group* group);
  static void require_made_for(const Plan& plan, const ParameterLayout& layout, const OffloadOptions& options,
                               Rank own);
  static void agree_on(Group* group, const Plan& plan, const std::function<void()>& require_fit);
  void require_adoptable(const Plan& plan) const;
  void leave_step(std::string_view what);
  /// What one rank does not come to the end of, none does. Throws what this one failed by, where it is that.
  template <class Body>
  void for_all_ranks(const Body& body) {
    if (group_ == nullptr) return body();
    try {
      body();
    } catch (...) {  // word of this rank's failure, perhaps, which the group told all
      give_up(std::current_exception());
      executor_.require_good();
      throw;
    }
  }
  void require_idle(const char* what);
  void require_nothing_held(const char* what) const;
  void require_one_stream(int layer, StreamView stream) const;
  void submit();
  void prefetch();
  double gradient_norm();
  double stalled_until(double end);
  double squares_of(int layer);
  double add_squares(int layer, double sum) const;
  double clip_factor(double norm) const;
  void set_update(double scale);
  void clear_gradients(const GradientPlace& place, StreamView stream);
  void require_state() const;
  void note_submitted(const Task& task);
  void note_done(const Task& task);
  LayerBases bases_of(const LayerUse& use) const;
  template <class Held>
  Held take(std::vector<Held>& list, std::uint64_t ticket);

  std::optional<Lowering> lowering_;  ///< never empty; another one for another plan
  TaskRunner runner_;
  TaskList tasks_;
  std::vector<HeldWeights> weights_;
  std::vector<HeldGradients> gradients_;
  std::uint64_t next_ticket_ = 1;
  Mode mode_ = Mode::idle;
  StepOptions step_options_;
  std::vector<double> layer_squares_;  ///< of the gradients of each, for the norm
  bool abandoned_ = false;
  bool update_in_backward_ = false;  ///< of the open step
  StateIs state_ = StateIs::unset;
  StallClock stalls_;  ///< of the caller's streams, for updates that are not done
  std::uint64_t skipped_ = 0;
  std::weak_ptr<SaveReader> saving_;

  // Changed under the executor's lock, and read at any time.
  std::atomic<double> update_began_ = 0.0;
  std::atomic<double> update_ended_ = 0.0;
  std::atomic<std::int64_t> updates_left_ = 0;
  std::atomic<double> update_seconds_ = 0.0;

  Executor executor_;  // last: it stops before what its tasks use goes
};

}  // namespace tandem
