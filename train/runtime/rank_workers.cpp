#include "train/runtime/rank_workers.hpp"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "comm/local_group.hpp"
#include "core/base/start_thread.hpp"
#include "core/numerics/preference.hpp"
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

/// Evaluates windows 0 ... `windows` - 1, and hands batches to `use` in their order. `go_on` is asked before each pass,
/// with the number of windows done; returns false where it said no.
bool RankWorkers::evaluate_all(const TokenSource& source, std::int64_t windows, std::span<const float> reference,
                               const std::function<bool(std::int64_t)>& go_on,
                               const std::function<void(const EvaluatedBatch&)>& use) {
  const std::int64_t batch = setups_.front()->model->shape().batch;
  std::vector<std::unique_ptr<OffloadEngine::Evaluation>> scopes;
  for (OffloadEngine* engine : engines()) scopes.push_back(std::make_unique<OffloadEngine::Evaluation>(*engine));
  std::vector<EvaluatedBatch> batches(members_.size());
  for (std::int64_t first = 0; first < windows; first += batch * size()) {
    if (go_on && !go_on(first)) return false;
    run([&](LoadedModel& member, Rank rank) {
      batches[static_cast<std::size_t>(rank.index)] =
          member.evaluate_batch(source, first + rank.index * batch, windows, reference);
    });
    for (const EvaluatedBatch& of_rank : batches) use(of_rank);
  }
  return true;
}

std::optional<EvalResult> RankWorkers::evaluate(const TokenSource& source, const std::function<bool()>& stop,
                                                std::span<const float> reference) {
  EvalResult result;
  result.windows = require_windows(source, setups_.front()->model->shape().sequence);
  double sum = 0.0;
  PairSums pairs;
  const auto go_on = [&](std::int64_t) { return !stop || !stop(); };
  const bool whole = evaluate_all(source, result.windows, reference, go_on, [&](const EvaluatedBatch& batch) {
    result.tokens += batch.targets;
    sum = std::accumulate(batch.values.losses.begin(), batch.values.losses.end(), sum);
    if (!batch.values.pairs.empty()) {
      pairs.add(batch.values.pairs.first(static_cast<std::size_t>(3 * (batch.windows / 2))));
    }
  });
  if (!whole) return std::nullopt;
  result.loss = sum / static_cast<double>(result.tokens);
  if (pairs.count() > 0) result.loss = pairs.loss(), result.pairs = pairs.metrics();
  return result;
}

std::optional<std::vector<float>> RankWorkers::log_probabilities(const TokenSource& source,
                                                                 const std::function<bool(std::int64_t)>& after) {
  const std::int64_t length = setups_.front()->model->shape().sequence, windows = require_windows(source, length);
  std::vector<float> all;
  const auto go_on = [&](std::int64_t done) { return done == 0 || !after || after(done); };
  const bool whole = evaluate_all(source, windows, {}, go_on, [&](const EvaluatedBatch& batch) {
    for (std::int64_t i = 0; i < batch.windows; ++i) {
      all.push_back(-numerics::sum_of_losses(batch.values.losses.data() + i * length, length));
    }
  });
  if (!whole) return std::nullopt;
  return all;
}

}  // namespace tandem
