#include "io/shard_index.hpp"

#include "tests/fuzz/fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect(ExitCode::bad_input, [&] {
    for (const std::string& name : shards_of_index(fuzz::text_of(data, size), "index.json")) {
      if ((std::filesystem::path("model") / name).lexically_normal().parent_path() != "model") std::abort();
    }
  });
}
