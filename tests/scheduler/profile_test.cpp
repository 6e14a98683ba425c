// Profiles of machines: read, refused, and those shipped.
#include "scheduler/machine/profile.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Profile, ReadsBackAsItWasWritten) {
  MachineProfile p = testing::desktop();
  p.cpu = "a \"quoted\" CPU\\";
  p.device = "card";
  p.to_device = {24.123456789e9, 0.03, "measured"};
  p.by_threads = {{1, 1e9, 2e9, 3e8, 2e8}, {16, 4e10, 5e10, 1.9e9, 1.2e9}};
  const MachineProfile back = parse_profile(profile_toml(p), "text");
  for (const ProfileField& field : profile_fields()) {
    EXPECT_EQ((back.*field.figure).value, (p.*field.figure).value) << field.section << "." << field.key;
    EXPECT_EQ((back.*field.figure).spread, (p.*field.figure).spread);
    EXPECT_EQ((back.*field.figure).source, (p.*field.figure).source);
  }
  EXPECT_EQ(back.cpu, p.cpu);
  EXPECT_EQ(back.device, p.device);
  ASSERT_EQ(back.by_threads.size(), 2U);
  EXPECT_EQ(back.by_threads[1].threads, 16);
  EXPECT_EQ(back.by_threads[1].cpu_update_with_copies, 1.2e9);
  EXPECT_EQ(profile_toml(back), profile_toml(p));
}

TEST(Profile, TheSpreadOfManySamplesLeavesOutATenthAtEitherEnd) {
  EXPECT_EQ(figure_of({5.0}).spread, 0.0);
  EXPECT_EQ(figure_of({8.0, 12.0, 10.0}).value, 10.0);
  EXPECT_EQ(figure_of({8.0, 12.0, 10.0}).spread, 0.4);
  std::vector<double> samples(20, 10.0);
  samples[3] = 1.0;
  samples[7] = 2.0;
  samples[11] = 99.0;
  EXPECT_EQ(figure_of(samples).spread, 0.0);
  samples[12] = samples[13] = 12.0;  // one more than a tenth
  EXPECT_EQ(figure_of(samples).value, 10.0);
  EXPECT_EQ(figure_of(samples).spread, 0.2);
}

TEST(Profile, EveryRequiredFigureMustBeThere) {
  for (const ProfileField& field : profile_fields()) {
    MachineProfile p = testing::desktop();
    (p.*field.figure).value = 0.0;
    if (field.required) {
      const std::string text = refusal([&] { p.check(); });
      EXPECT_THAT(text, HasSubstr(std::string(field.section) + "." + std::string(field.key)));
    }
  }
}

