// Contents of every rank's memory after each call of a group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/comm/group_testing.hpp"

namespace tandem {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;
using testing::parts_of;
using testing::value_of;
using testing::values_of;

class GroupOf : public ::testing::TestWithParam<int> {
 protected:
  ~GroupOf() override { EXPECT_THAT(testing::complaints_of_devices(), IsEmpty()); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, GroupOf, ::testing::Values(1, 2, 3, 5),
                         [](const auto& each) { return std::to_string(each.param); });

/// Sizes of the parts of `count` ranks, from a list that goes on from the beginning.
std::vector<std::size_t> sizes_for(int count, std::vector<std::size_t> from) {
  std::vector<std::size_t> sizes;
  for (int rank = 0; rank < count; ++rank) sizes.push_back(from[static_cast<std::size_t>(rank) % from.size()]);
  return sizes;
}

std::vector<std::vector<ByteRange>> divisions_for(int count) {
  std::vector<std::vector<ByteRange>> divisions = {
      parts_of(sizes_for(count, {1})), parts_of(sizes_for(count, {22, 55, 0})), parts_of(sizes_for(count, {0, 100003})),
      parts_of(sizes_for(count, {0})), parts_of(sizes_for(count, {55, 1, 22}), 3)};
  // Places of parts need not go by ranks.
  divisions.push_back(divisions.back());
  std::reverse(divisions.back().begin(), divisions.back().end());
  return divisions;
}

std::size_t end_of(const std::vector<ByteRange>& parts) {
  std::size_t end = 0;
  for (const ByteRange& part : parts) end = std::max(end, part.end);
  return end;
}

TEST_P(GroupOf, GathersThePartsOfAll) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam());
  const auto divisions = divisions_for(ranks.count());
  const auto errors = ranks.run([&](int rank) {
    for (std::size_t i = 0; i < divisions.size(); ++i) {
      const std::vector<ByteRange>& parts = divisions[i];
      const int round = static_cast<int>(i);
      const std::size_t bytes = end_of(parts) + 5;
      const MemoryBlock buffer = ranks.device(rank).allocate(bytes, "buffer");
      std::vector<std::byte> expected = values_of(rank, round, bytes);
      ranks.write(rank, buffer.data(), expected);
      ranks.group(rank).all_gather(static_cast<std::byte*>(buffer.data()), parts, ranks.stream(rank));
      const std::vector<std::byte> seen = ranks.read(rank, buffer.data(), bytes);
      for (int peer = 0; peer < ranks.count(); ++peer) {
        const ByteRange part = parts[static_cast<std::size_t>(peer)];
        for (std::size_t at = part.begin; at < part.end; ++at) expected[at] = value_of(peer, round, at);
      }
      EXPECT_EQ(seen, expected) << "rank " << rank << ", division " << i;
    }
  });
  EXPECT_THAT(errors, Each(nullptr));
}

/// Bytes that rank `rank` receives: its part of each other rank's memory.
std::vector<std::byte> exchanged(int rank, int count, int round, ByteRange part) {
  std::vector<std::byte> values;
  for (int peer = 0; peer < count; ++peer) {
    if (peer == rank) continue;
    for (std::size_t at = part.begin; at < part.end; ++at) values.push_back(value_of(peer, round, at));
  }
  return values;
}

TEST_P(GroupOf, ExchangesPartsByTheirRanks) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam());
  const auto divisions = divisions_for(ranks.count());
  const auto errors = ranks.run([&](int rank) {
    for (std::size_t i = 0; i < divisions.size(); ++i) {
      const std::vector<ByteRange>& parts = divisions[i];
      const int round = static_cast<int>(i);
      const ByteRange own = parts[static_cast<std::size_t>(rank)];
      const std::size_t bytes = end_of(parts) + 5;
      const MemoryBlock from = ranks.device(rank).allocate(bytes, "from");
      const std::size_t taken = own.size() * static_cast<std::size_t>(ranks.count() - 1);
      const MemoryBlock to = ranks.device(rank).allocate(taken + 1, "to");
      const std::vector<std::byte> shown = values_of(rank, round, bytes);
      const std::vector<std::byte> before(taken + 1, std::byte{200});
      ranks.write(rank, from.data(), shown);
      ranks.write(rank, to.data(), before);
      ranks.group(rank).all_to_all(static_cast<const std::byte*>(from.data()), parts,
                                   static_cast<std::byte*>(to.data()), ranks.stream(rank));
      std::vector<std::byte> expected = exchanged(rank, ranks.count(), round, own);
      expected.push_back(std::byte{200});
      EXPECT_EQ(ranks.read(rank, to.data(), taken + 1), expected) << "rank " << rank << ", division " << i;
      EXPECT_EQ(ranks.read(rank, from.data(), bytes), shown);
    }
  });
  EXPECT_THAT(errors, Each(nullptr));
}

