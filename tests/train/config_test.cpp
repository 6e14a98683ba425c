// Configurations come back from TOML, and contradictions are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "core/base/error.hpp"
#include "train/config/config.hpp"
#include "train/config/units.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ConfigFile : public ::testing::Test {
 protected:
  fs::path write(const std::string& text) {
    file_ = fs::path(::testing::TempDir()) / ("tandem_config_" + std::to_string(::getpid()) + ".toml");
    std::ofstream(file_) << text;
    return file_;
  }
  void TearDown() override { fs::remove(file_); }
  std::string refusal(const std::string& text) {
    TrainConfig config;
    try {
      read_config_toml(write(text), config);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }
  fs::path file_;
};

/// A value of each field that is not its default, where one example serves.
TrainConfig unusual() {
  TrainConfig config;
  for (const ConfigField& field : config_fields()) {
    if (field.kind == ConfigField::Kind::boolean)
      field.set(config, "true");
    else if (field.name == "mix")
      set_config_field(config, field, {"a \"b\"\\c, d=0.25", "d\te=3,f=1"});
    else if (field.kind == ConfigField::Kind::list)
      set_config_field(config, field, {"a \"b\"\\c", "d\te"});
    else if (field.name != "epochs")
      field.set(config, field.example);
  }
  return config;
}

TEST_F(ConfigFile, EveryFieldComesBackFromToml) {
  const TrainConfig config = unusual();
  TrainConfig read;
  read_config_toml(write(config_toml(config)), read);
  for (const ConfigField& field : config_fields()) EXPECT_EQ(field.get(read), field.get(config)) << field.name;
  EXPECT_EQ(read.data, (std::vector<std::string>{"a \"b\"\\c", "d\te"}));
  ASSERT_EQ(read.mix.size(), 3u);
  EXPECT_EQ(read.mix[0].path, "a \"b\"\\c, d");
  EXPECT_EQ(read.mix[1].weight, 3.0);
}

TEST_F(ConfigFile, NamesInAnyScriptComeBack) {
  TrainConfig config;
  config.data = {"\xc3\xa9t\xc3\xa9/\xe6\x96\x87.txt"};
  TrainConfig read;
  read_config_toml(write(config_toml(config)), read);
  EXPECT_EQ(read.data, config.data);
}

TEST_F(ConfigFile, WhatIsNoFileIsNotRead) {
  TrainConfig config;
  EXPECT_THROW(read_config_toml("/dev/zero", config), InputError);
  EXPECT_THROW(read_config_toml(fs::path(::testing::TempDir()), config), InputError);
}

TEST_F(ConfigFile, ASecondNameOfAFlagIsAKey) {
  TrainConfig config;
  read_config_toml(write("grad-clip = 0.25"), config);
  EXPECT_EQ(config.clip, 0.25);
  EXPECT_THROW(read_config_toml(write("clip = 0.5\ngrad-clip = 0.25"), config), UsageError);
}

TEST_F(ConfigFile, WhatIsAFlagOnlyIsSaidToBe) {
  for (const std::string name : {"quiet", "dry-run", "log-level", "resume", "config"}) {
    try {
      TrainConfig config;
      read_config_toml(write(name + " = true"), config);
      ADD_FAILURE() << name;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(name + " is a flag only, no key; give --" + name));
    }
  }
}

TEST_F(ConfigFile, TheDefaultsComeBackFromToml) {
  const TrainConfig config;
  TrainConfig read = unusual();
  read.model.clear();
  TrainConfig fresh;
  read_config_toml(write(config_toml(config)), fresh);
  for (const ConfigField& field : config_fields()) EXPECT_EQ(field.get(fresh), field.get(config)) << field.name;
}

TEST_F(ConfigFile, WhatIsComputedAgainIsNamedAsItCame) {
  for (const std::string text : {"none", "selective", "block", "block:1", "block:12", "block:12,selective", "auto"}) {
    TrainConfig config;
    read_config_toml(write("recompute = \"" + text + "\""), config);
    EXPECT_THAT(config_toml(config), HasSubstr("recompute = \"" + text + "\"\n"));
  }
  for (const char* bad :
       {"some", "block:", "block:-1", "block:x", "block:1.5", "none:1", "block:9223372036854775807", "block:,selective",
        "block,selective", "selective:2", "block:2,", "block:2,selective,selective"}) {
    EXPECT_THAT(refusal("recompute = \"" + std::string(bad) + "\""), HasSubstr("--recompute")) << bad;
  }
}