TEST(Profile, NegativeAbsurdAndInfiniteFiguresAreRefusedByName) {
  for (const ProfileField& field : profile_fields()) {
    const std::string name = std::string(field.section) + "." + std::string(field.key);
    for (const double bad :
         {-1.0, field.most * 1.01, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      MachineProfile p = testing::desktop();
      (p.*field.figure).value = bad;
      const std::string text = refusal([&] { p.check(); });
      EXPECT_THAT(text, HasSubstr(name)) << bad;
      EXPECT_EQ(text.find('\n'), std::string::npos);
    }
  }
  MachineProfile p = testing::desktop();
  p.to_device.value = 1e16;  // 10 PB/s
  EXPECT_THAT(refusal([&] { p.check(); }), HasSubstr("1e+16 B/s is beyond any machine"));
  p.to_device.value = std::numeric_limits<double>::infinity();
  EXPECT_THAT(refusal([&] { p.check(); }), HasSubstr("inf B/s is beyond any machine"));
  p.to_device.value = -3e9;
  EXPECT_THAT(refusal([&] { p.check(); }), HasSubstr("-3000000000 B/s is negative"));
  p.to_device.value = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(refusal([&] { p.check(); }), HasSubstr("not a number"));
}

TEST(Profile, WrongUnitsKeysAndTypesAreRefusedByName) {
  const auto parsed = [](const std::string& text) { return refusal([&] { parse_profile(text, "x.toml"); }); };
  EXPECT_THAT(parsed("[link]\nto_device = { value = 24, unit = \"GB/s\" }\n"), HasSubstr("give it in B/s"));
  EXPECT_THAT(parsed("[link]\nto_devise = 24e9\n"), HasSubstr("link.to_devise"));
  EXPECT_THAT(parsed("[link]\nto_device = \"fast\"\n"), HasSubstr("not a number"));
  EXPECT_THAT(parsed("[link]\nto_device = { unit = \"B/s\" }\n"), HasSubstr("no value"));
  EXPECT_THAT(parsed("colour = 3\n"), HasSubstr("colour"));
  EXPECT_THAT(parsed("[link\n"), HasSubstr("line 1"));
  EXPECT_THROW(read_profile("no/such/file.toml"), InputError);
}

TEST(Profile, CountsOfThreadsAreThoseOfMachines) {
  const std::string good = profile_toml(testing::desktop());
  const auto counted = [&](const char* count) {
    return refusal([&] { parse_profile(good + "\n[[threads]]\ncount = " + count + "\n", "text"); });
  };
  EXPECT_EQ(counted("4096"), "accepted");
  for (const char* count : {"4097", "1e12", "9e14", "-1", "nan"})
    EXPECT_THAT(counted(count), HasSubstr("threads.count"));
}

TEST(Profile, CharactersBeyondAsciiStandInStringsAlone) {
  const std::string good = profile_toml(testing::desktop());
  EXPECT_EQ(parse_profile("driver = \"\xc2\xa7\"\n" + good.substr(good.find("\n[")), "text").driver, "\xc2\xa7");
  EXPECT_THAT(refusal([&] { parse_profile(good + "x = 6.6\"\xef\xb9\xbf", "text"); }), HasSubstr("line"));
  EXPECT_THAT(refusal([&] { parse_profile(good + "\xc2\xa7 = 1", "text"); }), HasSubstr("beyond ASCII"));
  EXPECT_THROW(read_profile("/dev/zero"), InputError);
  EXPECT_THROW(read_profile("/nowhere/profile.toml"), InputError);
}

TEST(Profile, EveryShippedProfileIsSoundAndNamesItsSources) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TANDEM_SOURCE_DIR "/profiles")) {
    const MachineProfile p = read_profile(entry.path());
    for (const ProfileField& field : profile_fields()) {
      const Figure& figure = p.*field.figure;
      if (figure.value != 0.0) {
        EXPECT_FALSE(figure.source.empty()) << entry.path() << " " << field.section << "." << field.key;
      }
    }
    ++count;
  }
  EXPECT_GE(count, 16);
}

/// Upper limits of the machines of shipped profiles, by data sheets: decimal units a second.
struct Limits {
  double tflops = 0.0;     ///< dense bf16 products with fp32 sums; not sparse, not with fp16 sums
  double gigabytes = 0.0;  ///< bandwidth of the device's own memory
  double link = 0.0;       ///< gigabytes, one way
  double dram = 0.0;       ///< gigabytes, all channels of the host
  double mebibytes = 0.0;  ///< memory of the device, as nvidia-smi shows it
};

constexpr double lane_of_pcie4 = 16.0 / 8 * 128 / 130;  // 16 GT/s, 128 bits in 130
constexpr double lane_of_pcie5 = 2 * lane_of_pcie4;

/// DDR of so many channels, 8 bytes a transfer.
constexpr double ddr(double channels, double megatransfers) { return channels * 8 * megatransfers / 1000; }

