#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {

// An element of a product is a sum in double, its terms added in order. What is innermost goes over elements of a row,
// whose sums do not wait for each other.
void linear(TensorView x, TensorView w, TensorView bias, TensorView y) {
  const std::int64_t rows = x.shape[0], in = x.shape[1], out = w.shape[0];
  const std::vector<double> factors = values_of(x);
  std::vector<double> columns(static_cast<std::size_t>(in * out)), sums(static_cast<std::size_t>(out));
  for (std::int64_t o = 0; o < out; ++o) {
    for (std::int64_t i = 0; i < in; ++i) columns[static_cast<std::size_t>(i * out + o)] = get(w, o * in + i);
  }
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t o = 0; o < out; ++o) sums[static_cast<std::size_t>(o)] = bias ? get(bias, o) : 0.0;
    for (std::int64_t i = 0; i < in; ++i)
      add_products(sums.data(), factors.data()[n * in + i], columns.data() + i * out, out);
    for (std::int64_t o = 0; o < out; ++o) put(y, n * out + o, sums[static_cast<std::size_t>(o)]);
  }
}

void linear_backward_input(TensorView dy, TensorView w, TensorView dx, bool accumulate) {
  const std::int64_t rows = dy.shape[0], in = w.shape[1], out = w.shape[0];
  const std::vector<double> weights = values_of(w);
  std::vector<double> sums(static_cast<std::size_t>(in));
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t i = 0; i < in; ++i) sums[static_cast<std::size_t>(i)] = accumulate ? get(dx, n * in + i) : 0.0;
    for (std::int64_t o = 0; o < out; ++o) add_products(sums.data(), get(dy, n * out + o), weights.data() + o * in, in);
    for (std::int64_t i = 0; i < in; ++i) put(dx, n * in + i, sums[static_cast<std::size_t>(i)]);
  }
}

void linear_backward_weight(TensorView dy, TensorView x, TensorView dw, TensorView dbias) {
  const std::int64_t rows = dy.shape[0], in = x.shape[1], out = dy.shape[1];
  const std::vector<double> values = dw ? values_of(x) : std::vector<double>{};
  for (std::int64_t o = 0; o < out; ++o) {
    std::vector<double> sums(static_cast<std::size_t>(dw ? in : 0));
    double of_bias = 0.0;
    for (std::int64_t n = 0; n < rows; ++n) {
      const double factor = get(dy, n * out + o);
      if (dw) add_products(sums.data(), factor, values.data() + n * in, in);
      of_bias += factor;
    }
    for (std::int64_t i = 0; dw && i < in; ++i) add_or_write(dw, o * in + i, sums[static_cast<std::size_t>(i)]);
    if (dbias) add_to(dbias, o, of_bias);
  }
}

namespace {

/// Factor of the gradients of a row's loss, beside gradient_scale.
double factor_of(const HeadLoss& head, std::int64_t row) {
  if (!head.sequence_factors) return 1.0;
  return get(head.sequence_factors, row / (head.x.shape[0] / head.sequence_factors.shape[0]));
}

}  // namespace

void head_loss(const HeadLoss& head) {
  const std::int64_t rows = head.x.shape[0], channels = head.x.shape[1], vocabulary = head.weight.shape[0];
  std::vector<double> p(static_cast<std::size_t>(vocabulary));
  std::vector<double> dweight(head.dweight ? static_cast<std::size_t>(vocabulary * channels) : 0);
  for (std::int64_t n = 0; n < rows; ++n) {
    const std::int32_t target = head.targets.as<std::int32_t>()[n];
    for (std::int64_t v = 0; v < vocabulary; ++v) {
      double logit = 0.0;
      for (std::int64_t c = 0; c < channels; ++c)
        logit += get(head.x, n * channels + c) * get(head.weight, v * channels + c);
      p[static_cast<std::size_t>(v)] = logit;
    }
    const double largest = *std::max_element(p.begin(), p.end());
    double sum = 0.0;
    for (const double logit : p) sum += std::exp(logit - largest);
    const double log_sum = largest + std::log(sum);
    put(head.losses, n, target < 0 ? 0.0 : log_sum - p[static_cast<std::size_t>(target)]);
    if (!head.gradients()) continue;
    const double scale = static_cast<double>(head.gradient_scale) * factor_of(head, n);
    for (std::int64_t v = 0; v < vocabulary; ++v) {
      double& d = p[static_cast<std::size_t>(v)];
      d = target < 0 ? 0.0 : (std::exp(d - log_sum) - (v == target ? 1.0 : 0.0)) * scale;
    }
    for (std::int64_t c = 0; head.dx && c < channels; ++c) {
      double gradient = 0.0;
      for (std::int64_t v = 0; v < vocabulary; ++v)
        gradient += p[static_cast<std::size_t>(v)] * get(head.weight, v * channels + c);
      put(head.dx, n * channels + c, gradient);
    }
    for (std::int64_t v = 0; head.dweight && v < vocabulary; ++v) {
      for (std::int64_t c = 0; c < channels; ++c) {
        dweight[static_cast<std::size_t>(v * channels + c)] +=
            p[static_cast<std::size_t>(v)] * get(head.x, n * channels + c);
      }
    }
  }
  for (std::size_t i = 0; i < dweight.size(); ++i) add_or_write(head.dweight, static_cast<std::int64_t>(i), dweight[i]);
  for (std::int64_t i = 0; head.token_rows && i < head.token_rows.count(); ++i) {
    const std::int64_t token = head.tokens.as<std::int32_t>()[i / channels];
    put(head.token_rows, i, dweight[static_cast<std::size_t>(token * channels + i % channels)]);
  }
}

void preference_loss(const PreferenceLoss& of) {
  const std::int64_t length = of.losses.shape[1];
  const auto beta = static_cast<double>(of.beta);
  const auto reward = [&](std::int64_t sequence) {
    double sum = 0.0;
    for (std::int64_t t = 0; t < length; ++t) sum += get(of.losses, sequence * length + t);
    return beta * (-sum - get(of.reference, sequence));
  };
  for (std::int64_t pair = 0; pair < of.pairs.shape[0]; ++pair) {
    const double chosen = reward(2 * pair), rejected = reward(2 * pair + 1), margin = chosen - rejected;
    put(of.pairs, 3 * pair, margin < 0.0 ? std::log1p(std::exp(margin)) - margin : std::log1p(std::exp(-margin)));
    put(of.pairs, 3 * pair + 1, chosen);
    put(of.pairs, 3 * pair + 2, rejected);
    put(of.sequence_factors, 2 * pair, beta / (1.0 + std::exp(margin)));
    put(of.sequence_factors, 2 * pair + 1, -beta / (1.0 + std::exp(margin)));
  }
}

}  // namespace tandem::reference
