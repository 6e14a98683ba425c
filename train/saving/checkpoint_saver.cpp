#include "train/saving/checkpoint_saver.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/start_thread.hpp"
#include "core/base/trace.hpp"
#include "core/host/topology.hpp"
#include "core/memory/memory.hpp"
#include "core/ops/update_kernels.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Files of the model's source may go while a long run lasts; state is worth more than they are.
std::vector<FileBeside> existing(const std::vector<FileBeside>& files) {
  std::vector<FileBeside> found;
  std::error_code ignored;
  for (const auto& file : files) {
    if (fs::is_regular_file(file.from, ignored))
      found.push_back(file);
    else
      spdlog::warn("{} has gone: checkpoints are written without it", file.from.string());
  }
  return found;
}

/// Training comes first where cores are short; the disk is what the calling thread waits for. Threads that it starts do
/// as it does, and so do the requests of all to the disk, whose priority follows from this one.
void give_way(int politeness) { ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), politeness); }
constexpr int politeness_where_updates_wait = 10;
constexpr int politeness_where_nobody_waits = 19;

}  // namespace

CheckpointSaver::CheckpointSaver(std::vector<OffloadEngine*> engines, SaverOptions options,
                                 std::function<void(const std::string&)> say)
    : engines_(std::move(engines)),
      engine_(*engines_.front()),
      options_(std::move(options)),
      say_(std::move(say)),
      pace_(options_.urgent, options_.clock) {
  // Removes the leftovers of a killed run, also where this run has nothing to save.
  if (options_.writes) prune_checkpoints(options_.root, {});
  if (!options_.copies) return;
  copy_ = std::make_unique<StateCopy>(engine_.layout(), optimizer_of(engine_.plan().state),
                                      engine_.device().host_kernels().parallel(), options_.saved);
}

CheckpointSaver::~CheckpointSaver() {
  if (!thread_.joinable()) return;
  pace_.hurry();
  if (!done_) spdlog::info("checkpoint of step {} is being written, the run waits for it", manifest_.step);
  try {
    wait_for_the_thread();
  } catch (const StalledError&) {  // reported
  }
  thread_.join();
}

/// Waits until the thread is done. It counts what it writes: a disk that takes nothing for long may never again.
void CheckpointSaver::wait_for_the_thread() {
  constexpr std::chrono::milliseconds tick(200);
  ProgressWatch progress(options_.watchdog_seconds, bytes_);
  std::unique_lock lock(mutex_);
  while (!wakes_.wait_for(lock, tick, [&] { return done_.load(); })) {
    const auto seconds = progress.stalled(bytes_);
    if (!seconds) continue;
    const StalledError error(
        fmt::format("checkpoint of step {}: nothing written for {:.0f} s", manifest_.step, *seconds),
        fmt::format("the disk of {} takes no more", options_.root.string()));
    report_stall(error);
    throw error;
  }
}

bool CheckpointSaver::save(Manifest manifest, std::int64_t steps, bool best) {
  finish(false);
  manifest_ = std::move(manifest);
  manifest_.optimizer = optimizer_of(engine_.plan().state);
  manifest_.parameters = checkpoint_parameters(engine_);
  for (CheckpointParameter& p : manifest_.parameters) {
    if (options_.saved == SavedState::all || p.trainable) continue;
    p.elsewhere = options_.elsewhere.at(p.name);
    if (const auto own = options_.original.find(p.name); own != options_.original.end()) p.original = own->second;
  }
  manifest_.adam_step = engine_.step();
  best_pending_ = best;
  began_ = trace_now();
  bytes_ = 0;
  done_ = false;
  failure_ = nullptr;
  total_bytes_ = StateCopy::bytes(engine_.layout(), manifest_.optimizer, options_.saved);
  beside_ = {};
  waited_ = engine_.counters().save_wait_seconds;
  plan_ = engine_.plan();
  predicted_.reset();
  measured_disk_ = 0.0;
  const bool trains_on = steps > 0 && !(options_.urgent && options_.urgent());
  takes_copy_ = copy_ && trains_on;
  if (takes_copy_) pace_.begin(total_bytes_, {steps, step_seconds_});
  if (!copy_) buffer_.resize(save_buffer_values(engine_.layout()));
  state_is_read_ = false;
  scope_.emplace(engines_);
  try {
    thread_ = start_thread("checkpoint", [this] { write(); });
  } catch (...) {
    scope_.reset();  // nobody reads what updates would wait for
    throw;
  }
  affects_step_ = true;
  under_way_ = true;
  return true;
}

/// Notes how fast the disk lets it go on: the first piece may have waited for updates, and the last flush waits for
/// bytes that nobody waits for.
StateReader CheckpointSaver::timed(StateReader read) {
  struct Progress {
    double began = 0.0;
    double bytes = 0.0;
  };
  return [this, read = std::move(read), so_far = Progress{}](std::size_t index, StateArray array, std::int64_t first,
                                                             std::span<float> buffer) mutable {
    const auto values = read(index, array, first, buffer);
    const double now = trace_now();
    if (so_far.began == 0.0) {
      so_far.began = now;
    } else {
      measured_disk_ = so_far.bytes / std::max(1e-9, now - so_far.began);
    }
    so_far.bytes += static_cast<double>(values.size_bytes());
    return values;
  };
}