// Peaks: NVIDIA's whitepapers of GA102, Ada and RTX Blackwell for RTX 3090, 4080, 4090, 5080 and 5090, data sheets for
// A100, H100 and GH200. The others go by those of their generation, tensor cores and boost clock, as in llm.c
// (llmc/mfu.h).
const std::map<std::string, Limits> limits_of_shipped{
    {"8gb-pcie4", {30.2, 272, 8 * lane_of_pcie4, ddr(2, 3200), 8188}},          // RTX 4060
    {"8gb-pcie4-laptop", {29.1, 256, 8 * lane_of_pcie4, ddr(2, 4800), 8188}},   // RTX 4060 Laptop
    {"8gb-pcie5", {38.4, 448, 8 * lane_of_pcie5, ddr(2, 5600), 8151}},          // RTX 5060
    {"12gb-pcie4", {58.3, 504, 16 * lane_of_pcie4, ddr(2, 3200), 12282}},       // RTX 4070
    {"12gb-pcie4-3060", {25.5, 360, 16 * lane_of_pcie4, ddr(2, 3200), 12288}},  // RTX 3060
    {"16gb-pcie4", {97.5, 717, 16 * lane_of_pcie4, ddr(2, 3200), 16376}},       // RTX 4080
    {"16gb-pcie5", {112.6, 960, 16 * lane_of_pcie5, ddr(2, 5600), 16303}},      // RTX 5080
    {"24gb-pcie4", {165.2, 1008, 16 * lane_of_pcie4, ddr(2, 5600), 24564}},     // RTX 4090
    {"24gb-pcie4-3090", {71.0, 936, 16 * lane_of_pcie4, ddr(2, 3200), 24576}},  // RTX 3090
    {"24gb-pcie5", {90.7, 896, 16 * lane_of_pcie5, ddr(2, 5600), 24463}},       // RTX 5090 Laptop
    {"32gb-pcie5", {209.5, 1792, 16 * lane_of_pcie5, ddr(2, 5600), 32607}},     // RTX 5090
    {"dram-starved", {165.2, 1008, 16 * lane_of_pcie4, ddr(1, 3200), 24564}},   // RTX 4090
    {"80gb-pcie4", {312, 2039, 16 * lane_of_pcie4, ddr(8, 3200), 81920}},       // A100
    {"80gb-pcie5", {989, 3350, 16 * lane_of_pcie5, ddr(8, 4800), 81559}},       // H100 SXM
    {"h100x4-node", {989, 3350, 16 * lane_of_pcie5, 2 * ddr(8, 4800), 81559}},  // H100 SXM, two sockets
    {"gh200-coherent", {989, 4000, 450, 500, 97871}},                           // NVLink-C2C
};

/// Rates that a profile promises beyond the machine's limits, one line each.
std::vector<std::string> beyond(const Limits& limits, const MachineProfile& p) {
  std::vector<std::string> found;
  const auto hold = [&](const char* what, double value, double most) {
    if (value > most) found.push_back(std::string(what) + ": " + std::to_string(value / most) + " of the most");
  };
  // Products of layers, hour after hour, reach no more of the peak than this; large ones alone may.
  hold("matmul", p.matmul.value, 0.75e12 * limits.tflops);
  hold("attention", p.attention.value, p.matmul.value);
  hold("device.bandwidth", p.device_bandwidth.value, 0.95e9 * limits.gigabytes);
  hold("device.update", p.device_update.value * 28, 1.0001 * p.device_bandwidth.value);
  hold("device.memory", p.device_memory.value, limits.mebibytes * 1048576);
  hold("to_device", p.to_device.value, 0.95e9 * limits.link);
  hold("to_host", p.to_host.value, 0.95e9 * limits.link);
  hold("both_ways", p.both_ways.value, p.to_device.value + p.to_host.value);
  hold("dram", p.dram.value, 0.95e9 * limits.dram);
  hold("cpu.stream", p.host_stream.value, p.dram.value);
  hold("cpu.update", p.cpu_update.value * p.cpu_update_bytes.value, p.dram.value);
  return found;
}

TEST(Profile, NoShippedProfilePromisesMoreThanItsMachineCanDo) {
  for (const auto& entry : std::filesystem::directory_iterator(TANDEM_SOURCE_DIR "/profiles")) {
    const auto limits = limits_of_shipped.find(entry.path().stem().string());
    ASSERT_NE(limits, limits_of_shipped.end()) << entry.path() << ": what can it do at most?";
    const MachineProfile good = read_profile(entry.path());
    EXPECT_EQ(good.name, limits->first);
    EXPECT_THAT(beyond(limits->second, good), IsEmpty()) << entry.path();
    // A figure that is twice what it should be is found.
    for (Figure MachineProfile::*const figure :
         {&MachineProfile::matmul, &MachineProfile::device_bandwidth, &MachineProfile::device_memory,
          &MachineProfile::to_device, &MachineProfile::to_host, &MachineProfile::dram, &MachineProfile::cpu_update}) {
      MachineProfile doubled = good;
      (doubled.*figure).value *= 2;
      EXPECT_THAT(beyond(limits->second, doubled), Not(IsEmpty())) << entry.path() << ' ' << (good.*figure).source;
    }
  }
}

