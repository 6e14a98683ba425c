// Folders in which libraries that are not part of the program are looked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gpu_ops/device/shared_library.hpp"

namespace tandem::gpu {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;

class SearchFolders : public ::testing::Test {
 protected:
  SearchFolders() : root_(fs::canonical(fs::temp_directory_path()) / ("tandem-search-" + std::to_string(::getpid()))) {
    for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX", "TANDEM_CUDA_LIBS"}) ::unsetenv(name);
    ::setenv("HOME", (root_ / "home").c_str(), 1);
    ::setenv("PATH", (root_ / "nowhere").c_str(), 1);
  }
  ~SearchFolders() override { fs::remove_all(root_); }

  /// A Python with packages below root_/NAME, and the folder where their libraries lie.
  std::string python(const std::string& name, const std::string& package) {
    const fs::path libraries = root_ / name / "lib/python3.12/site-packages/nvidia" / package / "lib";
    fs::create_directories(libraries);
    fs::create_directories(root_ / name / "bin");
    return libraries.string();
  }
  /// Folders found below root_: the contents of this machine's /usr are none of the test's concern.
  std::vector<std::string> found() const {
    std::vector<std::string> folders = search_folders();
    std::erase_if(folders, [&](const std::string& folder) { return !folder.starts_with(root_.string()); });
    return folders;
  }
  const fs::path root_;
};

TEST_F(SearchFolders, ArePythonsPackagesAndThenThoseGiven) {
  const std::string of_environment = python("venv", "cublas");
  const std::string of_user = python("home/.local", "cudnn");
  ::setenv("VIRTUAL_ENV", (root_ / "venv").c_str(), 1);
  const std::string given = (root_ / "given").string();
  ::setenv("TANDEM_CUDA_LIBS", (given + "::" + given).c_str(), 1);
  EXPECT_THAT(found(), ElementsAre(of_environment, of_user, given, given));
}

TEST_F(SearchFolders, AreThoseAmongWhichAPythonPackageLies) {
  const std::string beside = python("venv", "cublas");
  const fs::path packages = root_ / "venv/lib/python3.12/site-packages";
  EXPECT_THAT(folders_beside((packages / "tandem/bin/tandem").string()), ElementsAre(beside));
  EXPECT_THAT(folders_beside((packages / "tandem/_core.abi3.so").string()), ElementsAre(beside));
  EXPECT_THAT(folders_beside((root_ / "venv/bin/tandem").string()), ElementsAre());
  EXPECT_THAT(folders_beside(""), ElementsAre());
}

TEST_F(SearchFolders, AreThoseOfThePythonOnThePathThoughItsEnvironmentIsNotActive) {
  const std::string of_environment = python("venv", "cublas");
  static_cast<void>(python("other", "cublas"));
  std::ofstream(root_ / "system-python3") << "an interpreter";
  // An environment's interpreter is a link to the system's.
  fs::create_symlink(root_ / "system-python3", root_ / "venv/bin/python3");
  fs::create_symlink(root_ / "system-python3", root_ / "other/bin/python3");
  ::setenv("PATH", (":/nowhere:" + (root_ / "venv/bin").string() + ":" + (root_ / "other/bin").string()).c_str(), 1);
  EXPECT_THAT(found(), ElementsAre(of_environment));
}

TEST_F(SearchFolders, AreThoseOfEveryInterpreterThatThePythonOnThePathIsALinkTo) {
  const std::string of_environment = python("venv", "cublas"), of_base = python("base", "cudnn");
  std::ofstream(root_ / "base/bin/python3.12") << "an interpreter";
  fs::create_symlink(root_ / "base/bin/python3.12", root_ / "venv/bin/python3.12");
  fs::create_symlink("python3.12", root_ / "venv/bin/python3");
  fs::create_directories(root_ / "a/bin");
  fs::create_symlink("../../venv/bin/python3", root_ / "a/bin/python3");
  ::setenv("PATH", (root_ / "a/bin").c_str(), 1);
  EXPECT_THAT(found(), ElementsAre(of_environment, of_base));
}

TEST_F(SearchFolders, AreFoundThroughAFolderThatIsALink) {
  const std::string of_environment = python("venv", "cublas");
  std::ofstream(root_ / "venv/bin/python3") << "an interpreter";
  fs::create_directories(root_ / "deep/er");
  fs::create_directory_symlink(root_ / "venv/bin", root_ / "deep/er/tools");
  ::setenv("PATH", (root_ / "deep/er/tools").c_str(), 1);
  EXPECT_THAT(found(), ElementsAre(of_environment));
}

}  // namespace
}  // namespace tandem::gpu
