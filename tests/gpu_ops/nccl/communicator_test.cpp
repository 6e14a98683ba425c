// A communicator of NCCL: the calls that it makes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "comm/nccl/communicator.hpp"
#include "core/base/error.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Calls as they come, by functions that move nothing.
std::vector<std::string>& calls() {
  static std::vector<std::string> all;
  return all;
}
int& state_now() {
  static int state = nccl::success;
  return state;
}

nccl::Library recording() {
  static int handle = 0;
  calls().clear();
  state_now() = nccl::success;
  nccl::Library library{.file = "none", .version = 22703};
  library.init_rank = [](ncclComm** comm, int, nccl::UniqueId, int, nccl::Config* config) {
    *comm = reinterpret_cast<ncclComm*>(&handle);
    return config->blocking == 0 ? 7 : 4;
  };
  library.get_async_error = [](ncclComm*, int* state) { return *state = state_now(), 0; };
  library.finalize = [](ncclComm*) { return calls().emplace_back("finalize"), 7; };
  library.destroy = [](ncclComm*) { return calls().emplace_back("destroy"), 0; };
  library.abort = [](ncclComm*) { return calls().emplace_back("abort"), 0; };
  library.group_start = [] { return calls().emplace_back("start"), 0; };
  library.group_end = [] { return calls().emplace_back("end"), 0; };
  library.send = [](const void*, std::size_t count, int type, int peer, ncclComm*, CUstream_st*) {
    calls().push_back("send " + std::to_string(count) + " of type " + std::to_string(type) + " to " +
                      std::to_string(peer));
    return peer == 9 ? 4 : 0;
  };
  library.receive = [](void*, std::size_t count, int, int peer, ncclComm*, CUstream_st*) {
    return calls().push_back("receive " + std::to_string(count) + " from " + std::to_string(peer)), 0;
  };
  library.error_text = [](int) { return "invalid argument"; };
  library.last_error = [](ncclComm*) { return ""; };
  return library;
}

/// A part of a model of 70 billion parameters has more bytes than 32 bits count.
TEST(Communicator, CountsBytesIn64BitsAndLeavesOutWhatIsEmpty) {
  const nccl::Library library = recording();
  constexpr std::size_t large = (std::size_t{5} << 30) + 3;
  nccl::Communicator communicator(library, 5.0);
  communicator.connect({}, {0, 3});
  const std::vector<nccl::Transfer> transfers = {{.to = 1, .sent_bytes = large, .from = 2, .received_bytes = 0},
                                                 {.to = 2, .sent_bytes = 0, .from = 1, .received_bytes = large + 1}};
  communicator.exchange(transfers, nullptr, "all_gather");
  communicator.finish();
  EXPECT_THAT(calls(), ElementsAre("start", "send 5368709123 of type 1 to 1", "receive 5368709124 from 1", "end",
                                   "finalize", "destroy"));
}

TEST(Communicator, EndsAGroupOfWhichACallFails) {
  const nccl::Library library = recording();
  {
    nccl::Communicator communicator(library, 5.0);
    communicator.connect({}, {0, 3});
    const std::vector<nccl::Transfer> transfers = {{.to = 9, .sent_bytes = 1, .from = 2, .received_bytes = 1}};
    EXPECT_THAT([&] { communicator.exchange(transfers, nullptr, "all_gather"); },
                ThrowsMessage<DeviceError>(HasSubstr("all_gather by NCCL 2.27.3 failed: invalid argument (4)")));
    EXPECT_THAT(calls(), ::testing::Contains("end"));
  }
  EXPECT_EQ(calls().back(), "abort") << "what was not finished";
}

TEST(Communicator, GivesUpWhatDoesNotGetReady) {
  const nccl::Library library = recording();
  nccl::Communicator communicator(library, 0.05);
  communicator.connect({}, {0, 3});
  state_now() = nccl::in_progress;
  EXPECT_THAT([&] { communicator.exchange({}, nullptr, "all_gather"); },
              ThrowsMessage<StalledError>(HasSubstr("waiting for all_gather of the group made no progress")));
  communicator.abort();
  EXPECT_THROW(communicator.exchange({}, nullptr, "all_gather"), PeerError);
}

}  // namespace
}  // namespace tandem
