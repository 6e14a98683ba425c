#pragma once
// Advice in refusals, for tests that follow it.
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "core/memory/memory.hpp"

namespace tandem::testing {

/// The ceiling that a refusal asks for with `flag`, in bytes; 0 where it asks for none, which fails the test.
inline std::size_t advised_memory(const std::string& text, std::string_view flag) {
  using namespace literals;  // NOLINT: sizes
  const std::size_t at = text.find(flag);
  EXPECT_NE(at, std::string::npos) << text;
  return at == std::string::npos ? 0 : std::stoull(text.substr(at + flag.size())) * 1_MiB;
}

inline std::size_t advised_host_memory(const std::string& text) { return advised_memory(text, "--host-memory "); }

}  // namespace tandem::testing
