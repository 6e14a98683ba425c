#pragma once
// How far gradients are from those of a fixture.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/models/rig.hpp"

namespace tandem::testing {

inline double largest(const std::vector<float>& values) {
  double most = 0.0;
  for (const float x : values) most = std::max(most, std::abs(static_cast<double>(x)));
  return most;
}

inline Gradients expected_gradients(const Fixture& fixture) {
  Gradients all;
  const ParameterLayout layout = layout_of(fixture.config());
  for (const Parameter* p : layout.owned_parameters()) {
    for (std::int64_t i = 0; i < hf_tensor_count(*p); ++i) {
      const HfTensor hf = hf_tensor_of(fixture.config(), *p, i);
      all[hf.name] = fixture["grad." + hf.name].floats(hf.transposed);
    }
  }
  return all;
}

/// Largest difference of any parameter, in units of max(its largest gradient, 1e-3 of the overall largest).
struct Distance {
  double worst = 0.0;
  std::string parameter;
};

inline Distance distance(const Gradients& actual, const Gradients& expected) {
  double overall = 0.0;
  for (const auto& [name, values] : expected) overall = std::max(overall, largest(values));
  Distance d;
  for (const auto& [name, values] : expected) {
    const double unit = std::max(largest(values), 1e-3 * overall);
    const std::vector<float>& ours = actual.at(name);
    if (ours.size() != values.size()) return {INFINITY, name};
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double off = std::abs(static_cast<double>(ours[i]) - static_cast<double>(values[i])) / unit;
      if (!(off <= d.worst)) d = {std::isnan(off) ? INFINITY : off, name};
    }
  }
  return d;
}

}  // namespace tandem::testing
