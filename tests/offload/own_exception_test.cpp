// An exception of the caller's own type, thrown by work that it queued: whichever call hears of it first throws it as
// that type, and so does every call after it, in every thread, rather than tell of a misuse that came of it.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

/// No exception of the standard's, nor of tandem's.
struct OwnException {
  std::string text;
};

struct Entry {
  const char* name;
  std::function<void(ToyTrainer&)> call;
};

/// The text of what a call throws as the caller's type; another type passes.
std::string own_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const OwnException& error) {
    return error.text;
  }
  return "nothing";
}

ToyOptions on_the_host() {
  ToyOptions o = toy("interleave:2,resident=0.4");
  o.offload.resident_layers = 2;
  o.make_device = testing::make_toy_host_device;
  return o;
}

/// Work that throws, in a use of a layer; done, and heard of by nobody but the stream, when this returns.
void fail_in_a_use(ToyTrainer& t) {
  {
    const WeightsGuard weights = t.engine().fetch(1, t.stream());
    const TensorView any = weights[t.layout().layer(1).parameters.front().name];
    t.toy_device().enqueue(t.stream(), "fails", any, {}, [](const bf16*, void*) { throw OwnException{"mine"}; });
  }
  EXPECT_EQ(own_text([&] { t.device().synchronize(t.stream()); }), "mine");
}

/// Every call of an engine that can fail, each twice as the first to hear.
std::vector<Entry> all_entries() {
  using T = ToyTrainer;
  const auto first = [](T& t) -> const Parameter& { return *t.layout().owned_parameters().front(); };
  const auto values_of = [first](T& t) { return std::vector<float>(static_cast<std::size_t>(first(t).count)); };
  const std::filesystem::path nowhere = "never-written";
  return {
      {"begin_step", [](T& t) { t.engine().begin_step({}); }},
      {"begin_micro_batch", [](T& t) { t.engine().begin_micro_batch(); }},
      {"fetch", [](T& t) { (void)t.engine().fetch(2, t.stream()); }},
      {"gradients", [](T& t) { (void)t.engine().gradients(2, t.stream()); }},
      {"end_step", [](T& t) { t.engine().end_step(); }},
      {"end_gradients", [](T& t) { t.engine().end_gradients(); }},
      {"update", [](T& t) { t.engine().update({}); }},
      {"skip", [](T& t) { t.engine().skip(); }},
      {"abort_step", [](T& t) { t.engine().abort_step(); }},
      {"wait", [](T& t) { t.engine().wait(); }},
      {"wait_for_weights", [](T& t) { t.engine().wait_for_weights(0, t.stream()); }},
      {"evaluation", [](T& t) { (void)t.engine().evaluation(); }},
      {"begin_save", [](T& t) { (void)t.engine().begin_save(); }},
      {"initialize", [](T& t) { t.engine().initialize([](const Parameter&, std::span<float>) {}); }},
      {"read",
       [=](T& t) {
         std::vector<float> values = values_of(t);
         t.engine().read(first(t), StateArray::master, values);
       }},
      {"write", [=](T& t) { t.engine().write(first(t), StateArray::master, values_of(t)); }},
      {"set_step", [](T& t) { t.engine().set_step(1); }},
      {"set_missed_updates", [=](T& t) { t.engine().set_missed_updates(first(t), 0); }},
      {"save", [=](T& t) { t.engine().save(nowhere); }},
      {"load", [=](T& t) { t.engine().load(nowhere); }},
      {"adopt", [](T& t) { t.engine().adopt(Plan(t.engine().plan())); }},
      {"state_digest", [](T& t) { (void)t.engine().state_digest(); }},
  };
}

void expect_own_twice(ToyTrainer& t, const Entry& entry) {
  for (const char* time : {"first", "again"}) {
    EXPECT_EQ(own_text([&] { entry.call(t); }), "mine") << entry.name << ", " << time;
  }
}

TEST(OwnException, ArrivesInEveryCallBetweenSteps) {
  for (const Entry& entry : all_entries()) {
    ToyTrainer t(on_the_host());
    {
      const auto scope = t.engine().evaluation();
      fail_in_a_use(t);
    }
    expect_own_twice(t, entry);
  }
}

TEST(OwnException, ArrivesInEveryCallInsideAStep) {
  for (const Entry& entry : all_entries()) {
    ToyTrainer t(on_the_host());
    t.begin_step();
    fail_in_a_use(t);
    expect_own_twice(t, entry);
  }
}

TEST(OwnException, ArrivesWhereAGuardIsHeld) {
  ToyTrainer t(on_the_host());
  const auto scope = t.engine().evaluation();
  const WeightsGuard held = t.engine().fetch(0, t.stream());
  fail_in_a_use(t);
  EXPECT_EQ(own_text([&] { t.engine().wait(); }), "mine");
}

TEST(OwnException, ArrivesInACommit) {
  ToyTrainer t(on_the_host());
  t.begin_step();
  GradientsGuard gradients = t.engine().gradients(t.layout().layer_count() - 1, t.stream());
  fail_in_a_use(t);
  EXPECT_EQ(own_text([&] { gradients.commit(t.stream()); }), "mine");
  EXPECT_EQ(own_text([&] { gradients.commit(t.stream()); }), "mine");
}

TEST(OwnException, ArrivesInEachThreadThatAsks) {
  ToyTrainer t(on_the_host());
  auto scope = t.engine().begin_save();
  {
    const auto evaluation = t.engine().evaluation();
    fail_in_a_use(t);
  }
  const Parameter& p = *t.layout().owned_parameters().front();
  std::string in_another;
  std::thread([&] {
    std::vector<float> values(static_cast<std::size_t>(p.count));
    in_another = own_text([&] { scope.read(p, StateArray::master, 0, values); });
  }).join();
  EXPECT_EQ(in_another, "mine");
  EXPECT_EQ(own_text([&] { t.engine().begin_step({}); }), "mine");
}

TEST(OwnException, OfAnAllocatorComesOutOfTheConstructor) {
  ToyOptions o = on_the_host();
  o.device.allocator = {.allocate = [](std::size_t, std::size_t) -> void* { throw OwnException{"no room"}; },
                        .free = [](void*, std::size_t) {}};
  EXPECT_EQ(own_text([&] { const ToyTrainer t(o); }), "no room");
}

TEST(OwnException, OfAFunctionThatTheEngineCallsLeavesItUsable) {
  ToyTrainer t(on_the_host());
  const auto fails = [](const Parameter&, std::span<float>) { throw OwnException{"values"}; };
  EXPECT_EQ(own_text([&] { t.engine().initialize(fails); }), "values");
  EXPECT_THROW(t.engine().begin_step({}), TrainingError) << "the state is of no step, the engine is whole";
  t.engine().initialize([](const Parameter&, std::span<float> values) { values.front() = 1.0F; });
  ToyResult result;
  t.step(0, result);
  EXPECT_EQ(t.engine().step(), 1);
}

}  // namespace
}  // namespace tandem
