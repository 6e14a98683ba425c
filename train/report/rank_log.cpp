#include "train/report/rank_log.hpp"

#include <fmt/format.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <fstream>
#include <mutex>
#include <string>

#include "core/base/error.hpp"

namespace tandem {

/// A full disk loses lines here, and ends the run where it writes what counts.
class RankLog::File final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  void open(const std::filesystem::path& name) {
    const std::lock_guard lock(mutex_);
    file_.open(name, std::ios::app);
    if (!file_)
      throw WriteError(fmt::format("cannot write {}", name.string()), "", "let all ranks write the run's folder");
    file_ << said_ << std::flush;
    said_.clear();
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t text;
    formatter_->format(message, text);
    if (file_.is_open()) {
      file_.write(text.data(), static_cast<std::streamsize>(text.size())).flush();
    } else {
      said_.append(text.data(), text.size());
    }
  }
  void flush_() override {}

  std::string said_;  ///< before there was a file
  std::ofstream file_;
};

RankLog::RankLog() : file_(std::make_shared<File>()) {
  file_->set_pattern("%Y-%m-%d %H:%M:%S.%e %l: %v");
  auto& sinks = spdlog::default_logger()->sinks();
  before_ = sinks;
  sinks.push_back(file_);
}

RankLog::~RankLog() { spdlog::default_logger()->sinks() = before_; }

void RankLog::mute() { spdlog::default_logger()->sinks() = {file_}; }

void RankLog::open(const std::filesystem::path& folder, int rank) {
  file_->open(folder / fmt::format("rank-{}.log", rank));
}

void RankLog::line(std::string_view text) { file_->log({"", spdlog::level::info, {text.data(), text.size()}}); }

}  // namespace tandem
