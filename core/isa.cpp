#include "core/isa.hpp"

namespace tandem {

std::string_view name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "unknown";
}

namespace {

std::vector<Isa> detect() {
  std::vector<Isa> isas{Isa::scalar};
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (!avx2) return isas;
  isas.push_back(Isa::avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    isas.push_back(Isa::avx512);
  }
  return isas;
}

}  // namespace

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

Isa best_isa() noexcept {
  static const Isa best = supported_isas().back();
  return best;
}

}  // namespace tandem