/// Training waits for the copy alone: that is taken as fast as can be, and written at leisure.
fs::path CheckpointSaver::write_copy(CheckpointContent& content) {
  copy_->take(*scope_);
  let_go();
  give_way(politeness_where_nobody_waits);
  content.read = [this](std::size_t index, StateArray array, std::int64_t, std::span<float>) {
    return copy_->part(index, array);
  };
  PacedFiles files(pace_);
  fs::path written = write_checkpoint(options_.root, content, files);
  measured_disk_ = pace_.disk();
  return written;
}

std::span<float> CheckpointSaver::buffer() {
  return copy_ ? copy_->memory().first(save_buffer_values(engine_.layout())) : std::span<float>(buffer_);
}

/// Updates wait for what is still to be read, and so for the disk.
fs::path CheckpointSaver::write_beside(CheckpointContent& content) {
  give_way(politeness_where_updates_wait);
  content.buffer = buffer();
  const StateReader read = timed(state_reader(*scope_, engine_.layout()));
  if (options_.ranks_elsewhere) return write_or_read(content, read);
  content.read = read;
  return write_checkpoint(options_.root, content);
}

/// The part of this process in a save of several: the others wait for each of its reads, also where nothing is written,
/// or no more can be.
fs::path CheckpointSaver::write_or_read(CheckpointContent& content, const StateReader& read) {
  SaveReads reads(read, engine_.layout(), manifest_.optimizer, options_.saved);
  content.read = [&](std::size_t index, StateArray array, std::int64_t first, std::span<float> values) {
    return reads.read(index, array, first, values);
  };
  fs::path written;
  std::exception_ptr failure;
  try {
    if (options_.writes) written = write_checkpoint(options_.root, content);
  } catch (const WriteError&) {
    failure = std::current_exception();
  } catch (const InputError&) {  // a file beside
    failure = std::current_exception();
  }
  reads.make_rest(content.buffer);
  if (failure) std::rethrow_exception(failure);
  return written;
}

void CheckpointSaver::write_state() {
  CheckpointContent content{.manifest = &manifest_,
                            .read{},
                            .buffer{},
                            .beside = existing(options_.beside),
                            .progress = [this](std::uint64_t bytes) { bytes_ = bytes; }};
  written_ = takes_copy_ ? write_copy(content) : write_beside(content);
  if (options_.predict) predicted_ = options_.predict(plan_, disk_);
}

/// Gives up the state that was not read, so that updates go on.
void CheckpointSaver::let_go() {
  scope_.reset();
  state_is_read_ = true;
}

void CheckpointSaver::write() noexcept {
  try {
    write_state();
    seconds_ = trace_now() - began_;  // it counts from here on, and what is removed is another matter
    const fs::path best = best_pending_ ? written_ : best_;
    if (options_.writes) {
      prune_checkpoints(options_.root, {.keep = options_.keep, .written = written_, .best = best});
    }
  } catch (...) {
    failure_ = std::current_exception();  // reaches whoever asks for the outcome
  }
  let_go();  // updates may still wait for what a failed save has not read
  try {
    sample_process_memory();  // the high-water mark of saving, before the buffer goes
  } catch (...) {             // a figure, and no reason for a save to fail
  }
  buffer_ = {};
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  wakes_.notify_all();
}

bool CheckpointSaver::conclude(bool last) {
  under_way_ = false;
  if (!failure_) {
    if (best_pending_) best_ = written_;
    if (options_.writes) {
      say_(fmt::format("saved {} ({} in {:.2f} s, {})", written_.string(),
                       format_bytes(static_cast<std::size_t>(bytes_.load())), seconds_, cost_of_the_save()));
    }
    if (measured_disk_ > 0.0) disk_ = measured_disk_;
    alone_ = {};
    return true;
  }
  try {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  } catch (const WriteError& error) {
    if (last || options_.on_failure == OnSaveFailure::stop) throw;
    spdlog::warn("checkpoint of step {} failed, the run goes on: {}", manifest_.step, error.what());
  }
  return false;
}

std::string CheckpointSaver::cost_of_the_save() const {
  std::string text = fmt::format("updates waited {:.2f} s", engine_.counters().save_wait_seconds - waited_);
  if (beside_.count == 0 || alone_.count == 0) return text;
  text += ", step " + SaveSlowdown{beside_.mean() / alone_.mean(), beside_.count}.text();
  if (predicted_) text += fmt::format(" (predicted {})", predicted_->text());
  return text;
}

void CheckpointSaver::note_step(double seconds) {
  Steps& steps = affects_step_ ? beside_ : alone_;
  ++steps.count;
  steps.seconds += seconds;
  affects_step_ = under_way_ && bytes_ < total_bytes_ && (takes_copy_ || !state_is_read_);
  step_seconds_ = seconds;
  pace_.note_step(seconds);
}

bool CheckpointSaver::poll() { return !under_way_ || !done_ || finish(false); }

bool CheckpointSaver::finish(bool last) {
  pace_.hurry();
  if (thread_.joinable()) {
    wait_for_the_thread();
    thread_.join();
  }
  return !under_way_ || conclude(last);
}

std::optional<double> CheckpointSaver::progress() const noexcept {
  if (!under_way_ || done_) return std::nullopt;
  return std::min(1.0,
                  static_cast<double>(bytes_.load()) / static_cast<double>(std::max<std::uint64_t>(1, total_bytes_)));
}

}  // namespace tandem
