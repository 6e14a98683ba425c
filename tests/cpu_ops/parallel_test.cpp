#include "cpu_ops/parallel.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"

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

TEST(MakeParallel, OfANodeRunsThere) {
  const std::shared_ptr<const NumaNode> node = NumaNode::at(0);
  EXPECT_EQ(make_parallel(0, node)->threads(), node->processors());
  for (const int threads : {1, 3}) {
    std::thread([&] {  // its own processors are narrowed, and so are those of the threads that it starts
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(sched_getcpu(), &one);
      ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
      const auto parallel = make_parallel(threads, node);
      for (int round = 0; round < 20; ++round) {
        std::atomic<int> elsewhere = 0;
        parallel->run(50, [&](std::int64_t) { elsewhere += processors_of_this_thread() != node->processors(); });
        EXPECT_EQ(elsewhere, 0);
        EXPECT_EQ(processors_of_this_thread(), 1) << "the caller is let go again";
      }
    })
        .join();
  }
}

}  // namespace
}  // namespace tandem
