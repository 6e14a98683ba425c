#include "train/sampling/draw.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/base/error.hpp"
#include "core/numerics/random.hpp"

namespace tandem {
namespace {

void refuse_damaged(std::span<const float> logits) {
  // NaN would leave tokens without an order, and an infinite logit the weights without a sum.
  const bool ordered = std::none_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  if (ordered && std::isfinite(*std::max_element(logits.begin(), logits.end()))) return;
  throw InputError("no token can be drawn", "the model's logits are not finite",
                   "its weights are damaged, or training diverged: try an earlier checkpoint");
}

std::vector<float> penalized(std::span<const float> logits, std::span<const std::int32_t> sequence, double penalty) {
  std::vector<float> result(logits.begin(), logits.end());
  for (const std::int32_t token : sequence) {
    const auto i = static_cast<std::size_t>(token);
    if (i >= result.size()) continue;
    const auto before = static_cast<double>(logits[i]);
    result[i] = static_cast<float>(before > 0.0 ? before / penalty : before * penalty);
  }
  return result;
}

/// Tokens by falling probability, sorted as far as they are asked for: most draws fall among the first few.
class Ranking {
 public:
  explicit Ranking(std::span<const float> logits) : logits_(logits), order_(logits.size()) {
    std::iota(order_.begin(), order_.end(), 0);
  }
  std::int32_t at(std::size_t i) {
    if (i >= sorted_) sort_to(std::max(2 * sorted_, i + 64));
    return order_[i];
  }

 private:
  void sort_to(std::size_t count) {
    const auto from = order_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    sorted_ = std::min(count, order_.size());
    const auto likelier = [this](std::int32_t a, std::int32_t b) {
      const float x = logits_[static_cast<std::size_t>(a)], y = logits_[static_cast<std::size_t>(b)];
      return x != y ? x > y : a < b;
    };
    std::partial_sort(from, order_.begin() + static_cast<std::ptrdiff_t>(sorted_), order_.end(), likelier);
  }

  std::span<const float> logits_;
  std::vector<std::int32_t> order_;
  std::size_t sorted_ = 0;
};

/// Draws among the likeliest tokens.
class Draw {
 public:
  Draw(std::span<const float> logits, const DrawOptions& options)
      : logits_(logits),
        temperature_(options.temperature),
        count_(options.top_k > 0 ? std::min(logits.size(), static_cast<std::size_t>(options.top_k)) : logits.size()),
        ranking_(logits),
        most_(static_cast<double>(logits[static_cast<std::size_t>(ranking_.at(0))])),
        total_(sum_of_weights()) {
    if (options.top_p < 1.0) keep_share(options.top_p);
  }
  /// The token at a share of the weights, from the likeliest on.
  std::int32_t at(double share) {
    double left = share * total_;
    for (std::size_t i = 0; i + 1 < count_; ++i) {
      left -= weight(ranking_.at(i));
      if (left <= 0.0) return ranking_.at(i);
    }
    return ranking_.at(count_ - 1);
  }

 private:
  double weight(std::int32_t token) const {
    return std::exp((static_cast<double>(logits_[static_cast<std::size_t>(token)]) - most_) / temperature_);
  }
  double sum_of_weights() {
    double sum = 0.0;
    if (count_ == logits_.size()) {
      for (std::size_t i = 0; i < count_; ++i) sum += weight(static_cast<std::int32_t>(i));
    } else {
      for (std::size_t i = 0; i < count_; ++i) sum += weight(ranking_.at(i));
    }
    return sum;
  }
  /// Leaves the likeliest tokens that together have this share of all weights: one at least.
  void keep_share(double share) {
    double sum = 0.0;
    for (std::size_t i = 0; i < count_; ++i) {
      sum += weight(ranking_.at(i));
      if (sum >= share * total_) count_ = i + 1;
    }
    total_ = std::min(sum, total_);
  }

  std::span<const float> logits_;
  double temperature_;
  std::size_t count_;
  Ranking ranking_;
  double most_;
  double total_;
};

}  // namespace

std::int32_t draw_token(std::span<const float> logits, std::span<const std::int32_t> sequence,
                        const DrawOptions& options, const DrawNumber& number) {
  refuse_damaged(logits);
  std::vector<float> changed;
  if (options.repetition_penalty != 1.0) {
    changed = penalized(logits, sequence, options.repetition_penalty);
    logits = changed;
  }
  if (options.temperature == 0.0) {
    return static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  constexpr std::uint64_t purpose = 0x53414d50;  // keeps these draws apart from other users of the seed
  const numerics::Philox128 bits = numerics::philox_block(options.seed, purpose + (number.repeat << 32U), number.token);
  return Draw(logits, options).at(numerics::uniform_of(bits, 0));
}

}  // namespace tandem