TEST(Profile, DoubtsNameWhatLooksWrong) {
  MachineProfile p = testing::desktop();
  EXPECT_TRUE(doubts(p).empty()) << doubts(p).front();
  p.to_host.value = 6e9;
  p.both_ways.value = 30e9;
  EXPECT_THAT(doubts(p).front(), HasSubstr("narrow slot"));
  p = testing::desktop();
  p.pageable_to_device.value = p.to_device.value;
  EXPECT_THAT(doubts(p).front(), HasSubstr("pageable"));
  p = testing::desktop();
  p.dram.spread = 0.5;
  EXPECT_THAT(doubts(p).front(), HasSubstr("dram.bandwidth varies by 50%"));
  p = testing::desktop();
  p.others_busy.value = 0.4;  // a desktop's programs
  EXPECT_TRUE(doubts(p).empty()) << doubts(p).front();
  p.others_busy.value = 1.08;
  EXPECT_THAT(doubts(p).front(), HasSubstr("other programs kept 1.1 of 16 cores busy"));
}

TEST(Profile, ALinkThatSomethingElseHeldUpIsNoNarrowerThanOneWay) {
  MachineProfile p = testing::desktop();
  p.to_device.value = 20e9;
  p.to_host.value = 30e9;
  p.both_ways = both_ways_of({15e9, 0.2, "measured"}, p.to_device, p.to_host);
  EXPECT_EQ(p.both_ways.value, 15e9);
  EXPECT_EQ(p.both_ways.source, "measured");
  p.check();
  const Figure disturbed{14e9, 0.7, "measured"};
  p.both_ways = disturbed;
  EXPECT_THAT(refusal([&] { p.check(); }), HasSubstr("link.both_ways"));
  for (int way = 0; way < 2; ++way) {
    p.both_ways = both_ways_of(disturbed, p.to_device, p.to_host);
    EXPECT_EQ(p.both_ways.value, 30e9);
    EXPECT_EQ(p.both_ways.spread, 0.7) << "so that it is doubted";
    EXPECT_EQ(p.both_ways.source, "measured, one way alone");
    p.check();
    std::swap(p.to_device, p.to_host);
  }
}

/// A CPU whose update alone moves the 100 GB/s of DRAM, and so many bytes a second beside a link of 40 GB/s both ways.
MachineProfile beside_copies(double update_bytes) {
  MachineProfile p = testing::desktop();
  p.both_ways.value = 40e9;
  p.cpu_update_bytes.value = 28.0;
  p.dram.value = 100e9;
  p.cpu_update.value = 100e9 / 28.0;
  p.cpu_update_with_copies = {update_bytes / 28.0, 0.1, "measured"};
  return p;
}

TEST(Profile, ACopiedByteCostsWhatItTakesFromTheUpdate) {
  // 40 GB/s of copies take 60 of the update's 100; and the same where the copies are slowed as well.
  const Figure cost = copy_dram_of(beside_copies(40e9), 40e9);
  EXPECT_DOUBLE_EQ(cost.value, 1.5);
  EXPECT_EQ(cost.source, "measured, by what the CPU's update leaves");
  EXPECT_EQ(cost.spread, 0.1) << "so that it is doubted with the update's";
  EXPECT_DOUBLE_EQ(copy_dram_of(beside_copies(70e9), 20e9).value, 1.5);
  EXPECT_DOUBLE_EQ(copy_dram_of(beside_copies(80e9), 40e9).value, 0.5) << "cores did not fill DRAM";
}

TEST(Profile, ACopiedByteIsOneWhereNothingSlowsAnything) {
  MachineProfile p = beside_copies(100e9);
  p.dram.value = 200e9;  // 100 of these are left to copies of 40
  const Figure cost = copy_dram_of(p, 40e9);
  EXPECT_EQ(cost.value, 1.0);
  EXPECT_EQ(cost.source, "DMA touches each byte once");
  p.dram.value = 120e9;
  EXPECT_DOUBLE_EQ(copy_dram_of(p, 40e9).value, 0.5) << "or simulated copies would slow the update, which they do not";
}

