#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/numerics/routing.hpp"
#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {
namespace {

std::int32_t& at(const TensorView& view, std::int64_t i) { return view.as<std::int32_t>()[i]; }

/// Softmax of the logits of token n at expert e, over all experts or over those that the token chose.
double probability(const TensorView& logits, std::int64_t n, std::int64_t e, bool normalized, const Routing& r) {
  const std::int64_t experts = logits.shape[1], choices = r.experts.shape[1];
  std::vector<double> all;
  for (std::int64_t i = 0; i < (normalized ? choices : experts); ++i) {
    all.push_back(get(logits, n * experts + (normalized ? at(r.experts, n * choices + i) : i)));
  }
  const double largest = *std::max_element(all.begin(), all.end());
  double sum = 0.0;
  for (const double logit : all) sum += std::exp(logit - largest);
  return std::exp(get(logits, n * experts + e) - largest) / sum;
}

void sort_rows(const Routing& r) {
  const std::int64_t slots = r.experts.count(), experts = r.begins.shape[0] - 1;
  std::int32_t row = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    at(r.begins, e) = row;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      if (at(r.experts, slot) != e) continue;
      at(r.slots, row) = static_cast<std::int32_t>(slot);
      at(r.rows, slot) = row++;
    }
  }
  at(r.begins, experts) = row;
}

/// Index of a row's first value.
std::int64_t start_of(const RowValues& x, const Routing& r, std::int64_t row) {
  return (x.of_tokens ? at(r.slots, row) / r.experts.shape[1] : row) * x.values.shape[1];
}

/// Calls f(expert, row) for all rows.
template <class F>
void for_rows(const Routing& r, const F& f) {
  for (std::int64_t e = 0; e + 1 < r.begins.shape[0]; ++e) {
    for (std::int64_t row = at(r.begins, e); row < at(r.begins, e + 1); ++row) f(e, row);
  }
}

}  // namespace

void route(TensorView logits, bool normalized, const Routing& r) {
  const std::int64_t tokens = logits.shape[0], experts = logits.shape[1], choices = r.experts.shape[1];
  std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
  for (std::int64_t n = 0; n < tokens; ++n) {
    const float* const row = logits.as<float>() + n * experts;
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order,
                      [&](std::int32_t i, std::int32_t j) { return numerics::chosen_before(row[i], i, row[j], j); });
    std::copy_n(order.begin(), choices, &at(r.experts, n * choices));
    for (std::int64_t j = 0; j < choices; ++j) {
      put(r.weights, n * choices + j, probability(logits, n, order[static_cast<std::size_t>(j)], normalized, r));
    }
  }
  sort_rows(r);
}

void route_backward(TensorView drouting_weights, TensorView logits, bool normalized, const Routing& r,
                    TensorView dlogits) {
  const std::int64_t tokens = logits.shape[0], experts = logits.shape[1], choices = r.experts.shape[1];
  for (std::int64_t n = 0; n < tokens; ++n) {
    std::vector<double> dshare(static_cast<std::size_t>(experts));
    std::vector<bool> chosen(dshare.size());
    double mean = 0.0;
    for (std::int64_t slot = n * choices; slot < (n + 1) * choices; ++slot) {
      const auto e = static_cast<std::size_t>(at(r.experts, slot));
      chosen[e] = true;
      dshare[e] = get(drouting_weights, slot);
      mean += probability(logits, n, at(r.experts, slot), normalized, r) * get(drouting_weights, slot);
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto i = static_cast<std::size_t>(e);
      const double share = normalized && !chosen[i] ? 0.0 : probability(logits, n, e, normalized, r);
      put(dlogits, n * experts + e, share * (dshare[i] - mean));
    }
  }
}

