#include "io/safetensors.hpp"
#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  const fuzz::InputFile file(fuzz::text_of(data, size), ".safetensors");
  return fuzz::expect(ExitCode::bad_input, [&] {
    const SafetensorsReader reader(file.path());
    for (const auto& [name, tensor] : reader.tensors()) {
      std::vector<float> values(static_cast<std::size_t>(std::min<std::int64_t>(tensor.count, 1024)));
      widen(tensor, tensor.count - static_cast<std::int64_t>(values.size()), values);  // touches the last byte
    }
  });
}
