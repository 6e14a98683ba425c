// The digest of a state is the hash that is documented.
#include "core/params/state_digest.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <string_view>
#include <vector>

#include "core/base/error.hpp"

namespace tandem {
namespace {

/// `first`, `first + step`, ..., and from the thousandth on again: exact in fp32.
std::vector<float> values(std::int64_t count, float first, float step) {
  std::vector<float> result(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = first + step * static_cast<float>(i % 1000);
  return result;
}

void add(StateDigest& digest, std::string_view name, const std::vector<std::vector<float>>& arrays) {
  digest.begin_parameter(name);
  for (const auto& array : arrays) {
    digest.add(array.data(), static_cast<std::int64_t>(array.size()));
    digest.end_array();
  }
  digest.end_parameter();
}

// The expected text comes from the Python of docs/state-digest.md and the `xxhash` package:
//   def values(n, first, step): return numpy.array([first + step * (i % 1000) for i in range(n)], "<f4")
//   n = BLOCK + 3
//   state_digest([("wte.weight", values(n, 0.5, 0.25), values(n, -1, 0.5), values(n, 0, 2)),
//                 ("h.0.ln_1.bias", values(5, 1, 1), values(5, 2, 1), values(5, 3, 1))])
TEST(StateDigest, IsWhatItsDescriptionSays) {
  StateDigest digest;
  EXPECT_EQ(digest.text(), "99aa06d3014798d86001c324468d497f") << "of nothing";
  const std::int64_t n = state_digest_block + 3;
  add(digest, "wte.weight", {values(n, 0.5F, 0.25F), values(n, -1.0F, 0.5F), values(n, 0.0F, 2.0F)});
  add(digest, "h.0.ln_1.bias", {values(5, 1.0F, 1.0F), values(5, 2.0F, 1.0F), values(5, 3.0F, 1.0F)});
  EXPECT_EQ(digest.text(), "015fa7efc875666d063569635b3129d4");
}

TEST(StateDigest, TakesTheHashOfAParameterInItsPlace) {
  StateDigest whole, apart, of_frozen;
  add(whole, "a", {values(7, 0.5F, 0.25F), values(7, 0.0F, 0.0F), values(7, 0.0F, 0.0F)});
  const std::string hash = whole.parameter_hash();
  add(whole, "b", {values(5, 1.0F, 1.0F), values(5, 2.0F, 1.0F), values(5, 3.0F, 1.0F)});
  apart.add_parameter("a", hash);
  EXPECT_EQ(apart.parameter_hash(), hash);
  add(apart, "b", {values(5, 1.0F, 1.0F), values(5, 2.0F, 1.0F), values(5, 3.0F, 1.0F)});
  EXPECT_EQ(apart.text(), whole.text());
  EXPECT_THROW(of_frozen.add_parameter("a", "12"), MisuseError);
  EXPECT_THROW(of_frozen.add_parameter("a", std::string(32, 'g')), MisuseError);
}

}  // namespace
}  // namespace tandem
