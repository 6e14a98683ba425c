#pragma once
// State of parameters with weights and gradients, as a format stores it.
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/numerics/adam_state.hpp"
#include "core/params/coded_moments.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

/// Values of state, the same ones as each format stores them.
struct Stored {
  StateFormat format;
  std::vector<float> master, m, v;
  std::vector<std::uint16_t> residual;
  std::vector<bf16> m16, v16, gradient, weight;
  std::vector<std::uint8_t> m8, v8;
  std::uint64_t index = 0;

  Stored(StateFormat f, std::size_t n, unsigned key)
      : format(f),
        master(n),
        m(n),
        v(n),
        residual(n),
        m16(n),
        v16(n),
        gradient(n),
        weight(n),
        m8(coded_bytes(static_cast<std::int64_t>(n))),
        v8(m8.size()) {
    Random random(key);
    for (std::size_t i = 0; i < n; ++i) {
      master[i] = random.normal(0.05F);
      gradient[i] = numerics::round_to_bf16(random.normal(1e-2F));
      m16[i] = numerics::round_to_bf16(random.normal(1e-2F));
      v16[i] = numerics::round_to_bf16(1e-4F + std::abs(random.normal(1e-4F)));
      m[i] = numerics::bf16_to_float(m16[i]);
      v[i] = numerics::bf16_to_float(v16[i]);
      weight[i] = numerics::weight_of_master(master[i]);
      residual[i] = numerics::master_residual(master[i]);
    }
    encode_moments(StateArray::m, m, m8.data(), 0);
    encode_moments(StateArray::v, v, v8.data(), 0);
  }

  AdamPiece piece() {
    AdamPiece p;
    const auto stored = [this](std::vector<float>& f32, std::vector<bf16>& half, std::vector<std::uint8_t>& coded) {
      if (format == StateFormat::byte_moments) return static_cast<void*>(coded.data());
      return format == StateFormat::bf16_moments ? static_cast<void*>(half.data()) : f32.data();
    };
    p.state.master = format == StateFormat::fp32 ? static_cast<void*>(master.data()) : residual.data();
    p.state.m = stored(m, m16, m8);
    p.state.v = is_lion(format) ? nullptr : stored(v, v16, v8);
    p.gradient = gradient.data();
    p.weight = weight.data();
    p.count = static_cast<std::int64_t>(master.size());
    p.format = format;
    p.index = index;
    return p;
  }
  std::uint32_t master_bits(std::size_t i) const {
    return numerics::float_bits(format == StateFormat::fp32 ? master[i]
                                                            : numerics::join_master(weight[i], residual[i]));
  }
  bool operator==(const Stored&) const = default;
};

}  // namespace tandem::testing
