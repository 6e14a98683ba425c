#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {
namespace {

struct Kind {
  int fraction, least_power;  ///< bits after the leading one; power of the least number that has one
  double largest;
};

/// x rounded to the nearest number of a format times 2^e, ties to even.
double rounded(double x, const Kind& kind, int e) {
  const double scaled = std::ldexp(std::abs(x), -e);
  const int power = std::max(scaled > 0.0 ? std::ilogb(scaled) : 0, kind.least_power);
  const double unit = std::ldexp(1.0, (scaled > 0.0 ? power : kind.least_power) - kind.fraction);
  const double nearest = std::min(std::nearbyint(scaled / unit) * unit, kind.largest);
  return std::copysign(std::ldexp(nearest, e), x);
}

}  // namespace

void quantize(TensorView x, Fp8Format format, TensorView y) {
  const Kind kind = format == Fp8Format::e4m3 ? Kind{3, -6, 448.0} : Kind{2, -14, 57344.0};
  double largest = 0.0;
  bool finite = true;
  for (std::int64_t i = 0; i < x.count(); ++i) {
    const double value = get(x, i);
    finite = finite && std::isfinite(value);
    largest = std::max(largest, std::abs(value));
  }
  int e = -100;
  const int most = 127 - std::ilogb(kind.largest);
  while (finite && e < most && std::ldexp(kind.largest, e) < largest) ++e;
  for (std::int64_t i = 0; i < x.count(); ++i) {
    put(y, i, finite ? rounded(get(x, i), kind, e) : std::numeric_limits<double>::quiet_NaN());
  }
}

}  // namespace tandem::reference
