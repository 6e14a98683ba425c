#include "train/runtime/rank_workers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "comm/local_group.hpp"
#include "core/base/error.hpp"
#include "core/base/start_thread.hpp"
#include "core/host/topology.hpp"
#include "core/numerics/preference.hpp"
#include "data/window_sampler.hpp"

namespace tandem {
namespace {

void add(EngineCounters& all, const EngineCounters& more) {
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

void add(InputTraffic& all, const InputTraffic& more) {
  all.to_device += more.to_device;
  all.to_host += more.to_host;
}

/// Appends the results of a micro-batch, as they are.
void append(std::string& bytes, const HostBatch& batch) {
  const auto add_floats = [&](std::span<const float> values) {
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  };
  add_floats(batch.losses);
  add_floats(batch.pairs);
}

}  // namespace

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

RankWorkers::RankWorkers(RunSetup& setup, Trace* trace)
    : processes_(setup.processes == nullptr ? alone_ : *setup.processes),
      count_(setup.options.rank.count),
      first_rank_(setup.options.rank.index),
      setups_{&setup} {
  for (RunSetup& peer : setup.peers) setups_.push_back(&peer);
  members_.resize(setups_.size());
  if (processes_.several()) {
    group_.push_back(processes_.make_group(*setup.device, setup.options.watchdog_seconds));
  } else if (members_.size() > 1) {
    std::vector<Device*> devices;
    for (const RunSetup* of_rank : setups_) devices.push_back(of_rank->device.get());
    group_ = make_local_group(devices, setup.options.watchdog_seconds);
  }
  for (int i = 1; i < here(); ++i) workers_.push_back(std::make_unique<Worker>(i));
  // Engines of a group wait for each other.
  for_each_rank([&](Rank rank) {
    const auto i = static_cast<std::size_t>(rank.index - first_rank_);
    Group* const group = group_.empty() ? nullptr : group_[i].get();
    members_[i] = std::make_unique<LoadedModel>(*setups_[i], i == 0 ? trace : nullptr, group);
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
      body({first_rank_ + index, count_});
    } catch (const TrainingError&) {  // on all ranks alike, which go on together to save what there is
      failures[i] = std::current_exception();
      if (!processes_.several() && !group_.empty()) group_[i]->fail(failures[i]);
    } catch (...) {
      failures[i] = std::current_exception();
      if (!group_.empty()) group_[i]->fail(failures[i]);
    }
  };
  for (int index = 1; index < here(); ++index) {
    workers_[static_cast<std::size_t>(index) - 1]->give([&part, index] { part(index); });
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
    if (rank.index == first_rank_) digest = std::move(own);
  });
  return digest;
}

/// Figures of the ranks here.
RankTotals RankWorkers::own_totals() {
  RankTotals own{.counters = first().engine().counters(), .inputs = {}};
  std::size_t emulated = 0;  // the host device's memory is this process's own, but stands for memory elsewhere
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (i > 0) add(own.counters, members_[i]->engine().counters());
    add(own.inputs, setups_[i]->model->input_traffic());
    const Device& device = *setups_[i]->device;
    own.peak_device_bytes = std::max(own.peak_device_bytes, setups_[i]->peak_device_bytes());
    if (device.info().kind == "host") emulated += device.peak_bytes();
  }
  const std::size_t process = sample_process_memory().peak_anonymous;
  own.peak_host_bytes = process > emulated ? process - emulated : 0;
  return own;
}

RankTotals RankWorkers::totals() {
  static_assert(std::is_trivially_copyable_v<RankTotals>);
  const RankTotals own = own_totals();
  RankTotals all;
  const auto told = processes_.gather_bytes("figures of the ranks", std::as_bytes(std::span(&own, 1)));
  for (std::size_t i = 0; i < told.size(); ++i) {
    RankTotals of_process;
    std::memcpy(&of_process, told[i].data(), sizeof of_process);
    if (i == 0) {
      all = of_process;
      continue;
    }
    add(all.counters, of_process.counters);
    add(all.inputs, of_process.inputs);
    all.peak_device_bytes = std::max(all.peak_device_bytes, of_process.peak_device_bytes);
    all.peak_host_bytes += of_process.peak_host_bytes;
  }
  return all;
}

HostBatch RankWorkers::batch(std::int64_t micro) {
  const int rank = static_cast<int>(micro % size());
  if (!is_here(rank)) return first().batch(setups_.front()->batch_slots - 1);
  return member(rank).batch(static_cast<std::size_t>(micro / size()));
}

void RankWorkers::visit_results(
    std::int64_t micro_batches,
    const std::function<void(std::span<const float> losses, std::span<const float> pairs)>& use) {
  if (!processes_.several()) {
    for (std::int64_t micro = 0; micro < micro_batches; ++micro) use(batch(micro).losses, batch(micro).pairs);
    return;
  }
  std::string own;
  for (std::int64_t micro = first_rank_; micro < micro_batches; micro += size()) append(own, batch(micro));
  const auto all = processes_.gather_bytes("losses", std::as_bytes(std::span(own)));
  const std::size_t losses = batch(first_rank_).losses.size(), pairs = batch(first_rank_).pairs.size();
  std::vector<float> values(losses + pairs);
  for (std::int64_t micro = 0; micro < micro_batches; ++micro) {
    const std::string& of_rank = all[static_cast<std::size_t>(micro % size())];
    const auto at = static_cast<std::size_t>(micro / size()) * (losses + pairs) * sizeof(float);
    std::memcpy(values.data(), of_rank.data() + at, values.size() * sizeof(float));
    use(std::span(values).first(losses), std::span(values).subspan(losses));
  }
}

/// Batches that all ranks have evaluated, by rank. `room`: memory of the values of those that are elsewhere.
std::vector<EvaluatedBatch> RankWorkers::batches_of_all(const std::vector<EvaluatedBatch>& own,
                                                        std::vector<std::vector<float>>& room) {
  if (!processes_.several()) return own;
  const EvaluatedBatch& here = own.front();
  const std::array<std::int64_t, 3> numbers{here.first, here.windows, here.targets};
  std::string told(reinterpret_cast<const char*>(numbers.data()), sizeof numbers);
  append(told, here.values);
  const auto all = processes_.gather_bytes("evaluated windows", std::as_bytes(std::span(told)));
  const std::size_t losses = here.values.losses.size(), pairs = here.values.pairs.size();
  room.assign(all.size(), std::vector<float>(losses + pairs));
  std::vector<EvaluatedBatch> batches;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::array<std::int64_t, 3> of_rank{};
    std::memcpy(of_rank.data(), all[rank].data(), sizeof of_rank);
    std::memcpy(room[rank].data(), all[rank].data() + sizeof of_rank, room[rank].size() * sizeof(float));
    EvaluatedBatch batch{.first = of_rank[0], .windows = of_rank[1], .targets = of_rank[2], .values = {}};
    batch.values.losses = std::span(room[rank]).first(losses);
    batch.values.pairs = std::span(room[rank]).subspan(losses);
    batches.push_back(batch);
  }
  return batches;
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
  std::vector<std::vector<float>> room;
  for (std::int64_t first = 0; first < windows; first += batch * size()) {
    if (go_on && !processes_.all("evaluation", go_on(first))) return false;
    run([&](LoadedModel& member, Rank rank) {
      batches[static_cast<std::size_t>(rank.index - first_rank_)] =
          member.evaluate_batch(source, first + rank.index * batch, windows, reference);
    });
    for (const EvaluatedBatch& of_rank : batches_of_all(batches, room)) use(of_rank);
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
