#pragma once
// Machines and layouts that tests of the performance model share.
#include <cmath>
#include <random>
#include <string>

#include "core/params/parameter_layout.hpp"
#include "scheduler/machine/profile.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem::testing {

inline Figure assumed(double value) { return {value, 0.0, "assumed"}; }

/// A desktop: 16 GB card on PCIe 4, two channels of DDR5.
inline MachineProfile desktop() {
  MachineProfile p;
  p.name = "desktop";
  p.device_kind = "cuda";
  p.devices = assumed(1);
  p.cores = assumed(16);
  p.host_memory = assumed(64e9);
  p.device_memory = assumed(16e9);
  p.matmul = assumed(80e12);
  p.attention = assumed(40e12);
  p.device_bandwidth = assumed(600e9);
  p.device_update = assumed(20e9);
  p.to_device = assumed(24e9);
  p.to_host = assumed(24e9);
  p.both_ways = assumed(44e9);
  p.copy_dram = assumed(1);
  p.dram = assumed(60e9);
  p.host_stream = assumed(50e9);
  p.cpu_update = assumed(1.9e9);
  p.cpu_update_cores = assumed(16);
  p.cpu_update_bytes = assumed(28);
  return p;
}

/// Spread evenly over orders of magnitude.
inline double spread(std::mt19937_64& random, double low, double high) {
  return std::exp(std::uniform_real_distribution<double>(std::log(low), std::log(high))(random));
}

/// A machine whose figures are spread over an order of magnitude.
inline MachineProfile random_machine(std::mt19937_64& random) {
  MachineProfile p = desktop();
  p.dram.value = spread(random, 15e9, 200e9);
  p.host_stream.value = 0.9 * p.dram.value;
  p.to_device.value = p.to_host.value = spread(random, 4e9, 60e9);
  p.both_ways.value = p.to_device.value * std::uniform_real_distribution<double>(1.2, 2.0)(random);
  p.cpu_update.value = p.dram.value / 28.0 * std::uniform_real_distribution<double>(0.4, 1.0)(random);
  p.copy_latency.value = 1e-5;
  p.launch.value = 5e-6;
  return p;
}

/// `layers` equal layers of `elements` parameters each.
inline ParameterLayout equal_layers(int layers, std::int64_t elements) {
  ParameterLayout layout;
  for (int i = 0; i < layers; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {elements / 1024, 1024});
  return layout;
}

inline Plan plan_for(const ParameterLayout& layout, const std::string& policy, std::int64_t subgroup_size = 0,
                     std::size_t device_memory = std::size_t{1} << 50) {
  OffloadOptions options;
  options.policy = parse_policy(policy);
  if (subgroup_size > 0) options.subgroup_size = subgroup_size;
  return make_plan(layout, options, {device_memory, 0});
}

}  // namespace tandem::testing
