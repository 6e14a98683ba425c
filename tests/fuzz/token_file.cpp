#include "data/token_source.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  const fuzz::InputFile file(fuzz::text_of(data, size), ".bin");
  return fuzz::expect(ExitCode::bad_input, [&] {
    const TokenSource source({file.path()}, {50257, {}});
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(source.size()));
    source.read_targets(0, tokens);
  });
}
