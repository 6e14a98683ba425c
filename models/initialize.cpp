#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <system_error>
#include <thread>
#include <vector>

#include "core/numerics/random.hpp"
#include "models/transformer.hpp"

namespace tandem {
namespace {

/// FNV-1a: which random stream a parameter draws from depends on its name alone.
std::uint64_t stream_of(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

/// Calls body(begin, end) for parts of [0, count), on all cores of this process: a core makes some 30 million values a
/// second, of which a model has billions.
template <class Body>
void in_parts(std::uint64_t count, const Body& body) {
  constexpr std::uint64_t part = 1 << 14;
  std::atomic<std::uint64_t> next{0};
  const auto work = [&] {
    for (std::uint64_t begin = next.fetch_add(part); begin < count; begin = next.fetch_add(part)) {
      body(begin, std::min(begin + part, count));
    }
  };
  std::vector<std::jthread> others;
  try {
    const std::uint64_t cores = std::max(1U, std::thread::hardware_concurrency());
    while (others.size() + 1 < std::min(cores, (count + part - 1) / part)) others.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads take longer, and that is all.
  }
  work();
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
                          std::span<float> values) {
  if (first < 0 || first > parameter.count || values.size() > static_cast<std::size_t>(parameter.count - first)) {
    throw MisuseError("initial values of another size", fmt::format("{}: {} from {} on for {}", parameter.full_name,
                                                                    values.size(), first, parameter.count));
  }
  if (is_norm_weight(parameter.name)) {
    std::ranges::fill(values, 1.0F);
  } else if (parameter.name.ends_with("bias")) {
    std::ranges::fill(values, 0.0F);
  } else {
    const double residual = 1.0 / std::sqrt(2.0 * static_cast<double>(config.layers));
    const double scale = is_residual_projection(parameter.name) ? residual : 1.0;
    const std::uint64_t stream = stream_of(parameter.full_name);
    in_parts(values.size(), [&](std::uint64_t begin, std::uint64_t end) {
      fill_normal(static_cast<std::uint64_t>(first) + begin, values.subspan(begin, end - begin),
                  scale * config.initializer_range, seed, stream);
    });
  }
}

}  // namespace tandem
