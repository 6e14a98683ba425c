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

#include "core/base/error.hpp"
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
  FaultyFiles(Fault fault, int at) : fault_(fault), at_(at), kept_(::testing::TempDir()) {
    kept_ /= "tandem_lost_" + std::to_string(::getpid());
    fs::remove_all(kept_);
    fs::create_directories(kept_);
  }
  ~FaultyFiles() override { fs::remove_all(kept_); }
  FaultyFiles(const FaultyFiles&) = delete;
  FaultyFiles& operator=(const FaultyFiles&) = delete;
  int calls() const noexcept { return calls_; }
  bool struck() const noexcept { return calls_ > at_; }

  int create(const fs::path& file, int& fd) override {
    if (strikes()) return ENOSPC;
    const bool is_new = !fs::exists(file);
    const int error = FileOps::create(file, fd);
    if (error != 0) return error;
    open_[fd] = {file, changes_.size(), 0};
    if (is_new) changes_.push_back({file});
    return 0;
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
    open_[fd].flushed = fs::file_size(now(open_[fd].path, open_[fd].changes_before));
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
    keep(to);  // the file that is replaced
    const int error = FileOps::rename(from, to);
    if (error == 0) changes_.push_back({to, from});
    return error;
  }
  int flush_directory(const fs::path& directory) override {
    if (strikes()) return EIO;
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      if (now(changes_[i].made.parent_path(), i + 1) == directory) changes_[i].lasts = true;
    }
    return 0;
  }
  int make_directories(const fs::path& directory) override {
    if (strikes()) return EROFS;
    std::vector<Change> made;
    for (fs::path missing = directory; !missing.empty() && !fs::exists(missing); missing = missing.parent_path()) {
      made.insert(made.begin(), {missing});
    }
    changes_.insert(changes_.end(), made.begin(), made.end());
    return FileOps::make_directories(directory);  // flushes what each of them lies in
  }
  int remove_all(const fs::path& path) override {
    if (strikes()) return EROFS;
    keep(path);
    return 0;
  }

  /// Effect of a power cut: bytes that were written and not flushed are gone, and every name is where it was before the
  /// changes to its folder that were not flushed.
  void lose_unflushed() {
    for (const auto& [fd, file] : open_) {
      FileOps::close(fd);
      cut(file);
    }
    for (const auto& file : closed_) cut(file);
    for (std::size_t i = changes_.size(); i-- > 0;) {
      if (!changes_[i].lasts) undo(i);
    }
  }

 private:
  struct File {
    fs::path path;
    std::size_t changes_before = 0;
    std::uintmax_t flushed = 0;
  };
  /// A name that came to be, by renaming or anew, or one that went.
  struct Change {
    fs::path made{};
    fs::path from{};
    bool removal = false;
    bool lasts = false;
  };

  bool strikes() {
    const int call = calls_++;
    if (std::exchange(fault_next_, false)) return true;
    return call == at_ || (fault_ == Fault::crashes && call > at_);
  }
  /// Takes a file or folder out of the way as if it were removed, to be put back.
  void keep(const fs::path& path) {
    if (!fs::exists(path)) return;
    const fs::path aside = kept_ / std::to_string(changes_.size());
    fs::rename(path, aside);
    changes_.push_back({path, aside, true});
  }
  /// Present path of what had this path after the first `changes` changes.
  fs::path now(fs::path path, std::size_t changes) const {
    for (std::size_t i = changes; i < changes_.size(); ++i) {
      const Change& change = changes_[i];
      const fs::path& from = change.removal ? change.made : change.from;
      const fs::path& to = change.removal ? change.from : change.made;
      const auto [end, rest] = std::mismatch(from.begin(), from.end(), path.begin(), path.end());
      if (from.empty() || end != from.end()) continue;
      fs::path moved = to;
      for (auto part = rest; part != path.end(); ++part) moved /= *part;
      path = moved;
    }
    return path;
  }
  void cut(const File& file) {
    const fs::path path = now(file.path, file.changes_before);
    if (fs::exists(path) && fs::file_size(path) > file.flushed) fs::resize_file(path, file.flushed);
  }
  /// All later changes that were not flushed are undone already, and out of the list.
  void undo(std::size_t i) {
    const Change change = changes_[i];
    const fs::path place = now(change.made.parent_path(), i + 1) / change.made.filename();
    changes_.erase(changes_.begin() + static_cast<std::ptrdiff_t>(i));
    if (change.removal)
      fs::rename(change.from, place);
    else if (change.from.empty())
      fs::remove_all(now(change.made, i));
    else
      fs::rename(now(change.made, i), now(change.from, i));
  }
  Fault fault_;
  int at_;
  fs::path kept_;
  int calls_ = 0;
  bool fault_next_ = false;
  std::map<int, File> open_;
  std::vector<File> closed_;
  std::vector<Change> changes_;
};

class Faults : public ::testing::TestWithParam<Fault> {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) / ("tandem_faults_" + std::to_string(::getpid()));
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
    const StateReader read = [&](std::size_t index, StateArray, std::int64_t, std::span<float> values) {
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
      SCOPED_TRACE(::testing::Message() << "call " << at);
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
        EXPECT_THAT(error.what(), ::testing::HasSubstr(place.string()));
        EXPECT_THAT(error.what(),
                    ::testing::AnyOf(::testing::HasSubstr("No space"), ::testing::HasSubstr("Input/output"),
                                     ::testing::HasSubstr("Read-only")));
      }
      if (GetParam() == Fault::crashes) files.lose_unflushed();
      if (!files.struck()) {
        EXPECT_EQ(newest(place), fresh) << "saved, and lost afterwards";
        return faults;
      }
      ++faults;
      const std::string now = newest(place);
      EXPECT_THAT(now, ::testing::AnyOf(old, fresh));
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
    bool failed = false;
    try {
      write_file_atomically(file, "new text", files);
    } catch (const WriteError& error) {
      failed = true;
      EXPECT_THAT(error.what(), ::testing::HasSubstr(root_.string()));
    }
    if (GetParam() == Fault::crashes) files.lose_unflushed();
    const MappedFile mapped(file);
    const std::string text(reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size());
    EXPECT_THAT(text, ::testing::AnyOf("old", "new text")) << at;
    if (!failed) {
      EXPECT_EQ(text, "new text") << at;
    }
    if (!files.struck()) break;
  }
}

std::string name_of(const ::testing::TestParamInfo<Fault>& info) {
  constexpr std::array names{"fails", "shortens", "crashes"};
  return names[static_cast<std::size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(All, Faults, ::testing::Values(Fault::fails, Fault::shortens, Fault::crashes), name_of);

}  // namespace
}  // namespace tandem
