#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {
namespace {

/// Index of element 0 of head h at token (b, t).
std::int64_t at(const HeadsView& view, const AttentionShape& s, std::int64_t b, std::int64_t t, std::int64_t h) {
  return (b * s.sequence + t) * view.row_stride + h * s.head_dim;
}

double dot(const HeadsView& p, std::int64_t i, const HeadsView& q, std::int64_t j, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t d = 0; d < n; ++d) sum += get(p.data, p.dtype, i + d) * get(q.data, q.dtype, j + d);
  return sum;
}

HeadsView dense(const TensorView& view, const AttentionShape& s) {
  return {view.data, view.dtype, s.heads * s.head_dim};
}

/// Adds into a double copy of a HeadsView, written back at the end.
class Sum {
 public:
  Sum(const HeadsView& view, const AttentionShape& s, std::int64_t heads)
      : view_(view),
        s_(s),
        heads_(heads),
        values_(static_cast<std::size_t>(s.batch * s.sequence * heads * s.head_dim)) {}
  double& operator()(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
    return values_[static_cast<std::size_t>(((b * s_.sequence + t) * heads_ + h) * s_.head_dim + d)];
  }
  void write() {
    for (std::int64_t row = 0; row < s_.batch * s_.sequence; ++row) {
      for (std::int64_t i = 0; i < heads_ * s_.head_dim; ++i) {
        put(view_.data, view_.dtype, row * view_.row_stride + i,
            values_[static_cast<std::size_t>(row * heads_ * s_.head_dim + i)]);
      }
    }
  }

 private:
  HeadsView view_;
  AttentionShape s_;
  std::int64_t heads_;
  std::vector<double> values_;
};

/// First key that query t of row b sees.
std::int64_t first_seen(const AttentionShape& s, std::int64_t b, std::int64_t t) {
  const std::int64_t record = s.records ? s.records.first[b * s.sequence + t] : 0;
  return std::max(record, t + 1 - s.reach());
}

template <class Body>
void for_queries(const AttentionShape& s, const Body& body) {
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      for (std::int64_t t = 0; t < s.sequence; ++t) body(b, h, t, h / s.group());
    }
  }
}

}  // namespace

void attention(HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse, const AttentionShape& s) {
  const HeadsView o = dense(out, s);
  for_queries(s, [&](std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t g) {
    const std::int64_t first = first_seen(s, b, t);
    std::vector<double> p(static_cast<std::size_t>(t + 1 - first));
    double largest = -INFINITY, sum = 0.0;
    for (std::int64_t j = first; j <= t; ++j) {
      double& score = p[static_cast<std::size_t>(j - first)];
      score = static_cast<double>(s.scale) * dot(q, at(q, s, b, t, h), k, at(k, s, b, j, g), s.head_dim);
      largest = std::fmax(largest, score);
    }
    for (double& x : p) sum += x = std::exp(x - largest);
    for (std::int64_t d = 0; d < s.head_dim; ++d) {
      double value = 0.0;
      for (std::int64_t j = first; j <= t; ++j)
        value += p[static_cast<std::size_t>(j - first)] / sum * get(v.data, v.dtype, at(v, s, b, j, g) + d);
      put(o.data, o.dtype, at(o, s, b, t, h) + d, value);
    }
    if (lse) put(lse, (b * s.heads + h) * s.sequence + t, largest + std::log(sum));
  });
}

void cached_attention(HeadsView q, const KeyValueCache& cache, const CachedTokens& tokens, TensorView out,
                      const AttentionShape& s) {
  const std::int64_t length = cache.keys.shape[1], width = cache.keys.shape[2];
  for (std::int64_t n = 0; n < s.sequence; ++n) {
    const std::int64_t last = tokens.position(n), row = tokens.rows[n] * length * width;
    const HeadsView k{cache.keys.data, cache.keys.dtype, width}, v{cache.values.data, cache.values.dtype, width};
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t first = s.window > 0 ? std::max<std::int64_t>(0, last + 1 - s.window) : 0;
      const auto key_at = [&](std::int64_t j) { return row + j * width + h / s.group() * s.head_dim; };
      std::vector<double> p;
      for (std::int64_t j = first; j <= last; ++j) {
        p.push_back(static_cast<double>(s.scale) * dot(q, n * q.row_stride + h * s.head_dim, k, key_at(j), s.head_dim));
      }
      const double largest = *std::max_element(p.begin(), p.end());
      double sum = 0.0;
      for (double& x : p) sum += x = std::exp(x - largest);
      for (std::int64_t d = 0; d < s.head_dim; ++d) {
        double value = 0.0;
        for (std::int64_t j = first; j <= last; ++j) {
          value += p[static_cast<std::size_t>(j - first)] / sum * get(v.data, v.dtype, key_at(j) + d);
        }
        put(out, (n * s.heads + h) * s.head_dim + d, value);
      }
    }
  }
}

void attention_backward(TensorView dout, HeadsView q, HeadsView k, HeadsView v, TensorView out, TensorView lse,
                        HeadsView dq, HeadsView dk, HeadsView dv, const AttentionShape& s) {
  const HeadsView o = dense(out, s), d_o = dense(dout, s);
  Sum sum_dq(dq, s, s.heads), sum_dk(dk, s, s.kv_heads), sum_dv(dv, s, s.kv_heads);
  const double scale = static_cast<double>(s.scale);
  for_queries(s, [&](std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t g) {
    const std::int64_t q_at = at(q, s, b, t, h), o_at = at(o, s, b, t, h);
    const double delta = dot(d_o, o_at, o, o_at, s.head_dim);
    const double log_sum = get(lse, (b * s.heads + h) * s.sequence + t);
    for (std::int64_t j = first_seen(s, b, t); j <= t; ++j) {
      const std::int64_t k_at = at(k, s, b, j, g), v_at = at(v, s, b, j, g);
      const double p = std::exp(scale * dot(q, q_at, k, k_at, s.head_dim) - log_sum);
      const double ds = scale * p * (dot(d_o, o_at, v, v_at, s.head_dim) - delta);
      for (std::int64_t d = 0; d < s.head_dim; ++d) {
        sum_dq(b, t, h, d) += ds * get(k.data, k.dtype, k_at + d);
        sum_dk(b, j, g, d) += ds * get(q.data, q.dtype, q_at + d);
        sum_dv(b, j, g, d) += p * get(d_o.data, d_o.dtype, o_at + d);
      }
    }
  });
  sum_dq.write();
  sum_dk.write();
  sum_dv.write();
}

void rope(TensorView x, TensorView table, bool inverse, RecordsView records) {
  const TokenRows rows(x.shape[1], records);
  const std::int64_t heads = x.shape[2], dim = x.shape[3], half = table.shape[1];
  for (std::int64_t token = 0; token < x.shape[0] * rows.sequence; ++token) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < half; ++i) {
        const std::int64_t low = (token * heads + h) * dim + i, high = low + half;
        const std::int64_t angle = (rows.position(token) * half + i) * 2;
        const double cosine = get(table, angle), sine = inverse ? -get(table, angle + 1) : get(table, angle + 1);
        const double a = get(x, low), b = get(x, high);
        put(x, low, a * cosine - b * sine);
        put(x, high, b * cosine + a * sine);
      }
    }
  }
}

}  // namespace tandem::reference