TEST_P(GroupOf, BroadcastsFromEveryRoot) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam());
  const auto errors = ranks.run([&](int rank) {
    for (int root = 0; root < ranks.count(); ++root) {
      for (const std::size_t bytes : {0U, 1U, 22U, 55U, 100003U}) {
        for (const Channel channel : {Channel::engine, Channel::save}) {
          const int round = root * 2 + static_cast<int>(channel);
          std::vector<std::byte> values = values_of(rank, round, bytes);
          ranks.group(rank).broadcast(channel, root, values);
          EXPECT_EQ(values, values_of(root, round, bytes)) << "rank " << rank << " from " << root;
        }
      }
    }
  });
  EXPECT_THAT(errors, Each(nullptr));
}

TEST_P(GroupOf, SendsFromAnyRankToAnyOtherAndToNoneBesides) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam());
  const int count = ranks.count();
  const auto errors = ranks.run([&](int rank) {
    for (int pair = 0; pair < count * count; ++pair) {
      const int from = pair / count, to = pair % count;
      for (const std::size_t bytes : {0U, 1U, 22U, 55U, 100003U}) {
        const Channel channel = bytes % 2 == 0 ? Channel::engine : Channel::save;
        std::vector<std::byte> values = values_of(rank, pair, bytes);
        ranks.group(rank).send(channel, from, to, values);
        EXPECT_EQ(values, values_of(rank == to ? from : rank, pair, bytes))
            << from << " to " << to << ", rank " << rank;
      }
    }
  });
  EXPECT_THAT(errors, Each(nullptr));
}

TEST_P(GroupOf, KnowsItsRanks) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam());
  for (int rank = 0; rank < ranks.count(); ++rank) EXPECT_EQ(ranks.group(rank).rank(), (Rank{rank, ranks.count()}));
}

/// Memory that a rank writes to and reads from in many rounds that are queued without a pause.
struct Buffers {
  Buffers(Device& device, std::size_t bytes, std::size_t taken, int rounds)
      : gathered(device.allocate(bytes, "gathered")),
        shown(device.allocate(bytes, "shown")),
        to(device.allocate(taken, "taken")),
        values(device.allocate_pinned(bytes * static_cast<std::size_t>(rounds), "values")),
        seen(device.allocate_pinned((bytes + taken) * static_cast<std::size_t>(rounds), "seen")) {}
  MemoryBlock gathered, shown, to, values, seen;
};

std::byte* at(const MemoryBlock& block, std::size_t offset) { return static_cast<std::byte*>(block.data()) + offset; }

/// Each round overwrites what the others took in the one before as soon as the stream has passed that: whoever does not
/// wait for the others' writing, or for their reading, sees bytes of another round.
void play_rounds(testing::Ranks& ranks, int rank, const std::vector<ByteRange>& parts, int rounds) {
  Device& device = ranks.device(rank);
  const StreamView stream = ranks.stream(rank);
  const ByteRange own = parts[static_cast<std::size_t>(rank)];
  const std::size_t bytes = end_of(parts);
  const std::size_t taken = own.size() * static_cast<std::size_t>(ranks.count() - 1);
  const Buffers buffers(device, bytes, std::max<std::size_t>(taken, 1), rounds);
  for (int round = 0; round < rounds; ++round) {
    const std::size_t offset = bytes * static_cast<std::size_t>(round);
    const std::vector<std::byte> values = values_of(rank, round, bytes);
    std::copy(values.begin(), values.end(), at(buffers.values, offset));
    device.copy(at(buffers.gathered, own.begin), at(buffers.values, offset + own.begin), own.size(),
                CopyKind::host_to_device, stream);
    ranks.group(rank).all_gather(at(buffers.gathered, 0), parts, stream);
    device.copy(at(buffers.seen, offset), buffers.gathered.data(), bytes, CopyKind::device_to_host, stream);
    device.fill_zero(buffers.gathered.data(), bytes, stream);
    device.copy(buffers.shown.data(), at(buffers.values, offset), bytes, CopyKind::host_to_device, stream);
    ranks.group(rank).all_to_all(at(buffers.shown, 0), parts, at(buffers.to, 0), stream);
    device.fill_zero(buffers.shown.data(), bytes, stream);
    device.copy(at(buffers.seen, bytes * static_cast<std::size_t>(rounds) + taken * static_cast<std::size_t>(round)),
                buffers.to.data(), taken, CopyKind::device_to_host, stream);
  }
  device.synchronize(stream);
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::byte> expected(bytes);
    for (int peer = 0; peer < ranks.count(); ++peer) {
      const ByteRange part = parts[static_cast<std::size_t>(peer)];
      for (std::size_t i = part.begin; i < part.end; ++i) expected[i] = value_of(peer, round, i);
    }
    const std::byte* seen = at(buffers.seen, bytes * static_cast<std::size_t>(round));
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), seen)) << "gathered by " << rank << ", round " << round;
    expected = exchanged(rank, ranks.count(), round, own);
    seen = at(buffers.seen, bytes * static_cast<std::size_t>(rounds) + taken * static_cast<std::size_t>(round));
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), seen)) << "taken by " << rank << ", round " << round;
  }
}

