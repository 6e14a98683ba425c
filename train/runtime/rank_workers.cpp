#include "train/runtime/rank_workers.hpp"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "comm/local_group.hpp"
#include "core/base/start_thread.hpp"
#include "data/window_sampler.hpp"

namespace tandem {

/// A thread that does one thing at a time.
class RankWorkers::Worker {
 public:
  explicit Worker(int rank) : thread_(start_thread(fmt::format("rank {}", rank), [this] { loop(); })) {}
  ~Worker() {
    give({});
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// Does not block. `work` does not throw; empty, it is the last.
  void give(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_ = std::move(work);
      at_work_ = true;
    }
    wakes_.notify_all();
  }
  /// Blocks until what was given is done.
  void wait() {
    std::unique_lock lock(mutex_);
    wakes_.wait(lock, [this] { return !at_work_; });
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wakes_.wait(lock, [this] { return at_work_; });
      if (!work_) return;
      lock.unlock();
      work_();
      lock.lock();
      at_work_ = false;
      wakes_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wakes_;
  std::function<void()> work_;
  bool at_work_ = false;
  std::thread thread_;  // last: it uses the others
};

RankWorkers::RankWorkers(RunSetup& setup, Trace* trace) : setups_{&setup} {
  for (RunSetup& peer : setup.peers) setups_.push_back(&peer);
  members_.resize(setups_.size());
  if (members_.size() > 1) {
    std::vector<Device*> devices;
    for (const RunSetup* of_rank : setups_) devices.push_back(of_rank->device.get());
    group_ = make_local_group(devices, setup.options.watchdog_seconds);
  }
  for (int rank = 1; rank < size(); ++rank) workers_.push_back(std::make_unique<Worker>(rank));
  // Engines of a group wait for each other.
  for_each_rank([&](Rank rank) {
    const auto i = static_cast<std::size_t>(rank.index);
    Group* const group = group_.empty() ? nullptr : group_[i].get();
    members_[i] = std::make_unique<LoadedModel>(*setups_[i], rank.index == 0 ? trace : nullptr, group);
  });
}

/// Members go first, in their own order: each waits for its own work alone.
RankWorkers::~RankWorkers() {
  workers_.clear();
  members_.clear();
}

void RankWorkers::for_each_rank(const std::function<void(Rank)>& body) {
  std::vector<std::exception_ptr> failures(members_.size());
  const auto part = [&](int index) {
    const auto i = static_cast<std::size_t>(index);
    try {
      body({index, size()});
    } catch (...) {
      failures[i] = std::current_exception();
      if (!group_.empty()) group_[i]->fail(failures[i]);
    }
  };
  for (int rank = 1; rank < size(); ++rank) {
    workers_[static_cast<std::size_t>(rank) - 1]->give([&part, rank] { part(rank); });
  }
  part(0);
  for (const auto& worker : workers_) worker->wait();
  throw_first(failures);
}

/// Throws the first failure of a rank itself; without one, the first report of a peer's failure.
void RankWorkers::throw_first(const std::vector<std::exception_ptr>& failures) {
  std::exception_ptr word;
  for (const std::exception_ptr& failure : failures) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const PeerError&) {
      if (!word) word = failure;
    }
  }
  if (word) std::rethrow_exception(word);
}

std::vector<OffloadEngine*> RankWorkers::engines() const {
  std::vector<OffloadEngine*> engines;
  for (const auto& member : members_) engines.push_back(&member->engine());
  return engines;
}

void RankWorkers::run(const std::function<void(LoadedModel&, Rank)>& body) {
  for_each_rank([&](Rank rank) { body(member(rank.index), rank); });
}

void RankWorkers::wait() {
  run([](LoadedModel& member, Rank) { member.engine().wait(); });
}

std::string RankWorkers::state_digest(SavedState saved, const std::map<std::string, std::string>& base) {
  if (saved == SavedState::trained) return digest_over_base(engines(), base);
  std::string digest;
  run([&](LoadedModel& member, Rank rank) {
    std::string own = member.engine().state_digest();
    if (rank.index == 0) digest = std::move(own);
  });
  return digest;
}

EngineCounters RankWorkers::counters() const {
  EngineCounters all = members_.front()->engine().counters();
  for (std::size_t i = 1; i < members_.size(); ++i) {
    const EngineCounters more = members_[i]->engine().counters();
    all.bytes_host_to_device += more.bytes_host_to_device;
    all.bytes_device_to_host += more.bytes_device_to_host;
    all.bytes_from_peers += more.bytes_from_peers;
    all.parameters_updated_cpu += more.parameters_updated_cpu;
    all.parameters_updated_streamed += more.parameters_updated_streamed;
    all.parameters_updated_resident += more.parameters_updated_resident;
    all.parameters_speculated += more.parameters_speculated;
    all.parameters_taken_back += more.parameters_taken_back;
    all.dram_bytes += more.dram_bytes;
    all.bytes_from_file += more.bytes_from_file;
    all.bytes_to_file += more.bytes_to_file;
  }
  return all;
}

HostBatch RankWorkers::batch(std::int64_t micro) {
  return member(static_cast<int>(micro % size())).batch(static_cast<std::size_t>(micro / size()));
}

std::optional<EvalResult> RankWorkers::evaluate(const TokenSource& source, const std::function<bool()>& stop) {
  const RunShape& shape = setups_.front()->model->shape();
  EvalResult result;
  result.windows = require_windows(source, shape.sequence);
  const std::int64_t of_pass = shape.batch * size();
  std::vector<std::unique_ptr<OffloadEngine::Evaluation>> scopes;
  for (OffloadEngine* engine : engines()) scopes.push_back(std::make_unique<OffloadEngine::Evaluation>(*engine));
  std::vector<std::int64_t> tokens(members_.size());
  double sum = 0.0;
  for (std::int64_t first = 0; first < result.windows; first += of_pass) {
    if (stop && stop()) return std::nullopt;
    run([&](LoadedModel& member, Rank rank) {
      tokens[static_cast<std::size_t>(rank.index)] +=
          member.evaluate_batch(source, first + rank.index * shape.batch, result.windows);
    });
    for (const auto& member : members_) {
      const auto losses = member->batch(0).losses;
      sum = std::accumulate(losses.begin(), losses.end(), sum);
    }
  }
  result.tokens = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0});
  result.loss = sum / static_cast<double>(result.tokens);
  return result;
}

}  // namespace tandem
