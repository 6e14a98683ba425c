#pragma once
// The offload engine: keeps weights, gradients and Adam state of a layered model where a plan says, moves what each
// layer needs to the device just in time, and updates every subgroup where the plan says. Results have the same bits
// under every plan.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/trace.hpp"
#include "core/device/device.hpp"
#include "core/device/group.hpp"
#include "core/numerics/adam.hpp"
#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/params/state_array.hpp"
#include "core/params/weight_encoder.hpp"
#include "offload/execution/engine_counters.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

/// Learning rate and hyperparameters of one group of parameters.
struct GroupValues {
  double lr = 1e-3;
  std::optional<AdamW> adamw{};  ///< none: OffloadOptions::adamw
};

/// Values by which `update` changes the state.
struct UpdateValues {
  double scale = 1.0;                 ///< factor of the added gradients: 1 / loss scale, times what clips them
  double lr = 1e-3;                   ///< learning rate of all groups, where `groups` is empty
  std::optional<AdamW> adamw{};       ///< hyperparameters of all groups, likewise; none: OffloadOptions::adamw
  std::vector<GroupValues> groups{};  ///< by ParameterOptions::group, as many as ParameterLayout::group_count()
};

/// Treatment of layers and parameters that have no gradient in a micro-batch, or in none of a step.
enum class Absent : std::uint8_t {
  refuse,  ///< every layer commits in every micro-batch
  zero,    ///< they count as a gradient of zero
  skip,  ///< a parameter that has none in a whole step stays as it is: master, moments, and the number of its updates,
         ///< as PyTorch treats a gradient of None
};

struct StepOptions {
  double lr = 1e-3;
  double max_grad_norm = 0.0;  ///< bound to which end_step clips the gradient's global norm; 0: no clipping
  /// Micro-batches of the step on this rank, 1 to OffloadOptions::max_micro_batches. Gradients of all micro-batches of
  /// all ranks are *added up*: for their mean, divide each loss by the number of them all.
  int micro_batches = 1;
  /// Whether the step may have fewer micro-batches than that: it ends with those that have begun. The last one's
  /// gradients become final at the end of the step, unless begin_micro_batch says that it is the last.
  bool open_ended = false;
  Absent absent = Absent::refuse;
  double gradient_scale = 1.0;        ///< factor of the added gradients (1 / loss scale)
  std::optional<AdamW> adamw{};       ///< none: OffloadOptions::adamw
  std::vector<GroupValues> groups{};  ///< in place of lr and adamw, as UpdateValues::groups
  /// Whether end_gradients may be followed by `skip`, or by `update` with other values than these: then no update
  /// begins before it is called. Of use where updates would run in backward; else they never begin earlier.
  bool decides_at_end = false;
};

struct StepReport {
  std::int64_t step = 0;                ///< updates applied so far, this one included unless skipped
  double gradient_norm = 0.0;           ///< global norm, after gradient_scale and before clipping
  bool skipped = false;                 ///< the norm was not finite: nothing changed
  double exposed_update_seconds = 0.0;  ///< seconds that the caller's streams stood still in fetches of this step while
                                        ///< the update of the one before ran; without overlap, the whole update
};

class SaveReader;

/// Engine of one device. Not thread-safe: one thread drives it. Layers may be fetched in any order; the plan's
/// prefetching expects 0 ... L-1 in forward, then the reverse, for each micro-batch or, with
/// OffloadOptions::micro_batches_at_once, for so many at a time: a guard of weights serves them all, and a layer's
/// gradients are asked for and committed once for each, in their order. The destructor waits for work in flight, unless
/// guards are still held, and never throws.
/// An exception that passes a guard inside a step abandons the step: the next call that begins something drops it, as
/// `abort_step` does. An error in queued work fails the engine: every later call throws it again.
///
/// With a `Group`, each device of the group has an engine, driven by a thread of its own, with a slice of every layer's
/// state and host weights. All make the same calls in the same order: steps of as many micro-batches, uses, commits and
/// evaluations, and also `read`, `state_digest`, `begin_save`, reads of its scope, `save`, `load` and `adopt` of a plan
/// made with the same options but its own rank. Gradients add up in the order of micro-batches and, in each, of ranks:
/// R ranks with one micro-batch each leave the bits that one rank leaves with R of them. Every rank gives whole
/// parameters to `initialize` and `write`. A rank that fails, abandons a step or destroys its engine inside a step ends
/// the group: calls of all ranks then throw PeerError. A group serves one engine of each rank, which leaves it when it
/// is destroyed.
class OffloadEngine final : public ParameterAccess {
 public:
  /// Books all memory of the plan: the device arena once, host memory once, and a file in the options' folder for state
  /// that lives there. Layout, options and plan are copied; `device` must outlive the engine; `trace` may be null, else
  /// it must outlive the engine too. There is no state before `initialize` or `load`: calls that need it throw
  /// MisuseError. Blocks. Throws PlanError, DeviceError, WriteError, as `check_options`, and MisuseError where the plan
  /// was made for another layout, state format or number of micro-batches.
  /// `group`: the member of this device, with the options' rank; must outlive the engine, and be null for a single
  /// rank. With a group the constructor waits for the constructors of the other ranks, and throws MisuseError on all
  /// ranks where their plans do not belong together or one does not fit its engine. A constructor that throws ends the
  /// group.
  OffloadEngine(Device& device, const ParameterLayout& layout, const OffloadOptions& options, const Plan& plan,
                Trace* trace = nullptr, Group* group = nullptr);
  ~OffloadEngine() override;

