#include <cmath>
#include <vector>

#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {
namespace {

/// Factor of a normalised value: weight and offset, added in fp32.
double scale_of(NormWeight weight, std::int64_t channel) {
  return static_cast<double>(static_cast<float>(get(weight.values, channel)) + weight.offset);
}

/// With n the normalised x: dx = rstd (g - mean(g) - n mean(g n)), g = dy weight; mean(g) only where centred.
void norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView mean, TensorView rstd, TensorView dx,
                   bool accumulate, TensorView dweight, TensorView dbias) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  for (std::int64_t r = 0; r < rows; ++r) {
    const double centre = mean ? get(mean, r) : 0.0, scale = get(rstd, r);
    double sum_g = 0.0, sum_gn = 0.0;
    std::vector<double> g, n;
    for (std::int64_t c = 0; c < channels; ++c) {
      const double gradient = get(dy, r * channels + c);
      n.push_back((get(x, r * channels + c) - centre) * scale);
      g.push_back(gradient * scale_of(weight, c));
      sum_g += g.back();
      sum_gn += g.back() * n.back();
      if (dweight) add_to(dweight, c, gradient * n.back());
      if (dbias) add_to(dbias, c, gradient);
    }
    const double mean_g = mean ? sum_g / static_cast<double>(channels) : 0.0;
    const double mean_gn = sum_gn / static_cast<double>(channels);
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::size_t i = static_cast<std::size_t>(c);
      const double gradient = scale * (g[i] - mean_g - n[i] * mean_gn);
      put(dx, r * channels + c, accumulate ? get(dx, r * channels + c) + gradient : gradient);
    }
  }
}

}  // namespace

void layer_norm(TensorView x, TensorView weight, TensorView bias, TensorView y, TensorView mean, TensorView rstd,
                float eps) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0.0, squares = 0.0;
    for (std::int64_t c = 0; c < channels; ++c) sum += get(x, r * channels + c);
    const double m = sum / static_cast<double>(channels);
    for (std::int64_t c = 0; c < channels; ++c) squares += std::pow(get(x, r * channels + c) - m, 2);
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(channels) + static_cast<double>(eps));
    put(mean, r, m);
    put(rstd, r, scale);
    for (std::int64_t c = 0; c < channels; ++c) {
      put(y, r * channels + c, (get(x, r * channels + c) - m) * scale * get(weight, c) + (bias ? get(bias, c) : 0.0));
    }
  }
}

void layer_norm_backward(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                         TensorView dx, bool accumulate, TensorView dweight, TensorView dbias) {
  norm_backward(dy, x, weight, mean, rstd, dx, accumulate, dweight, dbias);
}

void rms_norm(TensorView x, NormWeight weight, TensorView y, TensorView rstd, float eps) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  for (std::int64_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (std::int64_t c = 0; c < channels; ++c) squares += std::pow(get(x, r * channels + c), 2);
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(channels) + static_cast<double>(eps));
    put(rstd, r, scale);
    for (std::int64_t c = 0; c < channels; ++c) {
      put(y, r * channels + c, get(x, r * channels + c) * scale * scale_of(weight, c));
    }
  }
}

void rms_norm_backward(TensorView dy, TensorView x, NormWeight weight, TensorView rstd, TensorView dx, bool accumulate,
                       TensorView dweight) {
  norm_backward(dy, x, weight, {}, rstd, dx, accumulate, dweight, {});
}

}  // namespace tandem::reference