void expert_linear(RowValues x, TensorView w, const Routing& r, TensorView y) {
  const std::int64_t out = w.shape[1], in = w.shape[2];
  const std::vector<double> values = values_of(x.values), weights = values_of(w);
  for_rows(r, [&](std::int64_t e, std::int64_t row) {
    const double* const of_row = values.data() + start_of(x, r, row);
    for (std::int64_t o = 0; o < out; ++o) {
      const double* const weight = weights.data() + (e * out + o) * in;
      double sum = 0.0;
      for (std::int64_t i = 0; i < in; ++i) sum += of_row[i] * weight[i];
      put(y, row * out + o, sum);
    }
  });
}

void expert_backward_input(RowValues dy, TensorView w, const Routing& r, TensorView dx, bool accumulate) {
  const std::int64_t out = w.shape[1], in = w.shape[2];
  const std::vector<double> weights = values_of(w);
  std::vector<double> sums(static_cast<std::size_t>(in));
  for_rows(r, [&](std::int64_t e, std::int64_t row) {
    const std::int64_t first = start_of(dy, r, row);
    for (std::int64_t i = 0; i < in; ++i) sums[static_cast<std::size_t>(i)] = accumulate ? get(dx, row * in + i) : 0.0;
    for (std::int64_t o = 0; o < out; ++o) {
      add_products(sums.data(), get(dy.values, first + o), weights.data() + (e * out + o) * in, in);
    }
    for (std::int64_t i = 0; i < in; ++i) put(dx, row * in + i, sums[static_cast<std::size_t>(i)]);
  });
}

void expert_backward_weight(RowValues dy, RowValues x, const Routing& r, TensorView dw) {
  const std::int64_t out = dw.shape[1], in = dw.shape[2];
  const std::vector<double> values = values_of(x.values);
  for (std::int64_t e = 0; e < dw.shape[0]; ++e) {
    for (std::int64_t o = 0; o < out; ++o) {
      std::vector<double> sums(static_cast<std::size_t>(in));
      for (std::int64_t row = at(r.begins, e); row < at(r.begins, e + 1); ++row) {
        add_products(sums.data(), get(dy.values, start_of(dy, r, row) + o), values.data() + start_of(x, r, row), in);
      }
      for (std::int64_t i = 0; i < in; ++i) add_or_write(dw, (e * out + o) * in + i, sums[static_cast<std::size_t>(i)]);
    }
  }
}

void expert_swiglu(TensorView gate, TensorView up, const Routing& r, TensorView y) {
  const std::int64_t channels = gate.shape[1];
  for (std::int64_t i = 0; i < gate.count(); ++i) {
    const double g = get(gate, i);
    put(y, i, get(r.weights, at(r.slots, i / channels)) * g / (1.0 + std::exp(-g)) * get(up, i));
  }
}

void expert_swiglu_backward(TensorView dy, TensorView gate, TensorView up, const Routing& r, TensorView dgate,
                            TensorView dup, TensorView drouting_weights) {
  const std::int64_t rows = gate.shape[0], channels = gate.shape[1];
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t slot = at(r.slots, row);
    const double share = get(r.weights, slot);
    double dshare = 0.0;
    for (std::int64_t i = row * channels; i < (row + 1) * channels; ++i) {
      const double g = get(gate, i), u = get(up, i), d = get(dy, i), s = 1.0 / (1.0 + std::exp(-g));
      dshare += d * g * s * u;
      put(dgate, i, share * d * u * s * (1.0 + g * (1.0 - s)));
      put(dup, i, share * d * g * s);
    }
    put(drouting_weights, slot, dshare);
  }
}

void sum_rows(TensorView x, const Routing& r, TensorView residual, TensorView y) {
  const std::int64_t tokens = y.shape[0], channels = y.shape[1], choices = r.experts.shape[1];
  for (std::int64_t n = 0; n < tokens; ++n) {
    for (std::int64_t c = 0; c < channels; ++c) {
      double sum = residual ? get(residual, n * channels + c) : 0.0;
      for (std::int64_t j = 0; j < choices; ++j) sum += get(x, at(r.rows, n * choices + j) * channels + c);
      put(y, n * channels + c, sum);
    }
  }
}

}  // namespace tandem::reference
