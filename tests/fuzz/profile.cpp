#include "scheduler/profile.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect<Error>([&] { static_cast<void>(parse_profile(fuzz::text_of(data, size), "profile.toml")); });
}
