// A rank that fails, leaves or does not come: every other one is told who, within the watchdog's time, and nobody
// hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/trace.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using ::testing::AnyOf;
using testing::Failures;
using ::testing::HasSubstr;
using testing::run_toy_group;
using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr int all_ranks = 3;
constexpr int victim = 1;

/// Long enough that no test waits for it, and short enough to end one that does.
constexpr double patience = 20.0;

ToyOptions options(const std::string& policy = "interleave:2,resident=0.3") {
  ToyOptions o = toy(policy);
  o.frozen_ends = true;
  o.offload.resident_layers = policy == "device" ? std::nullopt : std::optional(2);
  o.offload.subgroup_size = 2048;
  o.offload.watchdog_seconds = patience;
  return o;
}

std::string text_of(const std::exception_ptr& failure) {
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "not an exception";
  }
  return "nothing";
}

template <class E>
bool is_a(const std::exception_ptr& failure) {
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const E&) {
    return true;
  } catch (...) {
  }
  return false;
}

/// Once a rank has been told, it neither trains nor gives away state: whatever is asked of it, the device has failed.
void expect_over(ToyTrainer& t) {
  std::vector<float> values(13);
  ToyResult result;
  const std::vector<std::function<void()>> calls{
      [&] { (void)t.engine().state_digest(); },
      [&] { t.engine().read(t.layout().parameter("first.bias"), StateArray::m, values); }, [&] { t.step(8, result); }};
  for (const auto& call : calls) {
    try {
      call();
      ADD_FAILURE() << "it goes on";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::device) << error.what();
    }
  }
}

/// Takes steps until something is thrown, and passes that on.
void train(ToyTrainer& t) {
  ToyResult result;
  try {
    for (int s = 0; s < 6; ++s) t.step(s, result);
    t.engine().wait();
    (void)t.engine().state_digest();
  } catch (...) {
    expect_over(t);
    throw;
  }
}

using Body = std::function<void(ToyTrainer&)>;

