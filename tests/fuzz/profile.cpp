#include "scheduler/machine/profile.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect(ExitCode::usage, [&] {
    const std::string text = profile_toml(parse_profile(fuzz::text_of(data, size), "profile.toml"));
    // An accepted profile is written as a profile that is accepted, and means the same.
    if (profile_toml(parse_profile(text, "profile.toml")) != text) std::abort();
  });
}
