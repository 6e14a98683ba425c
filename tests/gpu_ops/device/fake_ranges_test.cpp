// Ranges that a profiler sees of a run are the spans that its trace records.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/trace.hpp"
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"
#include "tests/gpu_ops/fake_runtime/fake_profiler.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using fake_profiler::SeenRange;
using ::testing::Each;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::toy;
using testing::ToyOptions;
using testing::ToyTrainer;

using Span = std::tuple<std::string, std::string, std::uint64_t>;  ///< lane, name, bytes

std::vector<Span> spans_of(const Trace& trace) {
  const auto file = std::filesystem::temp_directory_path() / ("tandem-ranges-" + std::to_string(::getpid()) + ".json");
  trace.write(file);
  std::ifstream in(file);
  const nlohmann::json events = nlohmann::json::parse(in).at("traceEvents");
  std::filesystem::remove(file);
  std::map<int, std::string> lanes;
  std::vector<Span> spans;
  for (const auto& e : events) {
    if (e.at("ph") == "M" && e.at("name") == "thread_name") lanes[e.at("tid")] = e.at("args").at("name");
    if (e.at("ph") != "X") continue;
    const std::uint64_t bytes = e.contains("args") ? e.at("args").at("bytes").get<std::uint64_t>() : 0;
    spans.emplace_back(lanes.at(e.at("tid")), e.at("name"), bytes);
  }
  std::sort(spans.begin(), spans.end());
  return spans;
}

std::vector<Span> seen_spans() {
  std::vector<Span> spans;
  for (const SeenRange& r : fake_profiler::seen()) spans.emplace_back(r.lane, r.name, r.bytes);
  std::sort(spans.begin(), spans.end());
  return spans;
}

class Ranges : public ::testing::Test {
 protected:
  ~Ranges() override { fake_profiler::attach(false); }
};

TEST_F(Ranges, OfARunAreTheSpansOfItsTrace) {
  for (const char* policy : {"device", "host", "interleave:2,resident=0.4"}) {
    fake_profiler::attach(true);
    Trace trace;
    ToyOptions o = toy(policy);
    o.micro_batches = 2;
    o.trace = &trace;
    {
      ToyTrainer t(o);
      (void)t.run();
    }
    EXPECT_EQ(seen_spans(), spans_of(trace)) << policy;
    EXPECT_GT(trace.size(), 50U) << policy;
    EXPECT_THAT(fake_profiler::seen(), Each(Field(&SeenRange::ended, true))) << policy;
    EXPECT_EQ(fake_profiler::domains(), 0) << policy;
  }
}

TEST_F(Ranges, AreNoneWhereNobodyListens) {
  ToyTrainer t(toy("host"));
  EXPECT_EQ(t.device().ranges(), nullptr);
  fake_profiler::attach(true);  // too late: the device is open
  (void)t.run();
  EXPECT_THAT(fake_profiler::seen(), IsEmpty());
}

TEST_F(Ranges, EndWhereTheRunFails) {
  fake_profiler::attach(true);
  {
    ToyTrainer t(toy("stream"));
    fake_cuda::fail_call("cudaMemcpyAsync", 20, cudaErrorLaunchFailure);
    EXPECT_THROW((void)t.run(), DeviceError);
  }
  EXPECT_THAT(fake_profiler::seen(), Not(IsEmpty()));
  EXPECT_THAT(fake_profiler::seen(), Each(Field(&SeenRange::ended, true)));
}

}  // namespace
}  // namespace tandem
