#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/numerics/random.hpp"
#include "core/parallel.hpp"
#include "models/transformer.hpp"

namespace tandem {
namespace {

/// FNV-1a: which random stream a parameter draws from depends on its name alone.
std::uint64_t stream_of(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

/// Calls body(begin, end) for parts of [0, count): a core makes some 30 million values a second, of which a model has
/// billions.
template <class Body>
void in_parts(std::uint64_t count, Parallel* threads, const Body& body) {
  if (threads == nullptr) return body(std::uint64_t{0}, count);
  constexpr std::uint64_t part = 1 << 14;
  threads->run(static_cast<std::int64_t>((count + part - 1) / part), [&](std::int64_t i) {
    const std::uint64_t begin = static_cast<std::uint64_t>(i) * part;
    body(begin, std::min(begin + part, count));
  });
}

/// Box and Muller, in double: elements 2 i and 2 i + 1 of the whole come from block i of the stream.
void fill_normal(std::uint64_t first, std::span<float> values, double deviation, std::uint64_t seed,
                 std::uint64_t stream) {
  const std::uint64_t end = first + values.size();
  for (std::uint64_t block = first / 2; 2 * block < end; ++block) {
    const numerics::Philox128 bits = numerics::philox_block(seed, stream, block);
    const double radius = deviation * std::sqrt(-2.0 * std::log(numerics::uniform_of(bits, 0)));
    const double angle = 2.0 * std::numbers::pi * numerics::uniform_of(bits, 2);
    const std::uint64_t i = 2 * block;
    if (i >= first) values[i - first] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < end) values[i + 1 - first] = static_cast<float>(radius * std::sin(angle));
  }
}

bool is_norm_weight(std::string_view name) {
  return name == "ln_1.weight" || name == "ln_2.weight" || name.ends_with("norm.weight");
}

/// Adds to the residual stream, where the variances of all layers add up (GPT-2's initialisation).
bool is_residual_projection(std::string_view name) {
  return name.ends_with("c_proj.weight") || name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
}

}  // namespace

void initialize_parameter(const ModelConfig& config, const Parameter& parameter, std::uint64_t seed, std::int64_t first,
                          std::span<float> values, Parallel* threads) {
  if (first < 0 || first > parameter.count || values.size() > static_cast<std::size_t>(parameter.count - first)) {
    throw MisuseError("initial values of another size", fmt::format("{}: {} from {} on for {}", parameter.full_name,
                                                                    values.size(), first, parameter.count));
  }
  if (is_norm_weight(parameter.name)) {
    std::ranges::fill(values, static_cast<float>(1.0 - config.norm_offset));
  } else if (parameter.name.ends_with("bias")) {
    std::ranges::fill(values, 0.0F);
  } else {
    const double residual = 1.0 / std::sqrt(2.0 * static_cast<double>(config.layers));
    const double scale = is_residual_projection(parameter.name) ? residual : 1.0;
    const std::uint64_t stream = stream_of(parameter.full_name);
    in_parts(values.size(), threads, [&](std::uint64_t begin, std::uint64_t end) {
      fill_normal(static_cast<std::uint64_t>(first) + begin, values.subspan(begin, end - begin),
                  scale * config.initializer_range, seed, stream);
    });
  }
}

}  // namespace tandem
