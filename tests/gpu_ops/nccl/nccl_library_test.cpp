// NCCL is looked for when it is needed: what is missing, too old or different says so, with what to do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "comm/nccl/nccl_library.hpp"
#include "comm/nccl/nccl_network.hpp"
#include "comm/nccl/nccl_transport.hpp"
#include "core/base/error.hpp"
#include "tests/comm/processes/ranks_in_processes.hpp"
#include "tests/gpu_ops/device/fake_device.hpp"
#include "tests/gpu_ops/nccl/nccl_testing.hpp"

namespace tandem {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using testing::fake_nccl;
using ::testing::HasSubstr;

/// Python's own packages are not looked for, but those of the system are.
void look_in(const char* folder) {
  for (const char* name : {"VIRTUAL_ENV", "CONDA_PREFIX"}) ::unsetenv(name);
  ::setenv("HOME", "/nonexistent", 1);
  ::setenv("PATH", "/nonexistent", 1);
  ::setenv("TANDEM_CUDA_LIBS", folder, 1);
}

/// Each of two ranks in a process connects by NCCL, with `environment` made first.
std::vector<std::string> told_to_ranks(const std::function<void(int rank)>& environment) {
  testing::RanksInProcesses ranks(2, {},
                                  [&](std::unique_ptr<Rendezvous> rendezvous, const std::function<void()>& started) {
                                    started();
                                    environment(rendezvous->rank().index);
                                    fake_cuda::install({});
                                    const auto device = testing::open_fake_device({.capacity = std::size_t{8} << 20});
                                    make_nccl_transport(*rendezvous, *device, 20.0);
                                  });
  return {ranks.told(0), ranks.told(1)};
}

/// Whether ranks have found another NCCL than the fake, which wants a GPU.
bool found_another(const std::vector<std::string>& told) {
  return std::ranges::any_of(told, [](const std::string& each) {
    return each.empty() || each.find("connecting by NCCL") != each.npos || each.find("different versions") != each.npos;
  });
}

/// Libraries that are loaded are found whatever the environment says: CTest runs each suite in a process of its own.
class NcclLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD) != nullptr) GTEST_SKIP() << "loaded by another suite";
  }
};

TEST_F(NcclLibrary, ThatIsMissingIsNamedWithWhereItWasLookedFor) {
  const auto told = told_to_ranks([](int rank) {
    look_in("/nowhere");
    if (rank == 0) fake_nccl();
  });
  if (found_another(told)) GTEST_SKIP() << "this machine has an NCCL of its own";
  EXPECT_THAT(told, Each(AllOf(HasSubstr("rank 1: NCCL is missing: libnccl.so.2 is neither in the system"),
                               HasSubstr("TANDEM_CUDA_LIBS"), HasSubstr("nvidia-nccl-cu12"))));
}

TEST_F(NcclLibrary, ThatIsTooOldIsNamed) {
  const auto told = told_to_ranks([](int rank) {
    look_in(TANDEM_FAKE_NCCL_FOLDER);
    if (rank == 0) ::setenv("TANDEM_FAKE_NCCL_VERSION", "21805", 1);
  });
  if (found_another(told)) GTEST_SKIP() << "this machine has an NCCL of its own";
  EXPECT_THAT(told, Each(AllOf(HasSubstr("rank 0: NCCL is missing: "),
                               HasSubstr("libnccl.so.2 is NCCL 2.18.5, 2.19.0 or later is needed"))));
}

TEST_F(NcclLibrary, OfAnotherVersionThanThatOfOthersIsRefused) {
  const auto told = told_to_ranks([](int rank) {
    fake_nccl();
    if (rank == 1) ::setenv("TANDEM_FAKE_NCCL_VERSION", "22808", 1);
  });
  EXPECT_THAT(told, Each(HasSubstr("ranks have different versions of NCCL: rank 0 has 2.27.3, rank 1 has 2.28.8")));
}

TEST(NcclNetwork, IsThatOfTheRendezvous) {
  EXPECT_EQ(nccl::interface_of("127.0.0.1"), "lo");
  EXPECT_EQ(nccl::interface_of("127.0.0.9"), "lo");
  EXPECT_EQ(nccl::interface_of("203.0.113.77"), "") << "an address of documents alone";
  ::unsetenv("NCCL_SOCKET_IFNAME");
  nccl::use_interface_of("203.0.113.77");
  EXPECT_EQ(::getenv("NCCL_SOCKET_IFNAME"), nullptr) << "NCCL finds one itself";
  nccl::use_interface_of("127.0.0.1");
  EXPECT_STREQ(::getenv("NCCL_SOCKET_IFNAME"), "=lo");
  ::setenv("NCCL_SOCKET_IFNAME", "ib0", 1);
  nccl::use_interface_of("127.0.0.1");
  EXPECT_STREQ(::getenv("NCCL_SOCKET_IFNAME"), "ib0") << "what the user has set";
  ::unsetenv("NCCL_SOCKET_IFNAME");
}

TEST(NcclVersion, IsSaidAsItsMakersDo) {
  EXPECT_EQ(nccl::version_text(2804), "2.8.4");
  EXPECT_EQ(nccl::version_text(21903), "2.19.3");
  EXPECT_EQ(nccl::version_text(23203), "2.32.3");
}

}  // namespace
}  // namespace tandem
