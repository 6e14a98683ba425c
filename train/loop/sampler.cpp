#include "train/loop/sampler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.hpp"
#include "core/numerics/random.hpp"

namespace tandem {
namespace {

/// Length of the valid UTF-8 sequence at `at`, or 0.
std::size_t utf8_length(std::span<const std::int32_t> b, std::size_t at) {
  const auto lead = static_cast<std::uint32_t>(b[at]);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || at + length > b.size()) return 0;
  std::uint32_t code = lead & (0x7fU >> length);
  for (std::size_t i = 1; i < length; ++i) {
    const auto next = static_cast<std::uint32_t>(b[at + i]);
    if ((next & 0xc0U) != 0x80) return 0;
    code = (code << 6) | (next & 0x3fU);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool forbidden = (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff;
  return overlong || forbidden ? 0 : length;
}

}  // namespace

std::int32_t draw_token(std::span<const float> logits, const SampleOptions& options, std::uint64_t index) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)];
    const float y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  // NaN would leave the sort without an order, and an infinite logit the weights without a sum.
  const bool ordered = std::none_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
  if (!ordered || !std::isfinite(*std::max_element(logits.begin(), logits.end()))) {
    throw InputError("no token can be drawn", "the model's logits are not finite",
                     "its weights are damaged, or training diverged: try an earlier checkpoint");
  }
  std::sort(order.begin(), order.end(), likelier);
  if (options.temperature == 0.0) return order.front();
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(options.top_k)));
  const double most = logits[static_cast<std::size_t>(order.front())];
  std::vector<double> weights;
  weights.reserve(order.size());
  for (const std::int32_t token : order) {
    weights.push_back(std::exp((logits[static_cast<std::size_t>(token)] - most) / options.temperature));
  }
  constexpr std::uint64_t purpose = 0x53414d50;  // keeps these draws apart from other users of the seed
  const double uniform = numerics::uniform_of(numerics::philox_block(options.seed, purpose, index), 0);
  double left = uniform * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i < order.size(); ++i) {
    left -= weights[i];
    if (left <= 0.0) return order[i];
  }
  return order.back();
}

std::vector<std::int32_t> sample_tokens(LoadedModel& model, const RunSetup& setup, std::vector<std::int32_t> prompt,
                                        const SampleOptions& options, const std::function<void(std::int32_t)>& each) {
  if (prompt.empty()) throw MisuseError("sampling without a prompt");
  const auto longest = static_cast<std::size_t>(setup.model->shape().sequence);
  std::vector<float> logits(static_cast<std::size_t>(setup.model_config.vocabulary));
  std::vector<std::int32_t> made;
  for (std::int64_t i = 0; i < options.max_tokens; ++i) {
    const auto context = std::span(prompt).last(std::min(longest, prompt.size()));
    model.logits(context, static_cast<std::int64_t>(context.size()) - 1, logits);
    const std::int32_t token = draw_token(logits, options, static_cast<std::uint64_t>(i));
    prompt.push_back(token);
    made.push_back(token);
    each(token);
  }
  return made;
}

std::string text_of_bytes(std::span<const std::int32_t> tokens) {
  std::string text;
  for (std::size_t i = 0; i < tokens.size();) {
    const std::size_t length = utf8_length(tokens, i);
    const std::int32_t byte = tokens[i];
    const bool control = length == 1 && (byte < 0x20 || byte == 0x7f) && byte != '\n' && byte != '\t';
    if (length == 0 || control) {
      text += fmt::format("\\x{:02x}", byte);
      ++i;
      continue;
    }
    for (std::size_t j = 0; j < length; ++j) text += static_cast<char>(tokens[i + j]);
    i += length;
  }
  return text;
}

}  // namespace tandem
