#include "tests/fuzz/fuzz.hpp"
#include "train/config/config.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  const fuzz::InputFile file(fuzz::text_of(data, size), ".toml");
  return fuzz::expect(ExitCode::usage, [&] {
    TrainConfig config;
    read_config_toml(file.path(), config);
    // An accepted configuration is written as a file that is accepted, and means the same.
    const std::string text = config_toml(config);
    const fuzz::InputFile written(text, ".written.toml");
    TrainConfig again;
    read_config_toml(written.path(), again);
    if (config_toml(again) != text) std::abort();
  });
}