/// How many have been told.
class Told {
 public:
  void await(int count) const {
    const double end = trace_now() + patience;
    while (told_ < count && trace_now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(told_, count);
  }
  /// Counts where `body` throws.
  void count(const std::function<void()>& body) {
    try {
      body();
    } catch (...) {
      ++told_;
      throw;
    }
  }

 private:
  std::atomic<int> told_ = 0;
};

/// Source of the word of the victim's failure: its engine, or the caller that drives it, at the end.
enum class By : std::uint8_t { engine, caller };

/// `fails` on the victim, steps on all others. Returns what each has thrown, in well less than the watchdog's time.
Failures run(const ToyOptions& o, const ToyOptions& of_victim, const Body& fails, By by = By::engine) {
  const double begin = trace_now();
  Told told;
  const auto fail = [&](ToyTrainer& t) {
    try {
      fails(t);
    } catch (...) {
      if (by == By::engine) told.await(all_ranks - 1);
      throw;
    }
  };
  const Failures failures = run_toy_group(
      all_ranks, [&](int rank) { return rank == victim ? of_victim : o; },
      [&](ToyTrainer& t, int rank) {
        if (rank == victim) return fail(t);
        told.count([&] { train(t); });
      });
  EXPECT_LT(trace_now() - begin, 0.5 * patience);
  return failures;
}

/// All but the victim throw DeviceError that names it, and why; or that itself, where their streams wait for one of the
/// victim's which has failed.
void expect_told(const Failures& failures, const std::string& why, bool by_streams = false) {
  for (int rank = 0; rank < all_ranks; ++rank) {
    if (rank == victim) continue;
    const std::exception_ptr& failure = failures[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(is_a<DeviceError>(failure)) << "rank " << rank;
    EXPECT_THAT(text_of(failure), HasSubstr(by_streams ? "" : "rank 1 failed")) << "rank " << rank;
    EXPECT_THAT(text_of(failure), HasSubstr(why)) << "rank " << rank;
  }
}

struct Lost : std::runtime_error {
  Lost() : std::runtime_error("the caller's own") {}
};

/// The caller's exception leaves the second step, with or without a guard on its way.
void throw_in_step(ToyTrainer& t, bool in_backward, bool past_a_guard) {
  ToyResult result;
  t.step(0, result);
  t.begin_step();
  const int layers = t.layout().layer_count();
  for (int l = 0; l < layers; ++l) t.forward(l);
  if (in_backward) t.backward(layers - 1, 1, 0);
  if (!past_a_guard) throw Lost();
  const WeightsGuard weights = t.engine().fetch(layers - 2, t.stream());
  throw Lost();
}

TEST(FailingRank, ByAnExceptionOfTheCallersEndsTheStepsOfAll) {
  for (const char* policy : {"device", "host", "interleave:2,resident=0.3"}) {
    for (const bool in_backward : {false, true}) {
      for (const bool past_a_guard : {false, true}) {
        const ToyOptions o = options(policy);
        const Failures failures = run(
            o, o, [&](ToyTrainer& t) { throw_in_step(t, in_backward, past_a_guard); },
            past_a_guard ? By::engine : By::caller);
        EXPECT_TRUE(is_a<Lost>(failures[victim]));
        expect_told(failures, past_a_guard ? "an exception left a step" : "the caller's own");
      }
    }
  }
}

TEST(FailingRank, ByGradientsThatItDoesNotCommit) {
  const ToyOptions o = options();
  const Failures failures = run(o, o, [](ToyTrainer& t) {
    t.begin_step();
    { const GradientsGuard gradients = t.engine().gradients(t.layout().layer_count() - 2, t.stream()); }
    EXPECT_THROW(t.engine().abort_step(), DeviceError);
    train(t);
  });
  EXPECT_THAT(text_of(failures[victim]), HasSubstr("gradients were not committed"));
  expect_told(failures, "gradients were not committed");
}

TEST(FailingRank, ByAnEngineThatGoesInsideAStep) {
  for (const char* policy : {"device", "host", "stream"}) {
    for (const bool held : {false, true}) {
      const ToyOptions o = options(policy);
      const Failures failures = run(o, o, [&](ToyTrainer& t) {
        t.begin_step();
        t.forward(0);
        WeightsGuard weights;
        if (held) weights = t.engine().fetch(1, t.stream());
        t.end_engine();
        t.device().synchronize(t.stream());
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the group is still there
      });
      EXPECT_EQ(text_of(failures[victim]), "nothing");
      expect_told(failures, "an engine ended inside a step");
    }
  }
}

TEST(FailingRank, ByAnEngineThatCannotBeMade) {
  ToyOptions o = options("host");
  o.width = 20'000;
  o = testing::with_state_in_files(o, all_ranks, 0.9);
  ToyOptions broken = o;
  broken.offload.state_folder = "/dev/null/nowhere";
  const Failures failures = run(o, broken, [](ToyTrainer&) { ADD_FAILURE() << "there is an engine"; });
  EXPECT_TRUE(is_a<WriteError>(failures[victim]));
  expect_told(failures, "nowhere");
}

/// Streams of the victim that throw at some task after its first step.
class FailingStreamOfARank : public ::testing::TestWithParam<const char*> {};

TEST_P(FailingStreamOfARank, IsToldToAllAtEveryPosition) {
  if (!testing::has_faults_of_its_own()) GTEST_SKIP() << "one of these devices cannot be made to fail alone";
  const std::string stream = GetParam();
  int heard = 0;
  for (int position = 0; position < 40; position += 4) {
    auto armed = std::make_shared<std::atomic<bool>>(false);
    auto seen = std::make_shared<std::atomic<int>>(0);
    ToyOptions broken = options();
    broken.device.faults = std::make_shared<HostFaults>();
    broken.device.faults->before_task = [=](std::string_view of, std::string_view task) {
      if (!*armed || of != stream || task == "record" || task == "wait") return;
      if ((*seen)++ == position) throw DeviceError("injected failure");
    };
    const Failures failures = run(options(), broken, [&](ToyTrainer& t) {
      *armed = true;
      train(t);
    });
    if (!failures[victim]) continue;
    ++heard;
    EXPECT_THAT(text_of(failures[victim]), HasSubstr(std::string(testing::injected_failure())));
    expect_told(failures, std::string(testing::injected_failure()), true);
  }
  EXPECT_GT(heard, 3);
}

INSTANTIATE_TEST_SUITE_P(Streams, FailingStreamOfARank,
                         ::testing::Values("host to device", "device to host", "device update", "compute", "peers"));

TEST(FailingRank, ByAnUpdateOnTheCpu) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  for (const int position : {0, 3, 7}) {
    ToyOptions broken = options("host");
    broken.device.faults = std::make_shared<HostFaults>();
    broken.device.faults->before_update = [position, seen = std::make_shared<std::atomic<int>>(0)] {
      if ((*seen)++ == position) throw DeviceError("injected failure");
    };
    const Failures failures = run(options("host"), broken, train);
    EXPECT_EQ(text_of(failures[victim]), "injected failure");
    expect_told(failures, "injected failure");
  }
}

/// The victim does not go on with what comes after until all others have been told that it does not come.
void expect_stall(const Body& before, const Body& after) {
  ToyOptions o = options();
  o.offload.watchdog_seconds = 1.0;
  Told told;
  const Failures failures = run_toy_group(
      all_ranks,
      [&](int rank) {
        ToyOptions of_rank = o;
        if (rank > 0) of_rank.offload.watchdog_seconds = 0.3;  // the engine's own, which leaves this to the group's
        return of_rank;
      },
      [&](ToyTrainer& t, int rank) {
        if (rank != victim) return told.count([&] { train(t); });
        before(t);
        told.await(all_ranks - 1);
        after(t);
      });
  for (const std::exception_ptr& failure : failures) {
    EXPECT_TRUE(is_a<StalledError>(failure)) << text_of(failure);
    EXPECT_THAT(text_of(failure), HasSubstr("rank 1"));
  }
}

TEST(StalledRank, ThatNeverMakesACallIsNamedToAll) {
  const auto begin_step = [](ToyTrainer& t) { t.begin_step(); };
  const auto rest_of_step = [](ToyTrainer& t) {
    const int layers = t.layout().layer_count();
    for (int l = 0; l < layers; ++l) t.forward(l);
    for (int l = layers - 1; l >= 0; --l) t.backward(l, 0, 0);
    t.engine().end_step();
  };
  const auto whole_step = [&](ToyTrainer& t) {
    begin_step(t);
    rest_of_step(t);
  };
  expect_stall([](ToyTrainer&) {}, train);
  expect_stall(begin_step, rest_of_step);
  expect_stall(whole_step, train);
}

/// All ranks but those with the plan of `other` have that of `o`: all are refused.
void expect_no_group(const ToyOptions& o, const ToyOptions& other) {
  const double begin = trace_now();
  const Failures failures = run_toy_group(
      all_ranks, [&](int rank) { return rank == victim ? other : o; },
      [](ToyTrainer&, int rank) { ADD_FAILURE() << "rank " << rank << " has an engine"; });
  EXPECT_LT(trace_now() - begin, 0.5 * patience);
  for (const std::exception_ptr& failure : failures) {
    EXPECT_TRUE(is_a<MisuseError>(failure)) << text_of(failure);
    EXPECT_THAT(text_of(failure), HasSubstr("rank 1"));
  }
}

TEST(PlansOfRanks, AreRefusedToAllWhereTheyDiffer) {
  const ToyOptions o = options("host");
  ToyOptions other = o;
  other.offload.resident_layers = 3;
  expect_no_group(o, other);
  other = o;
  other.micro_batches = 2;
  expect_no_group(o, other);
  other = o;
  other.offload.prefetch_layers = 1;
  expect_no_group(o, other);
  other = o;
  other.owners_make = true;
  expect_no_group(o, other);
}

TEST(PlansOfRanks, AreRefusedToAllWhereOneIsAnothers) {
  const ToyOptions o = options("host");
  ToyOptions other = o;
  other.claimed_rank = 2;
  expect_no_group(o, other);
}

}  // namespace
}  // namespace tandem
