// A step of the engine takes nothing from the heap, on any thread, once its queues are as long as they get.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/local_group.hpp"
#include "offload/engine/engine.hpp"
#include "tests/offload/allocations/counted_new.hpp"
#include "tests/offload/idle_device.hpp"

namespace tandem {
namespace {

using testing::allocations;

struct Shape {
  const char* policy = "host";
  int resident_layers = 0;
  int micro_batches = 1;
  int at_once = 1;
  bool update_in_backward = false;
  bool overlap = true;
  int ranks = 1;
  friend std::ostream& operator<<(std::ostream& out, const Shape& s) {
    return out << s.policy << ", " << s.resident_layers << " resident, " << s.micro_batches << " micro-batches, "
               << s.at_once << " at once" << (s.update_in_backward ? ", updates in backward" : "")
               << (s.overlap ? "" : ", no overlap") << ", " << s.ranks << " ranks";
  }
};

/// An engine on a device that does nothing, and a caller that does nothing with it: blocks of 21 subgroups behind
/// an embedding whose table the head shares. `group`: null where there is one rank.
class IdleTrainer {
 public:
  explicit IdleTrainer(const Shape& shape) : IdleTrainer(shape, std::make_unique<testing::IdleDevice>(), nullptr) {}
  IdleTrainer(const Shape& shape, std::shared_ptr<Device> device, Group* group)
      : shape_(shape), device_(std::move(device)), stream_(device_->make_stream("compute")) {
    constexpr int blocks = 10, quanta = 21;
    layout_.add_layer("embedding").add("table", {3 * layout_quantum});
    for (int l = 0; l < blocks; ++l) layout_.add_layer("h." + std::to_string(l)).add("w", {quanta * layout_quantum});
    layout_.add_layer("head").add("table", {3 * layout_quantum}).add("norm", {layout_quantum});
    layout_.tie("embedding.table", "head.table");
    OffloadOptions options;
    options.policy = parse_policy(shape.policy);
    options.subgroup_size = layout_quantum;
    options.resident_layers =
        options.policy.kind == Policy::Kind::device ? std::nullopt : std::optional(shape.resident_layers);
    options.prefetch_layers = 2;
    options.max_micro_batches = shape.micro_batches;
    options.micro_batches_at_once = shape.at_once;
    options.overlap = shape.overlap;
    if (group != nullptr) options.rank = group->rank();
    if (shape.update_in_backward) options.on_nonfinite = OnNonfinite::stop;
    const Plan plan = make_plan(layout_, options, {device_->info().capacity, 0});
    engine_ = std::make_unique<OffloadEngine>(*device_, layout_, options, plan, nullptr, group);
    engine_->initialize([](const Parameter&, std::span<float>) {});
  }

  void step() {
    engine_->begin_step(
        {.max_grad_norm = shape_.update_in_backward ? 0.0 : 1.0, .micro_batches = shape_.micro_batches});
    for (int first = 0; first < shape_.micro_batches; first += shape_.at_once) {
      for (int l = 0; l < layout_.layer_count(); ++l) static_cast<void>(engine_->fetch(l, stream_));
      for (int l = layout_.layer_count() - 1; l >= 0; --l) {
        const WeightsGuard weights = engine_->fetch(l, stream_);
        for (int micro = 0; micro < shape_.at_once; ++micro) engine_->gradients(l, stream_).commit(stream_);
      }
    }
    skipped_ += engine_->end_step().skipped ? 1 : 0;
  }
  int skipped() const { return skipped_; }

 private:
  const Shape shape_;
  std::shared_ptr<Device> device_;
  Stream stream_;
  ParameterLayout layout_;
  std::unique_ptr<OffloadEngine> engine_;
  int skipped_ = 0;
};

/// One for each rank, the first driven by whoever has this, and the others by threads that take as many steps as it.
class IdleGroup {
 public:
  explicit IdleGroup(const Shape& shape) : both_(shape.ranks) {
    std::vector<Device*> pointers;
    for (int rank = 0; rank < shape.ranks; ++rank) {
      pointers.push_back(devices_.emplace_back(std::make_shared<testing::IdleDevice>()).get());
    }
    group_ = make_local_group(pointers);
    trainers_.resize(devices_.size());
    for (std::size_t i = 1; i < devices_.size(); ++i) {
      threads_.emplace_back([this, i, shape] {
        trainers_[i] = std::make_unique<IdleTrainer>(shape, devices_[i], group_[i].get());
        for (both_.arrive_and_wait(); !ends_; both_.arrive_and_wait()) {
          trainers_[i]->step();
          both_.arrive_and_wait();
        }
      });
    }
    trainers_[0] = std::make_unique<IdleTrainer>(shape, devices_[0], group_[0].get());
  }
  ~IdleGroup() {
    ends_ = true;
    both_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }
  IdleGroup(const IdleGroup&) = delete;
  IdleGroup& operator=(const IdleGroup&) = delete;

