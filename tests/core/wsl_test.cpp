// Detection of Linux under Windows.
#include "core/host/wsl.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace tandem {
namespace {

TEST(RunsUnderWindows, WhereItsGraphicsAre) {
  const std::filesystem::path root = std::filesystem::path(::testing::TempDir()) / "tandem_wsl";
  std::filesystem::remove_all(root);
  EXPECT_FALSE(runs_under_windows(root)) << "nothing is there";
  std::filesystem::create_directories(root / "dev");
  EXPECT_FALSE(runs_under_windows(root));
  std::ofstream(root / "dev" / "dxg").close();
  EXPECT_TRUE(runs_under_windows(root));
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace tandem