  /// Sets every parameter's master from `values` (fp32, the parameter's count), called once per owned parameter in
  /// model order; moments and step count become zero, frozen parameters are rounded to bf16. Blocks. Throws MisuseError
  /// inside a step or an evaluation, and what `values` throws: the state is then neither read nor trained until
  /// `initialize` or `load` completes.
  void initialize(const std::function<void(const Parameter&, std::span<float>)>& values);
  /// Initializes in pieces, without memory of a parameter's size: `values` is asked for elements [first, first +
  /// values.size()) of a parameter, 4 MiB at most, each once and in their order. Blocks.
  /// A parameter that is stored in another format is encoded from its values, unless `codes` writes its codes and
  /// scales, all of them, and returns true.
  using Codes = std::function<bool(const Parameter&, CodeSink&)>;
  void initialize(const std::function<void(const Parameter&, std::int64_t first, std::span<float>)>& values,
                  const Codes& codes = {});

  /// Opens a step. Blocks only while the previous step's updates still run and no buffer is free. Throws, with nothing
  /// changed, MisuseError inside a step or an evaluation, on a number of micro-batches that the plan does not allow, on
  /// an lr or gradient_scale that is not finite and on a negative max_grad_norm; TrainingError where the state is not
  /// that of a whole step.
  void begin_step(const StepOptions& options);
  /// Begins the step's next micro-batch: the one before is over, also for layers that have not committed in it.
  /// begin_step begins the first; and where every layer commits in every micro-batch, the next one begins by itself.
  /// The call does nothing in a micro-batch in which no gradients were asked for yet. `last`: no other follows, which
  /// saves an open-ended step a pass over its gradients at the end. Does not block. Throws, with nothing changed,
  /// MisuseError outside a step, while gradients are held, where a layer is missing that may not be, beyond
  /// StepOptions::micro_batches, and where several micro-batches pass through the layers at once.
  void begin_micro_batch(bool last = false);
  /// Ends a step: waits for the gradients, takes the norm, decides, and starts the updates; returns while they may
  /// still run. A step whose norm is not finite is skipped and leaves all state bit-identical; with OnNonfinite::stop
  /// it throws TrainingError. With `stop` and without clipping, subgroups update during backward, as soon as their
  /// gradient is complete. Each layer must then have been fetched for the last time when its gradients are committed.
  /// After a non-finite step, or an abandoned one, the state is then neither read nor trained further (TrainingError)
  /// until `initialize` or `load`, or until every array has been written and `set_step` called. Throws MisuseError
  /// without a step, where it was abandoned, while a guard is held, and before every layer has committed its gradients
  /// in every micro-batch; an open step stays open.
  StepReport end_step();
  /// The first half of end_step, for callers who clip, unscale or skip by rules of their own: waits for the gradients
  /// and returns the global norm of their sum, before any scale, which may be infinite or NaN. `update`, `skip` or
  /// `abort_step` ends the step. In a group every rank must decide alike. Throws as end_step without a step or before
  /// all gradients are committed; an open step stays open.
  double end_gradients();
  /// Starts the updates after end_gradients, and returns while they may still run. The bits are those of these values,
  /// whatever begin_step was told; clipping is in `scale`. Throws, with nothing changed and the step still open,
  /// MisuseError without end_gradients, on values out of range, on gradients whose norm is not finite (call `skip`),
  /// and where updates have run in backward by other values than these (StepOptions::decides_at_end). Where those have
  /// run by a norm that is not finite, TrainingError as end_step does.
  StepReport update(const UpdateValues& values);
  /// Ends the step after end_gradients without an update: all state is bit-identical. Throws MisuseError without
  /// end_gradients, and where updates have run in backward.
  StepReport skip();
  /// Drops the open step: all state is as before begin_step. Guards that are held are empty from then on, so that a
  /// handler of an exception may call it. Blocks until the step's work has drained. Throws MisuseError without a step.
  void abort_step();