  void step() {
    both_.arrive_and_wait();
    trainers_[0]->step();
    both_.arrive_and_wait();
  }
  int skipped() const { return trainers_[0]->skipped(); }

 private:
  std::barrier<> both_;
  std::atomic<bool> ends_ = false;
  std::vector<std::shared_ptr<Device>> devices_;  ///< outlive the group
  std::vector<std::unique_ptr<Group>> group_;
  std::vector<std::unique_ptr<IdleTrainer>> trainers_;
  std::vector<std::thread> threads_;
};

/// Whether some successive steps allocate nothing. How long a queue gets depends on the threads' timing, and each
/// may still double a few times; what allocates in every step never gets there.
bool becomes_steady(const std::function<void()>& step) {
  constexpr int tries = 60, steps = 4;
  for (int t = 0; t < tries; ++t) {
    const std::uint64_t before = allocations();
    for (int s = 0; s < steps; ++s) step();
    if (allocations() == before) return true;
  }
  return false;
}

class Allocations : public ::testing::TestWithParam<Shape> {};

TEST_P(Allocations, AreNoneInASteadyStep) {
  IdleTrainer trainer(GetParam());
  EXPECT_TRUE(becomes_steady([&] { trainer.step(); }));
  EXPECT_EQ(trainer.skipped(), 0);
}

std::vector<Shape> shapes_of_groups() {
  std::vector<Shape> all;
  for (const char* policy : {"device", "host", "interleave:2,resident=0.4", "stream"}) {
    all.push_back({.policy = policy, .ranks = 2});
    all.push_back({.policy = policy, .resident_layers = 4, .micro_batches = 2, .ranks = 3});
    all.push_back({.policy = policy, .micro_batches = 3, .at_once = 3, .ranks = 2});
    all.push_back({.policy = policy, .update_in_backward = true, .ranks = 2});
    all.push_back({.policy = policy, .overlap = false, .ranks = 2});
  }
  return all;
}

class AllocationsOfRanks : public ::testing::TestWithParam<Shape> {};

// Allocations of all ranks, of their engines and of the group.
TEST_P(AllocationsOfRanks, AreNoneInASteadyStep) {
  IdleGroup group(GetParam());
  EXPECT_TRUE(becomes_steady([&] { group.step(); }));
  EXPECT_EQ(group.skipped(), 0);
}

INSTANTIATE_TEST_SUITE_P(Shapes, AllocationsOfRanks, ::testing::ValuesIn(shapes_of_groups()));

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const char* policy : {"device", "host", "static:0.5", "interleave:2", "interleave:2,resident=0.4", "stream"}) {
    all.push_back({.policy = policy});
    all.push_back({.policy = policy, .resident_layers = 4, .micro_batches = 2});
    all.push_back({.policy = policy, .micro_batches = 3, .at_once = 3});
    all.push_back({.policy = policy, .update_in_backward = true});
    all.push_back({.policy = policy, .overlap = false});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Allocations, ::testing::ValuesIn(shapes()));

// The measure itself: it sees one allocation a step, on whatever thread.
TEST(Allocations, OfASingleByteInAStepAreSeen) {
  IdleTrainer trainer({});
  std::unique_ptr<char> kept;  // beyond the step, or the compiler may do without it
  EXPECT_FALSE(becomes_steady([&] {
    trainer.step();
    kept = std::make_unique<char>();
  }));
}

TEST(Allocations, OfOtherThreadsAreSeen) {
  const std::uint64_t before = allocations();
  std::thread([] { std::vector<std::string>(1000, std::string(1000, 'x')); }).join();
  EXPECT_GT(allocations(), before + 1000);
}

}  // namespace
}  // namespace tandem