TEST_P(GroupOf, KeepsItsOrderOverManyRounds) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    TANDEM_RANKS_OR_SKIP(ranks, GetParam(), seed);
    const std::vector<ByteRange> parts = parts_of(sizes_for(ranks.count(), {3001, 22, 0, 4097}));
    EXPECT_THAT(ranks.run([&](int rank) { play_rounds(ranks, rank, parts, 12); }), Each(nullptr)) << "seed " << seed;
    if (HasFailure()) return;
  }
}

TEST_P(GroupOf, ServesItsChannelsBesideTheDevices) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam(), 11);
  const std::vector<ByteRange> parts = parts_of(sizes_for(ranks.count(), {1000, 55}));
  const auto talk = [&](int rank, Channel channel) {
    std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 2 + static_cast<std::uint64_t>(channel));
    for (int round = 0; round < 100; ++round) {
      const int root = round % ranks.count();
      const int key = round * 2 + static_cast<int>(channel);
      std::vector<std::byte> values = values_of(rank, key, 500);
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      ranks.group(rank).broadcast(channel, root, values);
      EXPECT_EQ(values, values_of(root, key, 500)) << "rank " << rank << ", round " << round;
    }
  };
  const auto talk_or_fail = [&](int rank, Channel channel) {
    try {
      talk(rank, channel);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  };
  const auto errors = ranks.run([&](int rank) {
    std::thread engine([&] { talk_or_fail(rank, Channel::engine); });
    std::thread save([&] { talk_or_fail(rank, Channel::save); });
    std::exception_ptr failure;
    try {
      play_rounds(ranks, rank, parts, 20);
    } catch (...) {
      failure = std::current_exception();
      ranks.group(rank).fail(failure);
    }
    engine.join();
    save.join();
    if (failure) std::rethrow_exception(failure);
  });
  EXPECT_THAT(errors, Each(nullptr));
}

/// Streams of one rank may change from call to call.
TEST_P(GroupOf, TakesAnyStreamOfTheRanksDevice) {
  TANDEM_RANKS_OR_SKIP(ranks, GetParam(), 3);
  const std::vector<ByteRange> parts = parts_of(sizes_for(ranks.count(), {1000}));
  const std::size_t bytes = end_of(parts);
  const auto errors = ranks.run([&](int rank) {
    Device& device = ranks.device(rank);
    const MemoryBlock blocks[] = {device.allocate(bytes, "even"), device.allocate(bytes, "odd")};
    const MemoryBlock host = device.allocate_pinned(bytes, "values");
    const std::vector<std::byte> values = values_of(rank, 0, bytes);
    std::copy(values.begin(), values.end(), at(host, 0));
    const Stream other = device.make_stream("other");
    for (int round = 0; round < 10; ++round) {
      const StreamView stream = round % 2 == 0 ? ranks.stream(rank) : StreamView(other);
      const MemoryBlock& block = blocks[round % 2];
      device.fill_zero(block.data(), bytes, stream);
      device.copy(block.data(), host.data(), bytes, CopyKind::host_to_device, stream);
      ranks.group(rank).all_gather(at(block, 0), parts, stream);
    }
    device.synchronize(ranks.stream(rank));
    device.synchronize(other);
    for (const MemoryBlock& block : blocks) {
      const std::vector<std::byte> seen = ranks.read(rank, block.data(), bytes);
      for (int peer = 0; peer < ranks.count(); ++peer) {
        const ByteRange part = parts[static_cast<std::size_t>(peer)];
        for (std::size_t i = part.begin; i < part.end; ++i) ASSERT_EQ(seen[i], value_of(peer, 0, i)) << rank;
      }
    }
  });
  EXPECT_THAT(errors, Each(nullptr));
}

}  // namespace
}  // namespace tandem
