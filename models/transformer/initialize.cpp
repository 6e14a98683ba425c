#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/host/parallel.hpp"
#include "core/host/vectorised.hpp"
#include "core/numerics/normal.hpp"
#include "core/numerics/random.hpp"
#include "models/transformer/name_stream.hpp"
#include "models/transformer/transformer.hpp"

namespace tandem {
namespace {

/// Calls body(begin, end) for parts of [0, count): a core makes some hundred million values a second, of which a model
/// has billions.
template <class Body>
void in_parts(std::uint64_t count, Parallel* threads, const Body& body) {
  if (threads == nullptr) return body(std::uint64_t{0}, count);
  constexpr std::uint64_t part = 1 << 14;
  threads->run(static_cast<std::int64_t>((count + part - 1) / part), [&](std::int64_t i) {
    const std::uint64_t begin = static_cast<std::uint64_t>(i) * part;
    body(begin, std::min(begin + part, count));
  });
}

/// Blocks of the stream at once, in loops of their own that the compiler can vectorise.
constexpr std::uint64_t blocks_at_once = 256;

/// Two numbers of each block from `first` on.
void draw(std::uint64_t first, double deviation, std::uint64_t seed, std::uint64_t stream, float* pairs) {
  std::uint32_t words[4][blocks_at_once];
  for (std::uint64_t i = 0; i < blocks_at_once; ++i) {
    const numerics::Philox128 bits = numerics::philox_block(seed, stream, first + i);
    for (int w = 0; w < 4; ++w) words[w][i] = bits.word[w];
  }
  for (std::uint64_t i = 0; i < blocks_at_once; ++i) {
    const numerics::NormalPair pair = numerics::normal_pair({{words[0][i], words[1][i], words[2][i], words[3][i]}});
    pairs[2 * i] = static_cast<float>(deviation * pair.first);
    pairs[2 * i + 1] = static_cast<float>(deviation * pair.second);
  }
}

/// Elements 2 i and 2 i + 1 of the whole come from block i of the stream.
void fill_normal(std::uint64_t first, std::span<float> values, double deviation, std::uint64_t seed,
                 std::uint64_t stream) {
  float pairs[2 * blocks_at_once];
  const std::uint64_t end = first + values.size();
  for (std::uint64_t block = first / 2; 2 * block < end; block += blocks_at_once) {
    vectorised([=, to = pairs] { draw(block, deviation, seed, stream, to); });
    const std::uint64_t from = std::max(first, 2 * block), upto = std::min(end, 2 * (block + blocks_at_once));
    std::ranges::copy(std::span(pairs).subspan(from - 2 * block, upto - from), values.subspan(from - first).begin());
  }
}

/// Uniform in (-bound, bound]: element i from word i mod 4 of block i / 4.
void fill_uniform(std::uint64_t first, std::span<float> values, double bound, std::uint64_t seed,
                  std::uint64_t stream) {
  for (std::uint64_t i = first; i < first + values.size(); ++i) {
    const numerics::Philox128 bits = numerics::philox_block(seed, stream, i / 4);
    const double uniform = (static_cast<double>(bits.word[i % 4]) + 1.0) * 0x1p-32;
    values[i - first] = static_cast<float>(bound * (2.0 * uniform - 1.0));
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
  } else if (parameter.name.ends_with(lora_b)) {
    std::ranges::fill(values, 0.0F);
  } else if (parameter.name.ends_with(lora_a)) {
    // Kaiming-uniform with a = sqrt(5), as PEFT has it: the bound is one over the root of the inputs.
    const double bound = 1.0 / std::sqrt(static_cast<double>(parameter.shape[parameter.shape.rank() - 1]));
    fill_uniform(static_cast<std::uint64_t>(first), values, bound, seed, name_stream(parameter.full_name));
  } else {
    const double residual = 1.0 / std::sqrt(2.0 * static_cast<double>(config.layers));
    const double scale = is_residual_projection(parameter.name) ? residual : 1.0;
    const std::uint64_t stream = name_stream(parameter.full_name);
    in_parts(values.size(), threads, [&](std::uint64_t begin, std::uint64_t end) {
      fill_normal(static_cast<std::uint64_t>(first) + begin, values.subspan(begin, end - begin),
                  scale * config.initializer_range, seed, stream);
    });
  }
}

}  // namespace tandem
