#pragma once
// The offload engine: keeps weights, gradients and Adam state of a layered model where a plan says,
// moves what each layer needs to the device just in time, and updates every subgroup where the plan
// says. Results are the same bits under every plan.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/trace.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/params/state_array.hpp"
#include "offload/execution/engine_counters.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

struct StepOptions {
  double lr = 1e-3;
  double max_grad_norm = 0.0;  ///< clip the global norm of the gradient to this; 0: no clipping
  int micro_batches = 1;       ///< of this rank, at most OffloadOptions::max_micro_batches; their gradients, and those
                               ///< of all ranks, are *added up*, so for the mean let each loss be divided by the number
                               ///< of them all
  double gradient_scale = 1.0;  ///< multiplies that sum (1 / loss scale)
};

struct StepReport {
  std::int64_t step = 0;                ///< updates applied so far, this one included unless skipped
  double gradient_norm = 0.0;           ///< after gradient_scale, before clipping
  bool skipped = false;                 ///< the norm was not finite: no state changed
  double exposed_update_seconds = 0.0;  ///< that the caller's streams stood still in fetches of this step while the
                                        ///< update of the one before ran; without overlap, the whole update
};

class SaveReader;

/// Not thread-safe: one thread drives it. Layers may be fetched in any order; the plan's
/// prefetching expects 0 ... L-1 in forward, then the reverse, for each micro-batch or, with
/// OffloadOptions::micro_batches_at_once, for so many at a time: a guard of weights serves them all, and a layer's
/// gradients are asked for and committed once for each, in their order. Destroying it waits for work in flight, unless
/// guards are still held, and never throws.
/// An exception that passes a guard inside a step abandons the step: the next call that begins something drops it, as
/// `abort_step` does. What queued work throws fails the engine: every later call throws it again.
///
/// With a `Group` each of its devices has an engine, driven by a thread of its own, with a slice of every layer's state
/// and host weights, and all make the same calls in the same order: steps of as many micro-batches, uses, commits and
/// evaluations, and also `read`, `state_digest`, `begin_save`, reads of its scope, `save`, `load` and `adopt` of a plan
/// made with the same options but its own rank. Gradients add up in the order of micro-batches and, in each, of ranks:
/// R ranks with one micro-batch each leave the bits that one rank leaves with R of them. `initialize` and `write` are
/// given whole parameters by every rank. Who fails, or abandons a step, ends the group: calls of all ranks then throw
/// PeerError; so does an engine that is destroyed inside a step. A group serves one engine of each rank, which leaves
/// it when it is destroyed.
class OffloadEngine final : public ParameterAccess {
 public:
  /// Books all memory of the plan: the device arena once, host memory once, and in the options' folder what of the
  /// state is in a file. Blocks. Throws PlanError, DeviceError, WriteError, what `check_options` throws, and
  /// MisuseError where the plan was made for another layout, state format or number of micro-batches. Layout, options
  /// and plan are copied; `device` must outlive the engine; `trace` may be null, else must outlive it too. There is no
  /// state before `initialize` or `load`: what needs one throws MisuseError. `group`: of this device, of the options'
  /// rank; it must outlive the engine, and be null where there is one rank. With it the constructor waits for those of
  /// the other ranks, and throws MisuseError on all where a plan of one is not of one kind with the others' or not for
  /// its engine. Where it throws, the group has ended.
  OffloadEngine(Device& device, const ParameterLayout& layout, const OffloadOptions& options, const Plan& plan,
                Trace* trace = nullptr, Group* group = nullptr);
  ~OffloadEngine() override;

  /// Sets every parameter's master (moments zero, step count zero) from `values` (fp32, the parameter's
  /// count), called once per owned parameter in model order; frozen parameters are rounded to bf16. Blocks. Throws
  /// MisuseError inside a step or an evaluation, and what `values` throws: until one of these or `load` comes to its
  /// end, the state is then neither read nor trained.
  void initialize(const std::function<void(const Parameter&, std::span<float>)>& values);
  /// The same in pieces, without memory of a parameter's size: `values` is asked for elements
  /// [first, first + values.size()) of a parameter, 4 MiB at most, each once and in their order. Blocks.
  void initialize(const std::function<void(const Parameter&, std::int64_t first, std::span<float>)>& values);

