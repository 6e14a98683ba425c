#include "core/host/isa.hpp"

#include <array>
#include <cstdlib>
#include <string>

#include "core/base/error.hpp"

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

constexpr std::array all_isas{Isa::scalar, Isa::avx2, Isa::avx512};

Isa limit_of_environment() {
  const char* const value = std::getenv("TANDEM_MAX_ISA");
  if (value == nullptr) return all_isas.back();
  for (const Isa isa : all_isas) {
    if (name_of(isa) == value) return isa;
  }
  throw UsageError("TANDEM_MAX_ISA=" + std::string(value), "not an instruction set", "use scalar, avx2 or avx512");
}

std::vector<Isa> isas_of_processor() {
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

std::vector<Isa> isas_within_limit() {
  const Isa limit = limit_of_environment();
  std::vector<Isa> isas = isas_of_processor();
  std::erase_if(isas, [limit](Isa isa) { return isa > limit; });
  return isas;
}

}  // namespace

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = isas_within_limit();
  return isas;
}

Isa best_isa() {
  static const Isa best = supported_isas().back();
  return best;
}

}  // namespace tandem