  /// Guards as in ParameterAccess. Both also throw MisuseError where guards hold all buffers that the plan has. `fetch`
  /// throws it outside a step and an evaluation. `gradients` throws it outside a step; where the layer's gradients of
  /// this micro-batch are committed already; where those of the micro-batch before are not; and where a layer that
  /// shares a parameter with it has gradients on another stream that are not committed yet.
  WeightsGuard fetch(int layer, StreamView stream) override;
  GradientsGuard gradients(int layer, StreamView stream) override;

  /// Weights of a parameter whose layer stays on the device, of its shape and type: for callers whose modules hold
  /// weights themselves. The address is the same until `adopt` or the engine's end. The contents are those of the last
  /// update for work that a stream does behind `wait_for_weights`; a step's update waits for reads that were queued
  /// before the layer's gradients were committed, on the stream that committed them. The caller does not write them,
  /// but by `write`. Throws MisuseError where the plan does not keep the layer on the device
  /// (OffloadOptions::resident_layers), or the layout has no such parameter.
  TensorView resident_weights(const Parameter& parameter) const;
  /// Makes `stream` wait until the weights of a layer that stays on the device are those of the last update. Blocks and
  /// throws as `fetch`, and as `resident_weights`; also outside a step.
  void wait_for_weights(int layer, StreamView stream);

  /// Scope for forwards alone: any number of fetches in any number of passes; no gradients. Waits for updates in flight
  /// layer by layer only. The constructor throws MisuseError inside a step or another evaluation, TrainingError where
  /// the state is not that of a whole step.
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

  /// View of the state as it was when the scope was made, to be read while later steps run. Forward and backward go on.
  /// An update waits until the state that it overwrites has been read; every call that waits for updates waits until
  /// all state has been read. So read on another thread than the engine's, or read all at once. Takes no memory of the
  /// state's size. Destroying the scope gives up what was not read. One thread at a time uses it; the engine must
  /// outlive it.
  class SaveScope {
   public:
    ~SaveScope();
    SaveScope(SaveScope&&) noexcept;
    SaveScope& operator=(SaveScope&&) = delete;
    SaveScope(const SaveScope&) = delete;

    /// Reads elements [first, first + values.size()) of one array, as OffloadEngine::read does. The order is all owned
    /// parameters in model order, each array from its beginning in pieces of any size (of a frozen parameter the master
    /// alone); another order throws MisuseError. Blocks until earlier updates of these elements are done. Rethrows what
    /// failed. In a group every rank makes the same reads, and rank 0, who writes, gets the values: elsewhere `values`
    /// has what is the rank's own, and the rest is left as it was.
    void read(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);
    /// Reads elements that are all this rank's own, without telling other ranks: for a caller who reads the others'
    /// elements where they are.
    void read_own(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values);

   private:
    friend class OffloadEngine;
    SaveReader& reader() const;
    explicit SaveScope(std::shared_ptr<SaveReader> reader);
    std::shared_ptr<SaveReader> reader_;
  };
  /// Makes a scope of the present state. Does not block. Not inside a step; throws MisuseError where another scope is
  /// alive.
  [[nodiscard]] SaveScope begin_save();

