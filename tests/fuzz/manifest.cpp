#include "io/manifest.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect(ExitCode::bad_input, [&] {
    const Manifest manifest = parse_manifest(fuzz::text_of(data, size), "checkpoint");
    // An accepted manifest survives being written.
    if (manifest_text(parse_manifest(manifest_text(manifest), "checkpoint")) != manifest_text(manifest)) std::abort();
  });
}
