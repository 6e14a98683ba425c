// Losing data on purpose: every call to the system fails once, in every way it can, and the checkpoint that was
// there before must still be, or the new one in its place.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <map>
#include <vector>

#include "core/error.hpp"
#include "io/checkpoint.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

enum class Fault {
  fails,     // one call fails, the next ones work
  shortens,  // a write takes half of the bytes and the next call fails
  crashes    // this call and all later ones do nothing: the process is dead, and what was not flushed is lost
};

/// The system's calls, but nothing waits for a disk: what a power cut would lose is known here without one.
class QuickFiles : public FileOps {
 public:
  void start_flush(int) noexcept override {}
  int flush(int) override { return 0; }
  int flush_directory(const fs::path&) override { return 0; }
};

/// Passes calls on and counts them; misbehaves at call number `at`.
class FaultyFiles final : public QuickFiles {
 public:
  FaultyFiles(Fault fault, int at) : fault_(fault), at_(at) {}
  int calls() const noexcept { return calls_; }
  bool struck() const noexcept { return calls_ > at_; }

  int create(const fs::path& file, int& fd) override {
    if (strikes()) return ENOSPC;
    const int error = FileOps::create(file, fd);
    if (error == 0) open_[fd] = {file, 0};
    return error;
  }
  int write(int fd, const void* data, std::size_t bytes, std::size_t& written) override {
    const bool strike = strikes();
    if (strike && fault_ == Fault::shortens && bytes > 1) {
      fault_next_ = true;
      return FileOps::write(fd, data, bytes / 2, written);
    }
    return strike ? ENOSPC : FileOps::write(fd, data, bytes, written);
  }
  int flush(int fd) override {
    if (strikes()) return EIO;
    open_[fd].flushed = fs::file_size(open_[fd].path);
    return 0;
  }
  int close(int fd) override {
    const bool strike = strikes();
    FileOps::close(fd);  // also where it fails, the descriptor is gone
    closed_.push_back(open_[fd]);
    open_.erase(fd);
    return strike ? EIO : 0;
  }
  int rename(const fs::path& from, const fs::path& to) override {
    if (strikes()) return EROFS;
    moved_.push_back({from, to});
    return FileOps::rename(from, to);
  }
  int flush_directory(const fs::path&) override { return strikes() ? EIO : 0; }
  int make_directories(const fs::path& directory) override {
    return strikes() ? EROFS : FileOps::make_directories(directory);
  }
  int remove_all(const fs::path& path) override { return strikes() ? EROFS : FileOps::remove_all(path); }

  /// What a power cut does: bytes that were written and not flushed are gone.
  void lose_unflushed() {
    for (const auto& [fd, file] : open_) {
      FileOps::close(fd);
      cut(file);
    }
    for (const auto& file : closed_) cut(file);
  }

 private:
  struct File {
    fs::path path;
    std::uintmax_t flushed = 0;
  };
  bool strikes() {
    const int call = calls_++;
    if (std::exchange(fault_next_, false)) return true;
    return call == at_ || (fault_ == Fault::crashes && call > at_);
  }
  void cut(const File& file) {
    fs::path now = file.path;
    for (const auto& [from, to] : moved_) {
      if (now == from)
        now = to;
      else if (now.parent_path() == from)
        now = to / now.filename();
    }
    std::error_code ignored;
    if (fs::exists(now, ignored) && fs::file_size(now, ignored) > file.flushed) fs::resize_file(now, file.flushed);
  }
  Fault fault_;
  int at_;
  int calls_ = 0;
  bool fault_next_ = false;
  std::map<int, File> open_;
  std::vector<File> closed_;
  std::vector<std::pair<fs::path, fs::path>> moved_;
};

