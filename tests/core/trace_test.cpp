// Trace files are valid JSON, complete, and replaced as a whole.
#include "core/base/trace.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "core/base/error.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class TraceTest : public ::testing::Test {
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

TEST_F(TraceTest, SumsUpSpansByLaneAndFirstWord) {
  Trace in_file(folder_);
  for (Trace* trace : {&trace_, &in_file}) {
    trace->span("cpu", "adam h.0", 1.0, 9.0, 100);  // began before
    trace->span("h2d", "fetch h.0 [0, 8)", 10.0, 10.5, 4096);
    trace->span("cpu", "fetch h.0", 10.0, 11.0);
    trace->span("h2d", "fetch h.12", 11.0, 11.25, 1024);
    trace->span("h2d", "load", 12.0, 13.0, 1);
    const std::vector<Trace::Total> totals = trace->totals(10.0);
    ASSERT_EQ(totals.size(), 3U);
    EXPECT_EQ(totals[0].lane + " " + totals[0].word, "h2d fetch");
    EXPECT_EQ(totals[0].seconds, 0.75);
    EXPECT_EQ(totals[0].bytes, 5120U);
    EXPECT_EQ(totals[0].spans, 2);
    EXPECT_EQ(totals[1].lane + " " + totals[1].word, "cpu fetch");
    EXPECT_EQ(totals[2].word, "load");
  }
}

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

TEST_F(TraceTest, AFileWithoutANameHoldsWhatMemoryWould) {
  Trace kept(folder_);
  constexpr int many = 3 * static_cast<int>(Trace::bytes_of_memory) / 32 + 7;
  const auto tell = [](Trace& trace) {
    for (int i = 0; i < many; ++i) {
      const double begin = 5.0 - 0.001 * (i % 7) + i;  // the first begin is not the first that is told
      trace.span(i % 3 == 0 ? "h2d" : "cpu", "step " + std::to_string(i), begin, begin + 0.5, i % 2 == 0 ? 0 : 100);
    }
    for (const char* name : {"", " ", "5", "step 007", "step -1", "step 0", "x  1", "step 99999999999999999999"}) {
      trace.span("names", name, 1e4, 1e4);
    }
  };
  tell(trace_);
  tell(kept);
  EXPECT_EQ(kept.size(), trace_.size());
  EXPECT_TRUE(fs::is_empty(folder_));
  kept.write(folder_ / "kept.json");
  std::ifstream in(folder_ / "kept.json");
  const auto whole = nlohmann::json::parse(in);
  EXPECT_EQ(whole, written());
  std::vector<std::string> names;
  for (const auto& e : whole.at("traceEvents")) {
    if (e.at("ph") == "X") names.push_back(e.at("name"));
  }
  ASSERT_EQ(names.size(), trace_.size());
  EXPECT_EQ(names[17], "step 17");
  EXPECT_EQ(
      std::vector(names.end() - 8, names.end()),
      (std::vector<std::string>{"", " ", "5", "step 007", "step -1", "step 0", "x  1", "step 99999999999999999999"}));
}

TEST_F(TraceTest, AFolderThatTakesNoFileIsRefusedAndAFullOneToldAtTheEnd) {
  EXPECT_THROW(Trace(folder_ / "missing"), WriteError);
  Trace kept(folder_);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{1000, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  for (int i = 0; i < 5000; ++i) kept.span("h2d", "x", 0.0, 1.0);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THROW(kept.write(folder_ / "kept.json"), WriteError);
  EXPECT_TRUE(fs::is_empty(folder_));
}

}  // namespace
}  // namespace tandem