  /// Blocks until every update in flight is done. Rethrows what failed. Every call that waits for updates throws
  /// MisuseError while a guard is held.
  void wait();
  /// Reads (count) fp32 values of one array of one owned parameter. Blocks; waits for updates. A frozen parameter's
  /// master is its widened weight, its moments are zero. Throws MisuseError where the layout has no such parameter, or
  /// `values` another size; TrainingError where the state is not that of a whole step.
  void read(const Parameter& parameter, StateArray array, std::span<float> values);
  /// Writes (count) fp32 values of one array of one owned parameter; a master also sets the weight. Moments of a frozen
  /// parameter are accepted and dropped: they stay zero. Blocks. Not inside a step. Throws MisuseError as `read`.
  void write(const Parameter& parameter, StateArray array, std::span<const float> values);
  /// Writes elements [first, first + values.size()) of one array of one owned parameter.
  void write(const Parameter& parameter, StateArray array, std::int64_t first, std::span<const float> values);
  /// Sink for the codes and scales of a parameter that is stored in another format, whose values `read` and `write`
  /// refuse; the state digest has the hash of what was written. Valid until the next call for the parameter. Not inside
  /// a step. Throws MisuseError where the parameter is stored as its values are.
  CodeSink& write_codes(const Parameter& parameter);
  /// Number of updates applied so far. `set_step` ends a load by hand, after every array has been written. Not inside a
  /// step. Throws MisuseError for a negative number.
  std::int64_t step() const noexcept;
  void set_step(std::int64_t step);
  /// Number of those updates that left a parameter as it was, since it had no gradient (Absent::skip). Adam's t for it
  /// is step() without them. `set_missed_updates` is called after `set_step`, which sets all to 0. Throws MisuseError
  /// where the layout has no such parameter, and for a number that is negative or above step(); not inside a step.
  std::int64_t missed_updates(const Parameter& parameter) const;
  void set_missed_updates(const Parameter& parameter, std::int64_t updates);
  /// Writes `directory/step-XXXXXXXX`, a checkpoint as docs/checkpoints.md describes, and returns its path. It appears
  /// under its name only when it is whole and on the disk. `files`, the caller's own state, are copied into it under
  /// their own names: they are whole where the checkpoint is, and `load` finds them unaltered. Takes host memory for a
  /// piece of state, 8 MiB at most. Blocks; waits for updates. Not inside a step. Throws WriteError; InputError where
  /// one of the files cannot be read; MisuseError where two of them have one name, or that of a file of the
  /// checkpoint's own. The checkpoint names no model: `load` and `tandem digest` read it, `tandem export` does not.
  std::filesystem::path save(const std::filesystem::path& directory,
                             const std::vector<std::filesystem::path>& files = {});
  /// Restores state and step from a checkpoint, or from the newest whole one in `directory`; under any plan. Returns
  /// the path of the one that was read, where the caller's files are, too; newer checkpoints with a damaged file are
  /// passed over. Blocks. Throws InputError: before anything is changed where there is no checkpoint, it is damaged or
  /// belongs to other parameters; and where reading fails later, after which the state is neither read nor trained
  /// until a load completes. Not inside a step.
  std::filesystem::path load(const std::filesystem::path& directory);
  /// Changes to another plan for the same layout and state format, within the memory already booked: state and weights
  /// move to where it has them, no bit of them changes. Blocks; waits for updates. Not inside a step. Throws
  /// MisuseError (the plan belongs elsewhere) and PlanError (it needs more memory than the engine's first plan and its
  /// spare memory, or one of the two has state in a file) with nothing changed; DeviceError, after which the state is
  /// lost. In a group, a refusal by one rank is one by all. Make the plan within the booked memory: `device_memory` =
  /// device_bytes() + reserved_device_memory + device().info().reserved, `host_memory` = host_bytes() +
  /// reserved_host_memory, nothing spare, and PlanningFacts whose `host_available` and `pinned_per_page_table` are 0,
  /// as all of it is taken.
  void adopt(const Plan& plan);
  /// Hash of a coded parameter's codes and scales as the digest has it, 32 hexadecimal digits. Throws MisuseError where
  /// the parameter is not coded, or not all of it has been written.
  std::string code_hash(const Parameter& parameter) const;
  /// Digest of the state: 32 hexadecimal digits, see docs/state-digest.md. Blocks; waits for updates. Not inside a
  /// step. Throws TrainingError where the state is not that of a whole step.
  std::string state_digest();

  Device& device() const noexcept;
  /// Null for a single rank.
  Group* group() const noexcept;
  const Plan& plan() const noexcept;
  const ParameterLayout& layout() const noexcept;
  EngineCounters counters() const;
  /// Bytes of device memory that the engine holds, and of host memory.
  std::size_t device_bytes() const noexcept;
  std::size_t host_bytes() const noexcept;

 protected:
  bool holds(std::uint64_t ticket) const noexcept override;
  void also_used(std::uint64_t ticket, StreamView stream) override;
  void release(std::uint64_t ticket, StreamView stream) noexcept override;
  void leave_out(std::uint64_t ticket, std::size_t parameter) override;
  void commit(std::uint64_t ticket, StreamView stream) override;
  void abandon(std::uint64_t ticket) noexcept override;

 private:
  void begin_load();
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
