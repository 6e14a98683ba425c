#include "data/token_files.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect(ExitCode::bad_input, [&] {
    static_cast<void>(data_files::parse_description(fuzz::text_of(data, size), "NAME.json"));
  });
}
