// The pace at which a save is written beside steps.
#include "train/saving/save_pace.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tandem {
namespace {

constexpr std::size_t piece = 1 << 20;
constexpr double rest_share = 1.0 / SavePace::busy_share - 1.0;

/// Time that passes only where a test says so, and in waits.
struct FakeTime {
  double now = 0.0;
  std::vector<double> waits;  ///< how long each was to be
  std::function<void(double until)>
      meanwhile;  ///< called in the next wait, which then ends early, where it sets it null
  PaceClock clock() {
    return {[this] { return now; },
            [this](std::condition_variable&, std::unique_lock<std::mutex>& lock, double until) {
              waits.push_back(until - now);
              if (const auto happens = std::exchange(meanwhile, nullptr)) {
                lock.unlock();
                happens(until);
                lock.lock();
                return;
              }
              now = until;
            }};
  }
};

/// A disk that takes `seconds` for each piece, and steps that end meanwhile.
struct Save {
  FakeTime time;
  SavePace pace{{}, time.clock()};
  double piece_seconds;

  explicit Save(double seconds) : piece_seconds(seconds) {}
  void write(int pieces) {
    for (int i = 0; i < pieces; ++i) {
      time.now += piece_seconds;
      pace.wrote(piece, piece_seconds);
    }
  }
};

TEST(SavePace, TheDiskWritesForItsShareOfTheTime) {
  Save save{0.5};
  save.pace.begin(100 * piece, {1000, 1.0});
  save.write(99);
  EXPECT_DOUBLE_EQ(save.time.now, 99 * 0.5 / SavePace::busy_share);
  EXPECT_EQ(save.time.waits.size(), 99U);
  EXPECT_DOUBLE_EQ(save.pace.disk(), piece / 0.5);
  save.write(1);
  EXPECT_EQ(save.time.waits.size(), 99U) << "behind the last piece nothing is left to rest for";
}

TEST(SavePace, EachPieceRestsAsLongAsItDeserves) {
  Save save{0.0};
  save.pace.begin(100 * piece, {1000, 1.0});
  for (const double seconds : {0.1, 2.0, 0.1}) {
    save.piece_seconds = seconds;
    save.write(1);
    EXPECT_NEAR(save.time.waits.back(), rest_share * seconds, 1e-9);
  }
}

TEST(SavePace, IsDoneBeforeTheNextSaveIsDue) {
  // Alone it takes 40 s, at its share 160; the next save is due in 100.
  Save save{0.1};
  save.pace.begin(400 * piece, {50, 2.0});
  save.write(400);
  EXPECT_NEAR(save.time.now, 0.8 * 100.0, 0.2) << "and no sooner: the rests are as long as they may be";
  EXPECT_NEAR(save.time.now, SavePace::seconds_beside(40.0, SaveInterval{50, 2.0}.usable()), 0.2);
}

TEST(SavePace, DoesNotRestWhereItIsLateAnyway) {
  Save save{0.5};
  for (const SaveInterval interval : {SaveInterval{10, 2.0}, SaveInterval{0, 2.0}, SaveInterval{10, 0.0}}) {
    save.pace.begin(100 * piece, interval);
    const double begin = save.time.now;
    save.write(100);
    EXPECT_DOUBLE_EQ(save.time.now, begin + 50.0);
  }
  EXPECT_TRUE(save.time.waits.empty());
}

TEST(SavePace, KeepsUpWithStepsThatTurnOutShorter) {
  Save save{0.1};
  save.pace.begin(400 * piece, {50, 4.0});
  save.write(10);
  EXPECT_NEAR(save.time.waits.back(), rest_share * 0.1, 1e-9);
  for (int step = 0; step < 5; ++step) save.pace.note_step(1.5);  // 45 left, of which 35 may be used: 52.5 s for 39
  const double begin = save.time.now;
  save.write(390);
  EXPECT_NEAR(save.time.now - begin, 52.5, 0.2);
}

TEST(SavePace, ADeadlineThatComesNearerEndsARest) {
  Save save{1.0};
  save.pace.begin(10 * piece, {100, 1.0});
  save.time.meanwhile = [&](double) { save.pace.note_step(0.01); };
  save.write(1);
  EXPECT_DOUBLE_EQ(save.time.now, 1.0);
  EXPECT_EQ(save.time.waits, std::vector<double>{rest_share});
}

TEST(SavePace, ANotificationForNothingDoesNotShortenARest) {
  Save save{1.0};
  save.pace.begin(10 * piece, {100, 1.0});
  save.time.meanwhile = [&](double) { save.time.now += 0.25; };
  save.write(1);
  EXPECT_EQ(save.time.waits, (std::vector<double>{rest_share, rest_share - 0.25}));
  EXPECT_DOUBLE_EQ(save.time.now, 1.0 + rest_share);
}

TEST(SavePace, WhoWaitsForTheSaveEndsTheRestAndAllThatWouldFollow) {
  Save save{1.0};
  save.pace.begin(10 * piece, {100, 1.0});
  save.time.meanwhile = [&](double) { save.pace.hurry(); };
  save.write(10);
  EXPECT_DOUBLE_EQ(save.time.now, 10.0);
  EXPECT_EQ(save.time.waits.size(), 1U);
  save.pace.begin(10 * piece, {100, 1.0});  // the next one rests again
  save.write(1);
  EXPECT_EQ(save.time.waits.size(), 2U);
}

TEST(SavePace, DoesNotRestWhereTheRunIsAboutToEnd) {
  FakeTime time;
  bool signal = false;
  SavePace pace([&] { return signal; }, time.clock());
  pace.begin(10 * piece, {100, 1.0});
  pace.wrote(piece, 1.0);
  EXPECT_EQ(time.waits.size(), 1U);
  signal = true;
  pace.wrote(piece, 1.0);
  EXPECT_EQ(time.waits.size(), 1U);
}

TEST(SavePace, HurryWakesAThreadThatRests) {
  std::promise<void> rests, wrote;
  std::once_flag once;
  PaceClock clock = PaceClock::real();
  clock.wait = [&, real = clock.wait](std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                                      double until) {
    // With the lock, which `hurry` needs: that comes after the wait has begun.
    std::call_once(once, [&] { rests.set_value(); });
    real(changed, lock, until);
  };
  SavePace pace({}, clock);
  pace.begin(10 * piece, {1 << 30, 1.0});
  std::thread disk([&] {
    pace.wrote(piece, 1e6);  // with a rest that no test would see the end of
    wrote.set_value();
  });
  rests.get_future().wait();
  pace.hurry();
  const bool is_awake = wrote.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  EXPECT_TRUE(is_awake);
  if (!is_awake) pace.note_step(1.0);  // wakes it too
  disk.join();
}

TEST(SavePace, SecondsBesideTrainingAreBetweenItsShareAndFullSpeed) {
  EXPECT_DOUBLE_EQ(SavePace::seconds_beside(2.0, 100.0), 2.0 / SavePace::busy_share);
  EXPECT_DOUBLE_EQ(SavePace::seconds_beside(2.0, 3.0), 3.0);
  EXPECT_DOUBLE_EQ(SavePace::seconds_beside(2.0, 1.0), 2.0);
}

TEST(PacedFiles, RestBehindWhatWasWrittenAndReportAtOnceWhatWasNot) {
  FakeTime time;
  // A clock that passes at each look, so that every write takes its time.
  PaceClock clock = time.clock();
  clock.now = [&] { return time.now += 0.001; };
  SavePace pace({}, clock);
  PacedFiles files(pace);
  pace.begin(10, {1000, 1.0});
  std::size_t written = 0;
  const int null = ::open("/dev/null", O_WRONLY);
  EXPECT_EQ(files.write(null, "abc", 3, written), 0);
  EXPECT_EQ(written, 3U);
  EXPECT_EQ(time.waits.size(), 1U);
  ::close(null);
  const int full = ::open("/dev/full", O_WRONLY);
  EXPECT_EQ(files.write(full, "abc", 3, written), ENOSPC);
  EXPECT_EQ(time.waits.size(), 1U);
  ::close(full);
}

}  // namespace
}  // namespace tandem