  /// Opens a step. Blocks only while the previous step's updates still run and a limit of buffers needs it. Throws,
  /// with nothing changed, MisuseError inside a step or an evaluation, on micro-batches that the plan has no room for,
  /// on an lr or gradient_scale that is not finite and on a negative max_grad_norm; TrainingError where the state is of
  /// no step.
  void begin_step(const StepOptions& options);
  /// Waits for the gradients, takes the norm, decides, and starts the updates; returns while they may
  /// still run. A step whose norm is not finite is skipped and leaves all state bit-identical; with
  /// OnNonfinite::stop it throws TrainingError. With `stop` and without clipping, subgroups update during
  /// backward, as soon as their gradient is complete: each layer must have been fetched for the last time
  /// when its gradients are committed, and after a non-finite step, or one that was abandoned half-way, the
  /// state is neither read nor trained further (TrainingError) until `initialize` or `load`, or until every array has
  /// been written and `set_step` called. Throws MisuseError without a step, where it was abandoned, while a guard is
  /// held, and before every layer has committed its gradients in every micro-batch; a step that was open stays so.
  StepReport end_step();
  /// Drops the open step: all state is as before begin_step. Blocks until its work has drained. Throws MisuseError
  /// without a step and while a guard is held.
  void abort_step();

  /// As ParameterAccess has them. Both throw MisuseError, too, where no buffer is free since guards hold all that the
  /// plan has. `fetch` throws it outside a step and an evaluation. `gradients` throws it outside a step; where the
  /// layer's gradients of this micro-batch are committed already; where those of the micro-batch before are not; and
  /// where a layer that shares a parameter with it has gradients that are not committed yet, on another stream.
  WeightsGuard fetch(int layer, StreamView stream) override;
  GradientsGuard gradients(int layer, StreamView stream) override;

  /// A scope for forwards alone. Any number of fetches in any number of passes; no gradients. Waits for
  /// updates in flight layer by layer only. Making it throws MisuseError inside a step or another evaluation,
  /// TrainingError where the state is of no step.
  class Evaluation {
   public:
    explicit Evaluation(OffloadEngine& engine);
    ~Evaluation();
    Evaluation(const Evaluation&) = delete;
    Evaluation& operator=(const Evaluation&) = delete;

   private:
    OffloadEngine& engine_;
  };
  [[nodiscard]] Evaluation evaluation() { return Evaluation(*this); }

  /// The state as it was when the scope was made, to be read while later steps run. Forward and backward go on; an
  /// update waits until the state that it overwrites has been read, and so does every call that waits for updates,
  /// until all of it has been: so whoever drives the engine leaves reading to another thread, or reads all at once.
  /// Takes no memory of the state's size. Destroying it lets go what was not read. One thread at a time uses it; the
  /// engine outlives it.
  class SaveScope {
   public:
    ~SaveScope();
    SaveScope(SaveScope&&) noexcept;
    SaveScope& operator=(SaveScope&&) = delete;
    SaveScope(const SaveScope&) = delete;

    /// As OffloadEngine::read, of elements [first, first + values.size()) of one array. All owned parameters in model
    /// order, each array from its beginning in pieces of any size (of a frozen one the master alone); another order
    /// throws MisuseError. Blocks until the updates that came before are done with them. Rethrows what failed.
    void read(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);
    /// The same of elements that are all this rank's own, for whoever reads those of the others where they are: tells
    /// no other rank.
    void read_own(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);

   private:
    friend class OffloadEngine;
    SaveReader& reader() const;
    explicit SaveScope(std::shared_ptr<SaveReader> reader);
    std::shared_ptr<SaveReader> reader_;
  };
  /// Does not block. Not inside a step; throws MisuseError where another scope is alive.
  [[nodiscard]] SaveScope begin_save();

