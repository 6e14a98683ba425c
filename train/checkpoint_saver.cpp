#include "train/checkpoint_saver.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "core/memory.hpp"
#include "core/topology.hpp"
#include "core/trace.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Files of the model's source may go while a long run lasts; state is worth more than they are.
std::vector<fs::path> existing(const std::vector<fs::path>& files) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& file : files) {
    if (fs::is_regular_file(file, ignored))
      found.push_back(file);
    else
      spdlog::warn("{} has gone: checkpoints are written without it", file.string());
  }
  return found;
}

}  // namespace

CheckpointSaver::CheckpointSaver(OffloadEngine& engine, SaverOptions options,
                                 std::function<void(const std::string&)> say)
    : engine_(engine), options_(std::move(options)), say_(std::move(say)) {
  prune_checkpoints(options_.root, {});  // what a killed run left, also where this one has nothing to save
  if (options_.background) copy_ = std::make_unique<StateCopy>(engine.layout());
}

CheckpointSaver::~CheckpointSaver() {
  if (thread_.joinable()) thread_.join();
}

bool CheckpointSaver::save(Manifest manifest, bool best) {
  finish(false);
  manifest_ = std::move(manifest);
  manifest_.parameters = checkpoint_parameters(engine_.layout());
  manifest_.adam_step = engine_.step();
  best_pending_ = best;
  began_ = trace_now();
  bytes_ = 0;
  done_ = false;
  failure_ = nullptr;
  total_bytes_ = StateCopy::bytes(engine_.layout());
  if (copy_) {
    copy_->take(engine_);
    held_ = trace_now() - began_;
    thread_ = std::thread([this] {
      // Training comes first where cores are short; the disk is what this waits for.
      constexpr int politeness = 10;
      ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), politeness);
      write();
    });
    under_way_ = true;
    return true;
  }
  engine_.wait();
  buffer_.resize(largest_parameter(engine_.layout()));
  write();
  sample_process_memory();  // the high-water mark of saving, before the buffer goes
  buffer_ = {};
  held_ = trace_now() - began_;
  under_way_ = true;
  return conclude(false);
}

void CheckpointSaver::write() noexcept {
  try {
    CheckpointContent content{.manifest = &manifest_,
                              .read = copy_ ? StateReader([this](std::size_t index, StatePart part, std::span<float>) {
                                return copy_->part(index, part);
                              })
                                            : state_reader(engine_),
                              .buffer = buffer_,
                              .beside = existing(options_.beside),
                              .progress = [this](std::uint64_t bytes) { bytes_ = bytes; }};
    written_ = write_checkpoint(options_.root, content);
    const fs::path best = best_pending_ ? written_ : best_;
    prune_checkpoints(options_.root, {.keep = options_.keep, .written = written_, .best = best});
  } catch (...) {
    failure_ = std::current_exception();  // reaches whoever asks for the outcome
  }
  seconds_ = trace_now() - began_;
  done_ = true;
}

bool CheckpointSaver::conclude(bool last) {
  under_way_ = false;
  if (!failure_) {
    if (best_pending_) best_ = written_;
    say_(fmt::format("saved {} ({} in {:.2f} s, training held for {:.2f} s)", written_.string(),
                     format_bytes(static_cast<std::size_t>(bytes_.load())), seconds_, held_));
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

bool CheckpointSaver::poll() { return !under_way_ || !done_ || finish(false); }

bool CheckpointSaver::finish(bool last) {
  if (thread_.joinable()) thread_.join();
  return !under_way_ || conclude(last);
}

std::optional<double> CheckpointSaver::progress() const noexcept {
  if (!under_way_ || done_) return std::nullopt;
  return std::min(1.0,
                  static_cast<double>(bytes_.load()) / static_cast<double>(std::max<std::uint64_t>(1, total_bytes_)));
}

}  // namespace tandem
