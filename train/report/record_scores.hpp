#pragma once
// Log-probabilities of the records of a token file under a model, as a file: what `tandem score` writes, and the
// reference of DPO.
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tandem {

struct RecordScores {
  std::vector<float> log_probabilities;  ///< sums over each record's targets, in the order of records
  std::string weights;                   ///< weights_digest() of the model
  std::string data;                      ///< TokenSource::digest() of the records
  std::string computed;                  ///< RunSetup::computing() of the passes
};

/// File of the reference of a run's training data, in its folder.
constexpr const char* reference_file = "reference.safetensors";
/// Name of the scores of a token file: NAME.scores.safetensors beside NAME.bin.
std::filesystem::path scores_path(const std::filesystem::path& bin);

/// Whether there are scores beside the data of a run, which one file holds.
bool has_scores(const std::vector<std::string>& data);

/// Writes a safetensors file with the tensor `log_probabilities` (R) f32, and the digests and how it was computed as metadata. The file
/// appears whole or not at all. Throws WriteError.
void write_scores(const std::filesystem::path& file, const RecordScores& scores);

/// Reads such a file; empty where there is none. Throws InputError where it is no such file.
std::optional<RecordScores> read_scores(const std::filesystem::path& file);

}  // namespace tandem
