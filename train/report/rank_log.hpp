#pragma once
// Log of one of several processes that train one model.
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

namespace spdlog::sinks {
class sink;
}

namespace tandem {

/// Takes down what the process says, also what it logs, which goes into a file once that is known.
class RankLog {
 public:
  /// Until `mute` what is logged goes to standard error as well, as without this object.
  RankLog();
  /// Gives the default logger its sinks back.
  ~RankLog();
  RankLog(const RankLog&) = delete;
  RankLog& operator=(const RankLog&) = delete;

  /// From then on what is logged goes into the file alone.
  void mute();
  /// Opens `folder`/rank-N.log to append to, with what has been said so far. Throws WriteError.
  void open(const std::filesystem::path& folder, int rank);
  /// A line of text. Any thread may call it.
  void line(std::string_view text);

 private:
  class File;
  std::vector<std::shared_ptr<spdlog::sinks::sink>> before_;
  std::shared_ptr<File> file_;
};

}  // namespace tandem
