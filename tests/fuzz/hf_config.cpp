#include "models/hf/hf_config.hpp"
#include "models/config/config.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect(ExitCode::usage, [&] {
    const ModelConfig config = parse_hf_config(fuzz::text_of(data, size), "config.json");
    config.validate();
    // An accepted model is written as a config.json that is accepted, and means the same.
    const std::string text = hf_config_text(config, "float32");
    if (hf_config_text(parse_hf_config(text, "config.json"), "float32") != text) std::abort();
  });
}