TEST(Profile, ACopiedByteIsNeverFreeNorDearBeyondBelief) {
  EXPECT_EQ(copy_dram_of(beside_copies(99.9e9), 20e9).value, 0.25);
  EXPECT_EQ(copy_dram_of(beside_copies(120e9), 40e9).value, 0.25) << "faster beside copies, by chance";
  EXPECT_EQ(copy_dram_of(beside_copies(10e9), 2e9).value, 4.0);
  EXPECT_EQ(copy_dram_of(beside_copies(10e9), 0.0).value, 1.0) << "nothing was copied, nothing is known";
}

TEST(Profile, AnEmulatedLinkOnlyNarrows) {
  MachineProfile p = testing::desktop();
  p.copy_cores.value = 1.0;
  const MachineProfile narrow = with_link(p, 1e9);
  EXPECT_EQ(narrow.to_device.value, 1e9);
  EXPECT_EQ(narrow.both_ways.value, 2e9);
  EXPECT_DOUBLE_EQ(narrow.copy_cores.value, 1.0 / 24.0);
  EXPECT_EQ(with_link(p, 1e12).to_device.value, p.to_device.value);
}

TEST(Profile, FewerUpdateThreadsAreAsFastAsTheyWereMeasured) {
  MachineProfile p = testing::desktop();
  ASSERT_EQ(p.cpu_update_cores.value, 16.0);
  const double all = p.cpu_update.value;
  EXPECT_EQ(with_update_threads(p, 0).cpu_update.value, all);
  EXPECT_EQ(with_update_threads(p, 4).cpu_update.value, 0.25 * all);
  EXPECT_EQ(with_update_threads(p, 4).cpu_update_cores.value, 4.0);
  EXPECT_EQ(with_update_threads(p, 17).cpu_update.value, all);
  EXPECT_EQ(with_update_threads(p, 17).cpu_update_cores.value, 16.0);
  // DRAM is full with eight.
  for (const auto& [threads, rate] : {std::pair{1, 0.2}, {4, 0.7}, {8, 1.0}, {16, 1.0}}) {
    p.by_threads.push_back({.threads = threads, .cpu_update = rate});
  }
  EXPECT_DOUBLE_EQ(with_update_threads(p, 8).cpu_update.value, all);
  EXPECT_DOUBLE_EQ(with_update_threads(p, 4).cpu_update.value, 0.7 * all);
  EXPECT_DOUBLE_EQ(with_update_threads(p, 6).cpu_update.value, 0.85 * all);
  EXPECT_EQ(with_update_threads(p, 8).cpu_update_cores.value, 8.0);
}

TEST(Profile, DevicesMadeOfTheCpuShareItsCoresOnceTheyAreMoreThanThese) {
  MachineProfile p = testing::desktop();
  p.device_kind = "host";
  p.device_threads.value = 8.0;
  ASSERT_EQ(p.cores.value, 16.0);
  EXPECT_EQ(shared_by(p, 2).matmul.value, p.matmul.value) << "16 threads on 16 cores";
  EXPECT_DOUBLE_EQ(shared_by(p, 3).device_update.value, p.device_update.value / 1.5);
  EXPECT_DOUBLE_EQ(shared_by(p, 4).matmul.value, p.matmul.value / 2.0);
  EXPECT_EQ(shared_by(p, 4).devices.value, 4.0);
  p.device_threads.value = 0.0;  // not said
  EXPECT_DOUBLE_EQ(shared_by(p, 2).matmul.value, p.matmul.value / 2.0);
  p.device_kind = "cuda";
  EXPECT_EQ(shared_by(p, 4).matmul.value, p.matmul.value) << "each has its own";
}

TEST(Profile, DifferenceNamesWhatDiffers) {
  MachineProfile a = testing::desktop();
  MachineProfile b = a;
  EXPECT_EQ(difference(a, b), "");
  b.driver = "550";
  EXPECT_THAT(difference(a, b), HasSubstr("driver: unknown and 550"));
}

}  // namespace
}  // namespace tandem
