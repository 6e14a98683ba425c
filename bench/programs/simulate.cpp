// Cost of the performance model: simulating a step of more and more layers of a 70B model, all 80 of them in 10,000
// subgroups, and choosing the plan of a 7B run, without and with gradient accumulation. Nothing is executed or
// allocated.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <string>

#include "core/tensor/layout_quantum.hpp"
#include "models/config/config.hpp"
#include "models/transformer/transformer.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/search/auto.hpp"

namespace tandem {
namespace {

constexpr std::int64_t subgroups_a_layer = 125;
constexpr std::int64_t layer_elements = std::int64_t{875'000} * layout_quantum;

/// Profile from $TANDEM_PROFILES, else from the sources that this was built from.
MachineProfile machine() {
  const char* folder = std::getenv("TANDEM_PROFILES");
  return read_profile(std::string(folder == nullptr ? TANDEM_SOURCE_DIR "/profiles" : folder) + "/24gb-pcie4.toml");
}

ParameterLayout layout_70b(std::int64_t layers) {
  ParameterLayout layout;
  for (std::int64_t i = 0; i < layers; ++i) {
    layout.add_layer("h." + std::to_string(i)).add("w", {layer_elements / layout_quantum, layout_quantum});
  }
  return layout;
}

void simulate_70b(benchmark::State& state, const char* policy) {
  const ParameterLayout layout = layout_70b(state.range(0));
  OffloadOptions options;
  options.policy = parse_policy(policy);
  options.subgroup_size = layer_elements / subgroups_a_layer;
  const Plan plan = make_plan(layout, options, {std::size_t{1} << 50, 0});
  const MachineProfile profile = machine();
  const auto compute = compute_seconds(profile, matrix_work(layout, 2048));
  std::int64_t tasks = 0;
  for (auto _ : state) tasks = simulate(layout, plan, profile, compute).tasks;
  state.counters["subgroups"] = static_cast<double>(plan.subgroups.size());
  state.counters["tasks"] = static_cast<double>(tasks);
  state.SetComplexityN(tasks);
}

/// Memory of a 24 GB card, of which activations take a third. `micro_batches` pass through each layer at once.
void choose_plan_of(benchmark::State& state, int micro_batches) {
  const ParameterLayout layout = layout_of(builtin_model("qwen2.5-7b"));
  OffloadOptions options;
  options.reserved_device_memory = std::size_t{8} << 30;
  options.max_micro_batches = options.micro_batches_at_once = micro_batches;
  const MachineProfile profile = machine();
  const auto compute = compute_seconds(profile, matrix_work(layout, 2048, true));
  const PlanningFacts facts{static_cast<std::size_t>(profile.device_memory.value), 0};
  Choice choice;
  for (auto _ : state) choice = choose_plan(layout, options, facts, profile, compute);
  state.counters["simulations"] = choice.simulations;
  state.counters["tasks"] = static_cast<double>(choice.simulated_tasks);
}

void choose_plan_7b(benchmark::State& state) { choose_plan_of(state, 1); }
void choose_plan_7b_of_8_micro_batches(benchmark::State& state) { choose_plan_of(state, 8); }

void by_layers(benchmark::internal::Benchmark* b) {
  b->Arg(10)->Arg(20)->Arg(40)->Arg(80)->ArgName("layers")->Unit(benchmark::kMillisecond)->Complexity();
}
BENCHMARK_CAPTURE(simulate_70b, host, "host")->Apply(by_layers);
BENCHMARK_CAPTURE(simulate_70b, interleave, "interleave:2")->Apply(by_layers);
BENCHMARK_CAPTURE(simulate_70b, stream, "stream")->Apply(by_layers);
BENCHMARK(choose_plan_7b)->Unit(benchmark::kMillisecond);
BENCHMARK(choose_plan_7b_of_8_micro_batches)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