TEST(ConfigTable, NamesAreUniqueAndEveryExampleIsAccepted) {
  std::set<std::string_view> names;
  for (const ConfigField& field : config_fields()) {
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_FALSE(field.help.empty()) << field.name;
    EXPECT_FALSE(field.fallback.empty()) << field.name;
    if (field.kind == ConfigField::Kind::boolean) continue;
    TrainConfig config;
    EXPECT_NO_THROW(set_config_field(config, field, {std::string(field.example)})) << field.name;
    EXPECT_FALSE(field.get(config).empty()) << field.name;
    EXPECT_EQ(find_config_field(field.name), &field);
  }
}

TEST_F(ConfigFile, RefusesUnknownKeysTypesAndValues) {
  EXPECT_THAT(refusal("modle = \"gpt2\""), HasSubstr("unknown key modle"));
  EXPECT_THAT(refusal("steps = 0"), HasSubstr("--steps"));
  EXPECT_THAT(refusal("steps = \"x\""), HasSubstr("--steps"));
  EXPECT_THAT(refusal("steps = [1, 2]"), HasSubstr("--steps"));
  EXPECT_THAT(refusal("[model]\nname = 1"), HasSubstr("model"));
  EXPECT_THAT(refusal("steps = 1\nsteps = 2"), HasSubstr("line 2"));
  EXPECT_THAT(refusal("steps = 3\n\xc2\xa7 = 1"), HasSubstr("line 2"));
  // Each parenthesis costs the standard library's parser a piece of stack.
  EXPECT_THAT(refusal("freeze = \"" + std::string(30000, '(') + std::string(30000, ')') + "\""), HasSubstr("too long"));
  EXPECT_EQ(refusal("freeze = \"" + std::string(500, '(') + std::string(500, ')') + "\""), "accepted");
  EXPECT_THAT(refusal("freeze = \"a{99999999999999999999}\""), HasSubstr("no name has"));
  EXPECT_THAT(refusal("freeze = \"(a)\\\\1\""), HasSubstr("refers back"));
  EXPECT_EQ(refusal("freeze = \"layers\\\\.(1024|31)\\\\.\""), "accepted");
  EXPECT_EQ(refusal(""), "accepted");
  EXPECT_EQ(refusal("steps = 3"), "accepted");
  EXPECT_EQ(refusal("lr = 1e-3\ndata = [\"a\"]\nstrict = false"), "accepted");
}

TEST(Units, ReadWhatPeopleWrite) {
  EXPECT_EQ(parse_size("8GiB"), std::size_t{8} << 30);
  EXPECT_EQ(parse_size("512MiB"), std::size_t{512} << 20);
  EXPECT_EQ(parse_size("300MB"), 300'000'000U);
  EXPECT_EQ(parse_size("1024"), 1024U);
  EXPECT_EQ(parse_size("0.5GiB"), std::size_t{1} << 29);
  EXPECT_EQ(parse_count("100M"), 100'000'000);
  EXPECT_EQ(parse_count("1Mi"), 1 << 20);
  EXPECT_EQ(parse_count("1.5B"), 1'500'000'000);
  EXPECT_EQ(parse_bandwidth("1GB/s"), 1e9);
  EXPECT_EQ(parse_bandwidth("250MiB/s"), 250.0 * 1024 * 1024);
  for (const char* bad : {"", "GiB", "8XB", "-1GiB", "1e99GiB", "8 GiB", "nan"})
    EXPECT_THROW(parse_size(bad), UsageError) << bad;
  for (const char* bad : {"1GB", "0GB/s", "fast"}) EXPECT_THROW(parse_bandwidth(bad), UsageError) << bad;
  for (const char* bad : {"", "1.5", "3x", "99999999999999999999"}) EXPECT_THROW(parse_integer(bad), UsageError) << bad;
}

TEST(Units, PrintWhatTheyReadBack) {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{1023}, std::size_t{1024}, std::size_t{300'000'000}, std::size_t{5} << 30}) {
    EXPECT_EQ(parse_size(print_size(bytes)), bytes);
  }
  for (const double x : {0.1, 1e-8, 3e-4, 2.0 / 3.0, 0.0}) EXPECT_EQ(parse_number(print_number(x)), x);
  EXPECT_EQ(format_duration(778.2), "0:12:58");
  EXPECT_EQ(format_duration(1e300), format_duration(1e15));
  EXPECT_EQ(format_count(1'235'814'400), "1.24 B");
}

}  // namespace
}  // namespace tandem
