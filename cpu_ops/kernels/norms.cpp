#include <cmath>

#include "core/numerics/ieee.hpp"
#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/kernels/lane_sums.hpp"
#include "cpu_ops/kernels/magnitude.hpp"

namespace tandem::fast {
namespace {

/// Rows that a thread takes at once: about 16 Ki elements.
std::int64_t rows_at_once(std::int64_t channels) { return std::max<std::int64_t>(1, 16 * 1024 / channels); }

/// Runs body(row) for all rows on all threads, vectorised, then after(begin, length) for rows that are done.
template <class Body, class After>
void for_rows(Parallel& parallel, std::int64_t rows, std::int64_t channels, const Body& body, const After& after) {
  for_ranges(parallel, rows, rows_at_once(channels), [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      for (std::int64_t row = begin; row < begin + length; ++row) body(row);
    });
    after(begin, length);
  });
}
template <class Body>
void for_rows(Parallel& parallel, std::int64_t rows, std::int64_t channels, const Body& body) {
  for_rows(parallel, rows, channels, body, [](std::int64_t, std::int64_t) {});
}

/// Adds rows to a magnitude.
template <class T>
auto rows_into(const Magnitude& largest, const T* y, std::int64_t channels) {
  return [=](std::int64_t begin, std::int64_t length) { largest.add(y + begin * channels, length * channels); };
}

constexpr std::int64_t columns_at_once = 64;

/// dweight[c] += sum over rows of dy * normalised(row, c, x), dbias[c] += sum of dy; rows in order, threads share
/// the columns. Either may be null.
template <class T, class Normalised>
void add_column_sums(Parallel& parallel, std::int64_t rows, std::int64_t channels, const T* dy, const T* x,
                     float* dweight, float* dbias, const Normalised& normalised) {
  if (dweight == nullptr && dbias == nullptr) return;
  for_ranges(parallel, channels, columns_at_once, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      float weight_sum[columns_at_once] = {};
      float bias_sum[columns_at_once] = {};
      for (std::int64_t row = 0; row < rows; ++row) {
        const T* const d = dy + row * channels + begin;
        const T* const v = x + row * channels + begin;
        for (std::int64_t c = 0; c < length; ++c) {
          const float gradient = to_float(d[c]);
          weight_sum[c] += gradient * normalised(row, to_float(v[c]));
          bias_sum[c] += gradient;
        }
      }
      for (std::int64_t c = 0; c < length; ++c) {
        if (dweight != nullptr) dweight[begin + c] += weight_sum[c];
        if (dbias != nullptr) dbias[begin + c] += bias_sum[c];
      }
    });
  });
}

/// The part of both backwards that is alike: with n = normalised x and g = dy * weight,
/// dx = rstd (g - mean(g) - n mean(g n)), the mean of g only where the norm is centred.
template <class T, class Normalised>
void norm_backward_rows(Parallel& parallel, std::int64_t rows, std::int64_t channels, const T* dy, const T* x,
                        NormWeight weight, const float* rstd, T* dx, bool accumulate, bool centred,
                        const Normalised& normalised) {
  const float inverse = 1.0F / static_cast<float>(channels);
  const bf16* const w = weight.values.as<bf16>();
  const float offset = weight.offset;
  for_rows(parallel, rows, channels, [=](std::int64_t row) {
    const T* const d = dy + row * channels;
    const T* const v = x + row * channels;
    T* const out = dx + row * channels;
    const float scale = rstd[row];
    const float mean_g =
        centred
            ? inverse * lane_sum(channels, [=](std::int64_t c) { return to_float(d[c]) * (to_float(w[c]) + offset); })
            : 0.0F;
    const float mean_gn = inverse * lane_sum(channels, [=](std::int64_t c) {
                            return to_float(d[c]) * (to_float(w[c]) + offset) * normalised(row, to_float(v[c]));
                          });
#pragma GCC ivdep
    for (std::int64_t c = 0; c < channels; ++c) {
      const float g = to_float(d[c]) * (to_float(w[c]) + offset);
      const float gradient = scale * (g - mean_g - normalised(row, to_float(v[c])) * mean_gn);
      out[c] = from_float<T>(accumulate ? to_float(out[c]) + gradient : gradient);
    }
  });
}

}  // namespace