  /// Blocks until every update in flight is done. Rethrows what failed. This and all that waits for updates throws
  /// MisuseError while a guard is held.
  void wait();
  /// Reads (count) fp32 values of one array of one owned parameter. Blocks; waits for updates. A frozen
  /// parameter's master is its widened weight, its moments are zero. Throws MisuseError where the layout has no such
  /// parameter, or `values` another size; TrainingError where the state is of no step.
  void read(const Parameter& parameter, StateArray array, std::span<float> values);
  /// Writes them; a master also sets the weight. Moments of a frozen parameter are accepted and dropped: they stay
  /// zero. Blocks. Not inside a step. Throws MisuseError as `read`.
  void write(const Parameter& parameter, StateArray array, std::span<const float> values);
  /// The same of elements [first, first + values.size()).
  void write(const Parameter& parameter, StateArray array, std::int64_t first, std::span<const float> values);
  /// Updates applied so far. `set_step` ends a load by hand, every array having been written. Not inside a step. Throws
  /// MisuseError where it is negative.
  std::int64_t step() const noexcept;
  void set_step(std::int64_t step);
  /// Writes `directory/step-XXXXXXXX`, a checkpoint as docs/checkpoints.md describes, and returns its path. It
  /// appears under its name only when it is whole and on the disk. Takes host memory for a piece of state, 8 MiB at
  /// most. `files` are copied into it under their own names: state of the caller's, which is so whole where the
  /// checkpoint is, and which `load` finds unaltered. Blocks; waits for updates. Not inside a step. Throws WriteError;
  /// InputError where one of the files cannot be read; MisuseError where two of them have one name, or that of a file
  /// of the checkpoint's own. It names no model: `load` reads it and `tandem digest`, but not `tandem export`.
  std::filesystem::path save(const std::filesystem::path& directory,
                             const std::vector<std::filesystem::path>& files = {});
  /// Restores state and step from a checkpoint, or from the newest one in `directory` that is whole; under any
  /// plan. Returns the path of the one that was read, where the caller's files are, too: a newer one that is damaged,
  /// in whichever of its files, has been passed over. Blocks. Throws InputError: before anything is changed where there
  /// is none, it is damaged or belongs to other parameters; and where reading fails later, after which the state is
  /// neither read nor trained until one is loaded whole. Not inside a step.
  std::filesystem::path load(const std::filesystem::path& directory);
  /// Goes on under another plan for the same layout and state format, within the memory already booked: state and
  /// weights move to where it has them, no bit of them changes. Blocks; waits for updates. Not inside a step. Throws
  /// MisuseError (the plan belongs elsewhere) and PlanError (it needs more memory than the engine's first plan
  /// and what that had spare, or one of the two has state in a file) with nothing changed; DeviceError, after which the
  /// state is lost. In a group what one rank refuses, all do. The plan is to be made within what is booked:
  /// `device_memory` = device_bytes() + reserved_device_memory + device().info().reserved, `host_memory` = host_bytes()
  /// + reserved_host_memory, nothing spare, and PlanningFacts whose `host_available` and `pinned_per_page_table` are 0,
  /// as all of it is taken.
  void adopt(const Plan& plan);
  /// 32 hexadecimal digits, see docs/state-digest.md. Blocks; waits for updates. Not inside a step. Throws
  /// TrainingError where the state is of no step.
  std::string state_digest();

  Device& device() const noexcept;
  /// Null where there is one rank.
  Group* group() const noexcept;
  const Plan& plan() const noexcept;
  const ParameterLayout& layout() const noexcept;
  EngineCounters counters() const;
  /// Bytes of device memory that the engine holds, and of host memory.
  std::size_t device_bytes() const noexcept;
  std::size_t host_bytes() const noexcept;

 protected:
  void also_used(std::uint64_t ticket, StreamView stream) override;
  void release(std::uint64_t ticket, StreamView stream) noexcept override;
  void commit(std::uint64_t ticket, StreamView stream) override;
  void abandon(std::uint64_t ticket) noexcept override;

 private:
  void begin_load();
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
