// Scores that attention makes over the windows of token files, and those that tokens see, for one head without a
// window.
//
// bench_packing LENGTH FILE...: prints one JSON object for the files together, in windows of LENGTH tokens.
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "core/base/error.hpp"
#include "cpu_ops/kernels/kernels.hpp"
#include "data/window_sampler.hpp"

namespace tandem {
namespace {

struct Pairs {
  std::int64_t made = 0, seen = 0, targets = 0;
};

Pairs pairs_of(const TokenSource& source, std::int64_t length) {
  const auto room = static_cast<std::size_t>(length);
  std::vector<std::int32_t> inputs(room), targets(room), first(room), end(room);
  Pairs pairs;
  const std::int64_t windows = require_windows(source, length);
  for (std::int64_t window = 0; window < windows; ++window) {
    pairs.targets += read_window(source, window, {inputs, targets, first, end});
    pairs.made += fast::attention_scores({1, length, 1, 1, 1, 1.0F, 0, {first.data(), end.data()}});
    for (std::int64_t t = 0; t < length; ++t) pairs.seen += t + 1 - first[static_cast<std::size_t>(t)];
  }
  return pairs;
}

int run(int argc, char** argv) {
  if (argc < 3) throw UsageError("bench_packing", "needs a length and files", "bench_packing 1024 packed.bin");
  const std::int64_t length = std::strtoll(argv[1], nullptr, 10);
  const TokenSource source(std::vector<std::filesystem::path>(argv + 2, argv + argc),
                           {.vocabulary = std::int64_t{1} << 31, .token_width = {}});
  const Pairs pairs = pairs_of(source, length);
  fmt::print("{{\"made\": {}, \"seen\": {}, \"targets\": {}, \"windows\": {}}}\n", pairs.made, pairs.seen,
             pairs.targets, require_windows(source, length));
  return 0;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  try {
    return tandem::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_packing: %s\n", error.what());
    return 1;
  }
}