void layer_norm(Parallel& parallel, TensorView x, TensorView weight, TensorView bias, MeasuredView y, TensorView mean,
                TensorView rstd, float eps) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  const bf16 *const w = weight.as<bf16>(), *const b = optional<bf16>(bias);
  float *const means = mean.as<float>(), *const rstds = rstd.as<float>();
  const float inverse = 1.0F / static_cast<float>(channels);
  with_activation(x.dtype, [&]<class T>(T) {
    const T* const in = x.as<T>();
    T* const out = y.values.as<T>();
    const auto normalize = [=](std::int64_t row) {
      const T* const v = in + row * channels;
      T* const result = out + row * channels;
      const float m = inverse * lane_sum(channels, [=](std::int64_t c) { return to_float(v[c]); });
      const float variance = inverse * lane_sum(channels, [=](std::int64_t c) {
                               const float centred = to_float(v[c]) - m;
                               return centred * centred;
                             });
      const float r = 1.0F / numerics::sqrt(variance + eps);
      means[row] = m;
      rstds[row] = r;
#pragma GCC ivdep
      for (std::int64_t c = 0; c < channels; ++c) {
        const float shift = b == nullptr ? 0.0F : to_float(b[c]);
        result[c] = from_float<T>(numerics::fma((to_float(v[c]) - m) * r, to_float(w[c]), shift));
      }
    };
    for_rows(parallel, rows, channels, normalize, rows_into(Magnitude(y.magnitude), out, channels));
  });
}

void layer_norm_backward(Parallel& parallel, TensorView dy, TensorView x, TensorView weight, TensorView mean,
                         TensorView rstd, TensorView dx, bool accumulate, TensorView dweight, TensorView dbias) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  const float *const means = mean.as<float>(), *const rstds = rstd.as<float>();
  const auto normalised = [=](std::int64_t row, float v) { return (v - means[row]) * rstds[row]; };
  with_activation(x.dtype, [&]<class T>(T) {
    // Before dx, which may lie where dy does.
    add_column_sums(parallel, rows, channels, dy.as<T>(), x.as<T>(), optional<float>(dweight), optional<float>(dbias),
                    normalised);
    norm_backward_rows(parallel, rows, channels, dy.as<T>(), x.as<T>(), weight, rstds, dx.as<T>(), accumulate, true,
                       normalised);
  });
}

void rms_norm(Parallel& parallel, TensorView x, NormWeight weight, MeasuredView y, TensorView rstd, float eps) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  const bf16* const w = weight.values.as<bf16>();
  const float offset = weight.offset;
  float* const rstds = rstd.as<float>();
  const float inverse = 1.0F / static_cast<float>(channels);
  with_activation(x.dtype, [&]<class T>(T) {
    const T* const in = x.as<T>();
    T* const out = y.values.as<T>();
    const auto normalize = [=](std::int64_t row) {
      const T* const v = in + row * channels;
      T* const result = out + row * channels;
      const float square =
          inverse * lane_sum(channels, [=](std::int64_t c) { return to_float(v[c]) * to_float(v[c]); });
      const float r = 1.0F / numerics::sqrt(square + eps);
      rstds[row] = r;
#pragma GCC ivdep
      for (std::int64_t c = 0; c < channels; ++c) {
        result[c] = from_float<T>(to_float(v[c]) * r * (to_float(w[c]) + offset));
      }
    };
    for_rows(parallel, rows, channels, normalize, rows_into(Magnitude(y.magnitude), out, channels));
  });
}

void rms_norm_backward(Parallel& parallel, TensorView dy, TensorView x, NormWeight weight, TensorView rstd,
                       TensorView dx, bool accumulate, TensorView dweight) {
  const std::int64_t rows = x.shape[0], channels = x.shape[1];
  const float* const rstds = rstd.as<float>();
  const auto normalised = [=](std::int64_t row, float v) { return v * rstds[row]; };
  with_activation(x.dtype, [&]<class T>(T) {
    add_column_sums(parallel, rows, channels, dy.as<T>(), x.as<T>(), optional<float>(dweight),
                    static_cast<float*>(nullptr), normalised);
    norm_backward_rows(parallel, rows, channels, dy.as<T>(), x.as<T>(), weight, rstds, dx.as<T>(), accumulate, false,
                       normalised);
  });
}

}  // namespace tandem::fast
