#include "train/loop/shared_folder.hpp"

#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "io/atomic_file.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* word_name = ".seen";
/// Time after which a file system over a network shows what another machine has written.
constexpr std::chrono::seconds patience(10);

std::string new_word() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

bool is_seen(const fs::path& file, const std::string& word) {
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (true) {
    std::string found;
    std::ifstream(file) >> found;
    if (found == word) return true;
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

/// "rank 1 in '/other/out'": those ranks that name a folder here.
std::string text_of(const std::vector<std::string>& folders) {
  std::string text;
  for (std::size_t rank = 0; rank < folders.size(); ++rank) {
    if (folders[rank].empty()) continue;
    text += fmt::format("{}rank {} in '{}'", text.empty() ? "" : ", ", rank, folders[rank]);
  }
  return text;
}

}  // namespace

void share_folder(const fs::path& folder, Processes& processes) {
  const fs::path file = folder / word_name;
  const bool writes = processes.is_first();
  std::string word;
  if (writes) {
    word = new_word();
    create_directories_or_throw(folder);
    write_file_atomically(file, word);
  }
  word = processes.of_first("word in the folder of ranks", word);
  const std::string own = folder.parent_path().string();
  const std::string first = processes.of_first("folder of rank 0", own);
  const std::string blind = text_of(processes.gather("folders not seen", is_seen(file, word) ? "" : own));
  if (writes) {
    std::error_code ignored;
    fs::remove(file, ignored);
    if (!blind.empty()) fs::remove(folder, ignored);
  }
  if (blind.empty()) return;
  throw UsageError(
      "--out",
      fmt::format("it is not the same folder on all ranks: what rank 0 writes in '{}' is not seen by {}", first, blind),
      "name one on a file system that all machines share");
}

}  // namespace tandem
