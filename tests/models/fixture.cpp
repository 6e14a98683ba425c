#include "tests/models/fixture.hpp"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/numerics/bf16.hpp"
#include "models/hf/hf_config.hpp"

namespace tandem::testing {
namespace {

std::vector<char> read_all(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + file.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<float> transposed_of(const std::vector<float>& x, std::size_t rows, std::size_t columns) {
  std::vector<float> y(x.size());
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < columns; ++j) y[j * rows + i] = x[i * columns + j];
  }
  return y;
}

}  // namespace

std::vector<float> FixtureTensor::floats(bool transposed) const {
  std::vector<float> values;
  if (dtype == "BF16") {
    for (const bf16 x : as<bf16>()) values.push_back(numerics::bf16_to_float(x));
  } else if (dtype == "F32") {
    values = as<float>();
  } else {
    throw std::runtime_error("tensor of type " + dtype + " read as floats");
  }
  if (!transposed) return values;
  return transposed_of(values, static_cast<std::size_t>(shape.at(0)), static_cast<std::size_t>(shape.at(1)));
}

std::vector<std::string> preference_fixture_names() { return {"preferences/llama3", "preferences/qwen2"}; }

std::vector<std::string> expert_fixture_names() { return {"mixtral", "qwen3_moe", "olmoe"}; }

std::vector<std::string> llama_fixture_names() {
  std::vector<std::string> names = {"llama3", "qwen2", "qwen3",   "mistral", "phi3",  "smollm3",
                                    "olmo2",  "olmo3", "granite", "gemma",   "gemma3"};
  for (std::string& name : expert_fixture_names()) names.push_back(std::move(name));
  return names;
}

std::vector<std::string> fixture_names() {
  std::vector<std::string> names = llama_fixture_names();
  names.insert(names.begin(), "gpt2");
  return names;
}

Fixture::Fixture(const std::string& name) {
  const std::filesystem::path folder = std::filesystem::path(TANDEM_SOURCE_DIR) / "tests" / "models" / "fixtures";
  const std::vector<char> file = read_all(folder / (name + ".safetensors"));
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const char* data = file.data() + sizeof header_bytes + header_bytes;
  const auto header = nlohmann::json::parse(file.data() + sizeof header_bytes, data);
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") continue;
    const auto* begin = reinterpret_cast<const std::byte*>(data + entry.at("data_offsets").at(0).get<std::size_t>());
    const auto* end = reinterpret_cast<const std::byte*>(data + entry.at("data_offsets").at(1).get<std::size_t>());
    tensors_[key] = {entry.at("dtype"), entry.at("shape"), {begin, end}};
  }
  const auto& metadata = header.at("__metadata__");
  metadata_ = metadata.get<std::map<std::string, std::string>>();
  gradient_scale_ = std::stof(metadata.at("gradient_scale").get<std::string>());
  if (metadata.contains("beta")) beta_ = std::stof(metadata.at("beta").get<std::string>());
  if (metadata.contains("optimizer")) {
    const auto o = nlohmann::json::parse(metadata.at("optimizer").get<std::string>());
    optimizer_ = {o.at("lr"), o.at("beta1"), o.at("beta2"), o.at("eps"), o.at("weight_decay"), o.at("clip")};
  }
  const TemporaryFolder temporary;
  config_ = read_hf_config(temporary.write("config.json", metadata.at("config").get<std::string>())).config;
  config_.name = name;
}

std::size_t Fixture::gradient_count() const {
  std::size_t count = 0;
  for (const auto& [name, tensor] : tensors_) count += name.starts_with("grad.") ? 1 : 0;
  return count;
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "tandem-models-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::filesystem::path TemporaryFolder::write(const std::string& name, const std::string& text) const {
  std::ofstream(path_ / name, std::ios::binary) << text;
  return path_ / name;
}

}  // namespace tandem::testing
