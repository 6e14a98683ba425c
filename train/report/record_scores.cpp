#include "train/report/record_scores.hpp"

#include <fmt/format.h>

#include <system_error>

#include "core/base/error.hpp"
#include "io/atomic_file.hpp"
#include "io/safetensors.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char* tensor_name = "log_probabilities";
constexpr const char* weights_key = "weights";
constexpr const char* data_key = "data";
constexpr const char* computed_key = "computed";

}  // namespace

fs::path scores_path(const fs::path& bin) { return fs::path(bin).replace_extension(".scores.safetensors"); }

bool has_scores(const std::vector<std::string>& data) {
  std::error_code hidden;
  return data.size() == 1 && fs::exists(scores_path(data.front()), hidden);
}

void write_scores(const fs::path& file, const RecordScores& scores) {
  const fs::path beside = file.string() + ".tmp";
  Unfinished unfinished(beside);
  const auto count = static_cast<std::int64_t>(scores.log_probabilities.size());
  SafetensorsWriter writer(beside, {{tensor_name, "F32", {count}}},
                           {{weights_key, scores.weights}, {data_key, scores.data}, {computed_key, scores.computed}});
  writer.write(scores.log_probabilities.data(), scores.log_probabilities.size() * sizeof(float));
  writer.finish();
  rename_or_throw(beside, file);
  unfinished.keep();
  sync_directory(file.has_parent_path() ? file.parent_path() : fs::path("."));
}

std::optional<RecordScores> read_scores(const fs::path& file) {
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return std::nullopt;
  const SafetensorsReader reader(file);
  const StoredTensor* const tensor = reader.find(tensor_name);
  const auto& facts = reader.metadata();
  if (tensor == nullptr || tensor->dtype != "F32" || tensor->shape.size() != 1 || !facts.contains(weights_key) ||
      !facts.contains(data_key)) {
    throw InputError(fmt::format("scores {}", file.string()), "it is not what tandem score writes",
                     "remove it, or write it again with tandem score");
  }
  RecordScores scores{.log_probabilities = std::vector<float>(static_cast<std::size_t>(tensor->count)),
                      .weights = facts.at(weights_key),
                      .data = facts.at(data_key),
                      .computed = facts.contains(computed_key) ? facts.at(computed_key) : ""};
  widen(*tensor, 0, scores.log_probabilities);
  return scores;
}

}  // namespace tandem
