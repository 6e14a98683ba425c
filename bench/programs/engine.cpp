// CPU time that the engine itself takes in a step: guards, queues, bookkeeping. The device does nothing, at
// once, so that nothing else is counted: 48 layers, 1,008 subgroups. One line of JSON.
//
//   bench_engine [POLICY]
//
//   bench_engine POLICY tasks
//
// prints how many tasks all steps of the first have.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <tandem/tandem.hpp>
#include <vector>

#include "core/base/named_range.hpp"
#include "core/host/cpu_time.hpp"
#include "tests/offload/idle_device.hpp"

namespace {

using namespace tandem;

constexpr int layers = 48, parameters_each = 21, steps = 60, warm_up = 10;

/// Counts tasks where their ranges begin.
class CountingDevice final : public testing::IdleDevice, public RangeSink {
 public:
  RangeSink* ranges() noexcept override { return this; }
  Id begin(std::string_view, const std::string&, std::size_t) override { return ++tasks_; }
  void end(Id) noexcept override {}
  std::uint64_t tasks() const noexcept { return tasks_; }

 private:
  std::atomic<std::uint64_t> tasks_ = 0;
};

void step(OffloadEngine& engine, StreamView stream) {
  engine.begin_step({});
  for (int l = 0; l < layers; ++l) static_cast<void>(engine.fetch(l, stream));
  for (int l = layers - 1; l >= 0; --l) {
    const WeightsGuard weights = engine.fetch(l, stream);
    engine.gradients(l, stream).commit(stream);
  }
  engine.end_step();
}

ParameterLayout make_layout() {
  ParameterLayout layout;
  for (int l = 0; l < layers; ++l) {
    layout.add_layer("h." + std::to_string(l)).add("w", {parameters_each * layout_quantum});
  }
  return layout;
}

OffloadOptions options_of(const std::string& policy) {
  OffloadOptions options;
  options.policy = parse_policy(policy);
  options.subgroup_size = layout_quantum;
  options.resident_layers = 0;
  options.prefetch_layers = 2;
  options.speculate = Speculate::off;  // makes the number of tasks the same in every step
  return options;
}

int count_tasks(const std::string& policy) {
  CountingDevice device;
  const ParameterLayout layout = make_layout();
  const OffloadOptions options = options_of(policy);
  const Plan plan = make_plan(layout, options, {device.info().capacity, 0});
  OffloadEngine engine(device, layout, options, plan);
  const Stream stream = device.make_stream("compute");
  engine.initialize([](const Parameter&, std::span<float>) {});
  for (int i = 0; i < warm_up + steps; ++i) step(engine, stream);
  engine.wait();
  std::cout << nlohmann::json{{"policy", policy}, {"tasks", device.tasks()}}.dump() << std::endl;
  return 0;
}

int run(const std::string& policy) {
  testing::IdleDevice device;
  const ParameterLayout layout = make_layout();
  const OffloadOptions options = options_of(policy);
  const Plan plan = make_plan(layout, options, {device.info().capacity, 0});
  OffloadEngine engine(device, layout, options, plan);
  const Stream stream = device.make_stream("compute");
  engine.initialize([](const Parameter&, std::span<float>) {});
  for (int i = 0; i < warm_up; ++i) step(engine, stream);
  std::vector<double> milliseconds;
  for (int i = 0; i < steps; ++i) {
    const double begin = process_cpu_seconds();
    step(engine, stream);
    engine.wait();
    milliseconds.push_back(1e3 * (process_cpu_seconds() - begin));
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::cout << nlohmann::json{{"policy", policy},
                              {"subgroups", plan.subgroups.size()},
                              {"cpu_ms", milliseconds[steps / 2]},
                              {"least", milliseconds.front()},
                              {"most", milliseconds.back()}}
                   .dump()
            << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string policy = argc > 1 ? argv[1] : "interleave:2";
    return argc > 2 && std::string_view(argv[2]) == "tasks" ? count_tasks(policy) : run(policy);
  } catch (const std::exception& error) {
    std::cerr << "bench_engine: " << error.what() << '\n';
    return 1;
  }
}
