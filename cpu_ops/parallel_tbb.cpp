#include <tbb/blocked_range.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <string>

#include "core/error.hpp"
#include "cpu_ops/parallel.hpp"

namespace tandem {
namespace {

class TbbParallel final : public Parallel {
 public:
  // More threads than processors would only draw a warning from oneTBB, which has no more workers to give.
  explicit TbbParallel(int threads) : threads_(threads), arena_(std::min(threads, tbb::info::default_concurrency())) {}

  int threads() const noexcept override { return threads_; }

  void run(std::int64_t count, IndexFunction body) override {
    if (count <= 0) return;
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
  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<Parallel> make_parallel(int threads) {
  if (threads < 0) throw MisuseError("make_parallel: negative number of threads", std::to_string(threads));
  return std::make_unique<TbbParallel>(threads == 0 ? tbb::info::default_concurrency() : threads);
}

}  // namespace tandem
