// Parallel loops on the CPU: each index once, failures, nesting, NUMA nodes.
#include "cpu_ops/threads/parallel.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"

namespace tandem {
namespace {

TEST(ParallelRun, CallsEveryIndexOnce) {
  for (const int threads : {1, 2, 7}) {
    const auto parallel = make_parallel(threads);
    EXPECT_EQ(parallel->threads(), threads);
    for (const std::int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
      parallel->run(count, [&](std::int64_t i) { ++calls[static_cast<std::size_t>(i)]; });
      for (const auto& c : calls) EXPECT_EQ(c, 1);
    }
  }
}

TEST(ParallelRun, RethrowsAndWorksAfterwards) {
  for (const int threads : {1, 3}) {
    const auto parallel = make_parallel(threads);
    for (int round = 0; round < 20; ++round) {
      try {
        parallel->run(100, [](std::int64_t i) {
          if (i == 37) throw std::runtime_error("index 37");
        });
        FAIL() << "nothing was thrown";
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "index 37");
      }
    }
    std::atomic<int> calls = 0;
    parallel->run(50, [&](std::int64_t) { ++calls; });
    EXPECT_EQ(calls, 50);
  }
}

TEST(ParallelRun, MayBeCalledFromABody) {
  const auto parallel = make_parallel(2);
  std::atomic<int> calls = 0;
  parallel->run(8, [&](std::int64_t) { parallel->run(9, [&](std::int64_t) { ++calls; }); });
  EXPECT_EQ(calls, 72);
}

TEST(ParallelRun, ServesSeveralThreadsAtOnce) {
  const auto parallel = make_parallel(3);
  std::atomic<std::int64_t> sum = 0;
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) parallel->run(20, [&](std::int64_t i) { sum += i; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 50 * 190);
}

TEST(MakeParallel, ZeroIsAllProcessorsAndNegativeIsRefused) {
  EXPECT_GE(make_parallel(0)->threads(), 1);
  EXPECT_THROW(make_parallel(-1), MisuseError);
}

int processors_of_this_thread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return CPU_COUNT(&set);
}

/// The calling thread may run on the processor it is on, and on no other.
void narrow_this_thread() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
}

/// Slow enough that the workers come too. Returns how many calls were made by another thread than this one.
int run_slowly(Parallel& parallel, const std::function<void(bool is_worker)>& body, int calls = 20) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> by_workers = 0;
  parallel.run(calls, [&](std::int64_t) {
    const bool is_worker = std::this_thread::get_id() != caller;
    by_workers += is_worker ? 1 : 0;
    body(is_worker);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  return by_workers;
}

TEST(MakeParallel, OfANodeRunsThere) {
  const std::shared_ptr<const NumaNode> node = NumaNode::at(0);
  EXPECT_EQ(make_parallel(0, node)->threads(), node->processors());
  const auto anywhere = make_parallel(2);
  const auto there = make_parallel(2, node);
  std::thread([&] {
    narrow_this_thread();
    // oneTBB lends the same workers to both.
    run_slowly(*anywhere, [](bool is_worker) {
      if (is_worker) narrow_this_thread();
    });
    std::atomic<int> elsewhere = 0;
    int by_workers = 0;
    for (int round = 0; round < 50 && by_workers == 0; ++round) {  // a busy machine may have none to spare
      by_workers =
          run_slowly(*there, [&](bool) { elsewhere += processors_of_this_thread() == node->processors() ? 0 : 1; });
    }
    EXPECT_EQ(elsewhere, 0);
    EXPECT_TRUE(by_workers > 0 || node->processors() == 1);
    EXPECT_EQ(processors_of_this_thread(), 1) << "the caller is let go again";
    make_parallel(1, node)->run(1, [&](std::int64_t) { EXPECT_EQ(processors_of_this_thread(), node->processors()); });
  }).join();
}

TEST(MakeParallel, OfANodeLetsItsWorkersGoAtItsEnd) {
  const std::shared_ptr<const NumaNode> node = NumaNode::at(0);
  const auto anywhere = make_parallel(2);
  int by_workers = 0;
  std::atomic<int> still_bound = 0;
  thread_local bool narrowed = false;  // there may be other workers
  // On a busy machine a worker takes its time to leave where it has been: then there is longer to come for.
  for (int round = 0; round < 20 || (by_workers == 0 && round < 60); ++round) {
    run_slowly(*anywhere, [](bool is_worker) {
      if (is_worker) narrow_this_thread();
      narrowed = is_worker;
    });
    const int calls = round < 20 ? 20 : 400;
    by_workers += run_slowly(
        *make_parallel(2, node), [](bool) {}, calls);  // its work ends while workers are inside
    run_slowly(*anywhere, [&](bool is_worker) {
      if (is_worker && narrowed && processors_of_this_thread() != 1) ++still_bound;
    });
  }
  EXPECT_EQ(still_bound, 0);
  EXPECT_TRUE(by_workers > 0 || node->processors() == 1);
}

}  // namespace
}  // namespace tandem
