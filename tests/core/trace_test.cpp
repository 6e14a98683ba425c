#include "core/trace.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "core/error.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class TraceTest : public testing::Test {
 protected:
  TraceTest() : folder_(fs::temp_directory_path() / ("tandem_trace_" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
  }
  ~TraceTest() override { fs::remove_all(folder_); }
  nlohmann::json written() {
    trace_.write(folder_ / "trace.json");
    std::ifstream in(folder_ / "trace.json");
    return nlohmann::json::parse(in);
  }
  fs::path folder_;
  Trace trace_;
};

TEST_F(TraceTest, WritesOneNamedRowPerLane) {
  trace_.span("h2d", "weights h.0", 10.0, 10.5, 4096);
  trace_.span("cpu", "adam \"quoted\"\n", 10.25, 10.75);
  trace_.span("h2d", "weights h.1", 10.5, 10.5);
  const nlohmann::json events = written().at("traceEvents");
  std::vector<nlohmann::json> rows;
  std::vector<nlohmann::json> spans;
  for (const auto& e : events) {
    if (e.at("ph") == "X") spans.push_back(e);
    if (e.at("ph") == "M" && e.at("name") == "thread_name") rows.push_back(e);
  }
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0].at("args").at("name"), "h2d");
  EXPECT_EQ(rows[1].at("args").at("name"), "cpu");
  ASSERT_EQ(spans.size(), 3U);
  EXPECT_EQ(trace_.size(), 3U);
  EXPECT_EQ(spans[0].at("tid"), rows[0].at("tid"));
  EXPECT_EQ(spans[1].at("tid"), rows[1].at("tid"));
  EXPECT_EQ(spans[2].at("tid"), rows[0].at("tid"));
  EXPECT_EQ(spans[0].at("ts"), 0.0) << "time begins with the first span";
  EXPECT_EQ(spans[0].at("dur"), 5e5) << "microseconds";
  EXPECT_EQ(spans[1].at("ts"), 2.5e5);
  EXPECT_EQ(spans[1].at("name"), "adam \"quoted\"\n");
  EXPECT_EQ(spans[0].at("args").at("bytes"), 4096);
  EXPECT_FALSE(spans[1].contains("args"));
}

TEST_F(TraceTest, AnEmptyTraceIsValid) { EXPECT_TRUE(written().at("traceEvents").is_array()); }

TEST_F(TraceTest, NamesThatAreNoTextStillGiveValidJson) {
  trace_.span("cpu", "\xff\xfe", 0, 1);
  EXPECT_NO_THROW(written());
}

TEST_F(TraceTest, ReplacesTheOldFileAndLeavesNothingBeside) {
  std::ofstream(folder_ / "trace.json") << "old";
  trace_.span("cpu", "a", 0, 1);
  EXPECT_NO_THROW(written());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(TraceTest, UnwritableFilesAreReported) {
  EXPECT_THROW(trace_.write(folder_ / "missing" / "trace.json"), WriteError);
  fs::create_directories(folder_ / "taken" / "inside");
  EXPECT_THROW(trace_.write(folder_ / "taken"), WriteError);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1) << "no part is left";
}

TEST_F(TraceTest, RefusesSpansThatNoClockGives) {
  EXPECT_THROW(trace_.span("cpu", "a", 1, 0), MisuseError);
  EXPECT_THROW(trace_.span("cpu", "a", 0, std::numeric_limits<double>::quiet_NaN()), MisuseError);
  EXPECT_EQ(trace_.size(), 0U);
}

TEST_F(TraceTest, ThreadsMayRecordAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 500; ++i) {
        const double begin = trace_now();
        trace_.span("lane " + std::to_string(t), "x", begin, trace_now());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(trace_.size(), 2000U);
}

}  // namespace
}  // namespace tandem
