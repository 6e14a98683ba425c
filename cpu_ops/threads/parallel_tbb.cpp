#include <tbb/blocked_range.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "cpu_ops/threads/parallel.hpp"

namespace tandem {
namespace {

/// Binds workers while they are in an arena: oneTBB lends them to others in between.
class WorkersBound final : public tbb::task_scheduler_observer {
 public:
  WorkersBound(tbb::task_arena& arena, std::shared_ptr<const NumaNode> node)
      : tbb::task_scheduler_observer(arena), node_(std::move(node)) {
    observe(true);
  }
  ~WorkersBound() override {
    closing_ = true;
    wait_until_all_left();
    observe(false);
  }

  void on_scheduler_entry(bool is_worker) override {
    if (!is_worker) return;
    ++inside_;  // before it asks: either it is waited for, or it sees that it comes too late
    if (closing_) {
      --inside_;
      return;
    }
    of_thread().by = this;
    of_thread().bound.emplace(node_.get());
  }
  void on_scheduler_exit(bool is_worker) override {
    if (!is_worker || of_thread().by != this) return;
    of_thread().by = nullptr;
    of_thread().bound.reset();
    --inside_;
  }

 private:
  struct OfThread {
    const WorkersBound* by = nullptr;
    std::optional<NumaNode::Bound> bound;
  };
  static OfThread& of_thread() {
    thread_local OfThread of_thread;
    return of_thread;
  }

  /// Waits until no thread is inside. A thread that is inside when observing ends is never seen to leave, and would
  /// stay bound in every arena after this. Without work workers leave within a fraction of a millisecond; the limit is
  /// for a machine that does not run them.
  void wait_until_all_left() const {
    using std::chrono::steady_clock;
    const auto limit = steady_clock::now() + std::chrono::seconds(1);
    while (inside_ > 0 && steady_clock::now() < limit) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  const std::shared_ptr<const NumaNode> node_;
  std::atomic<int> inside_ = 0;
  std::atomic<bool> closing_ = false;
};

class TbbParallel final : public Parallel {
 public:
  // More threads than processors would only draw a warning from oneTBB, which has no more workers to give.
  TbbParallel(int threads, std::shared_ptr<const NumaNode> node)
      : threads_(threads), node_(std::move(node)), arena_(std::min(threads, tbb::info::default_concurrency())) {
    if (node_) workers_.emplace(arena_, node_);
  }

  int threads() const noexcept override { return threads_; }

  void run(std::int64_t count, IndexFunction body) override {
    if (count <= 0) return;
    const NumaNode::Bound caller(node_.get());
    if (count == 1 || threads_ == 1) {  // nothing to share: the caller's own thread, at once
      for (std::int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    arena_.execute([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::int64_t>(0, count),
          [&](const tbb::blocked_range<std::int64_t>& range) {
            for (std::int64_t i = range.begin(); i != range.end(); ++i) body(i);
          },
          tbb::simple_partitioner());
    });
  }

 private:
  int threads_;
  const std::shared_ptr<const NumaNode> node_;
  tbb::task_arena arena_;
  std::optional<WorkersBound> workers_;
};

}  // namespace

std::unique_ptr<Parallel> make_parallel(int threads, std::shared_ptr<const NumaNode> node) {
  if (threads < 0) throw MisuseError("make_parallel: negative number of threads", std::to_string(threads));
  if (threads == 0) threads = node ? node->processors() : tbb::info::default_concurrency();
  return std::make_unique<TbbParallel>(threads, std::move(node));
}

}  // namespace tandem