class Faults : public testing::TestWithParam<Fault> {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / ("tandem_faults_" + std::to_string(::getpid()));
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  /// A state of a few values that names its writer.
  static std::string write(const fs::path& root, std::int64_t step, float mark, FileOps& ops) {
    Manifest m;
    m.model_config = "{}";
    m.step = step;
    m.parameters = {{"a", {3, 5}, true}, {"frozen", {7}, false}, {"b", {300}, true}};
    std::vector<float> buffer(300, mark);
    const StateReader read = [&](std::size_t index, StatePart, std::int64_t, std::span<float> values) {
      std::fill(values.begin(), values.end(), mark + static_cast<float>(index));
      return std::span<const float>(values);
    };
    write_checkpoint(root, {.manifest = &m, .read = read, .buffer = buffer}, ops);
    return m.state_digest;
  }
  static std::string newest(const fs::path& root) {
    const auto found = newest_checkpoint(root, [](const fs::path&, const std::string&) {});
    return found ? found->state_digest() : "none";
  }

  /// Saves `step` over a root that holds step 5 with every call failing once; returns the number of calls.
  int exhaust(std::int64_t step) {
    const std::string old = write(root_ / "old", 5, 1.0F, quick_);
    const std::string fresh = write(root_ / "new", step, 2.0F, quick_);
    int faults = 0;
    for (int at = 0;; ++at) {
      SCOPED_TRACE(testing::Message() << "call " << at);
      const fs::path place = root_ / "place";
      fs::remove_all(place);
      write(place, 5, 1.0F, quick_);
      FaultyFiles files(GetParam(), at);
      bool failed = false;
      try {
        write(place, step, 2.0F, files);
        prune_checkpoints(place, {.keep = 1, .written = place / checkpoint_name(step)}, files);
      } catch (const WriteError& error) {
        failed = true;
        EXPECT_THAT(error.what(), testing::HasSubstr(place.string()));
        EXPECT_THAT(error.what(), testing::AnyOf(testing::HasSubstr("No space"), testing::HasSubstr("Input/output"),
                                                 testing::HasSubstr("Read-only")));
      }
      if (!files.struck()) return faults;
      ++faults;
      if (GetParam() == Fault::crashes) files.lose_unflushed();
      const std::string now = newest(place);
      EXPECT_THAT(now, testing::AnyOf(old, fresh));
      if (!failed) {
        EXPECT_EQ(now, fresh) << "told to be saved, and is not";
      }
      // Whatever was left behind, the next save works, and clears it.
      EXPECT_EQ(write(place, step, 2.0F, quick_), fresh);
      prune_checkpoints(place, {.keep = 1, .written = place / checkpoint_name(step)}, quick_);
      EXPECT_EQ(newest(place), fresh);
      EXPECT_EQ(std::distance(fs::directory_iterator(place), fs::directory_iterator()), 1);
    }
  }
  QuickFiles quick_;
  fs::path root_;
};

TEST_P(Faults, ANewerCheckpointNeverCostsTheOldOne) { EXPECT_GT(exhaust(6), 15); }

TEST_P(Faults, ReplacingTheCheckpointOfAStepNeverCostsIt) { EXPECT_GT(exhaust(5), 15); }

TEST_P(Faults, AFileIsTheOldOneOrTheNewOne) {
  fs::create_directories(root_);
  const fs::path file = root_ / "file";
  for (int at = 0;; ++at) {
    write_file_atomically(file, "old", quick_);
    FaultyFiles files(GetParam(), at);
    try {
      write_file_atomically(file, "new text", files);
    } catch (const WriteError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(root_.string()));
    }
    if (!files.struck()) break;
    if (GetParam() == Fault::crashes) files.lose_unflushed();
    const MappedFile mapped(file);
    const std::string text(reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size());
    EXPECT_THAT(text, testing::AnyOf("old", "new text")) << at;
  }
}

std::string name_of(const testing::TestParamInfo<Fault>& info) {
  constexpr std::array names{"fails", "shortens", "crashes"};
  return names[static_cast<std::size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(All, Faults, testing::Values(Fault::fails, Fault::shortens, Fault::crashes), name_of);

}  // namespace
}  // namespace tandem
