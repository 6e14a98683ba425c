// A pool of our own: every synchronisation in it is visible to ThreadSanitizer.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/start_thread.hpp"
#include "cpu_ops/threads/parallel.hpp"

namespace tandem {
namespace {

/// One call of `run`. Lives on the caller's stack: the caller leaves when no worker holds it.
struct Job {
  Job(std::int64_t n, IndexFunction f) : count(n), body(f) {}
  const std::int64_t count;
  const IndexFunction body;
  std::atomic<std::int64_t> next{0};
  int workers = 0;           // guarded by the pool's mutex
  std::exception_ptr error;  // guarded by the pool's mutex
};

class PoolParallel final : public Parallel {
 public:
  PoolParallel(int threads, std::shared_ptr<const NumaNode> node) : threads_(threads), node_(std::move(node)) {
    workers_.reserve(static_cast<std::size_t>(threads));  // a thread that finds no place would end the program
    try {
      for (int i = 1; i < threads; ++i) workers_.push_back(start_thread("pool", [this] { serve(); }));
    } catch (...) {
      end_workers();
      throw;
    }
  }

  ~PoolParallel() override { end_workers(); }

  int threads() const noexcept override { return threads_; }

  void run(std::int64_t count, IndexFunction body) override {
    if (count <= 0) return;
    const NumaNode::Bound caller(node_.get());
    Job job(count, body);
    const bool shared = count > 1 && threads_ > 1;
    if (shared) publish(job);
    // The caller always works on its own job, so a body that calls `run` again cannot wait in vain.
    work(job);
    if (shared) retire(job);
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  void end_workers() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void publish(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
    }
    wake_.notify_all();
  }

  void retire(Job& job) {
    std::unique_lock lock(mutex_);
    jobs_.remove(&job);
    done_.wait(lock, [&] { return job.workers == 0; });
  }

  void work(Job& job) {
    try {
      for (std::int64_t i = job.next.fetch_add(1); i < job.count; i = job.next.fetch_add(1)) job.body(i);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!job.error) job.error = std::current_exception();
      job.next = job.count;  // skips the calls that have not begun
    }
  }

  Job* unfinished_job() const {
    const auto it = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) { return job->next < job->count; });
    return it == jobs_.end() ? nullptr : *it;
  }

  void serve() {
    const NumaNode::Bound worker(node_.get());
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return stopping_ || (job = unfinished_job()) != nullptr; });
      if (stopping_) return;
      ++job->workers;
      lock.unlock();
      work(*job);
      lock.lock();
      if (--job->workers == 0) done_.notify_all();
    }
  }

  int threads_;
  const std::shared_ptr<const NumaNode> node_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::list<Job*> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

std::unique_ptr<Parallel> make_parallel(int threads, std::shared_ptr<const NumaNode> node) {
  if (threads < 0) throw MisuseError("make_parallel: negative number of threads", std::to_string(threads));
  if (threads == 0) threads = node ? node->processors() : available_processors();
  return std::make_unique<PoolParallel>(threads, std::move(node));
}

}  // namespace tandem
