// Indices of sharded weights.
#include "io/shard_index.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.hpp"
#include "io/plain_name.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal(std::string_view text) {
  try {
    shards_of_index(text, "m.json");
  } catch (const InputError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ShardIndex, NamesEachShardOnce) {
  EXPECT_THAT(shards_of_index(R"({"metadata": {}, "weight_map": {"x": "b", "y": "a", "z": "b"}})", "m.json"),
              ElementsAre("a", "b"));
  EXPECT_THAT(shards_of_index(R"({"weight_map": {}})", "m.json"), ElementsAre());
}

TEST(ShardIndex, RefusesWhatIsNoIndexAndWhatLiesElsewhere) {
  for (const char* text : {"", "[]", "{}", "{\"weight_map\": 3}", "{\"weight_map\": {}"}) {
    EXPECT_THAT(refusal(text), HasSubstr("index m.json: it has no weight_map")) << text;
  }
  for (const char* name : {"\"../a\"", "\"/etc/passwd\"", "\"..\"", "\".\"", "\"\"", "\"a\\u0000b\"", "3", "null"}) {
    EXPECT_THAT(refusal(std::string(R"({"weight_map": {"x": )") + name + "}}"), HasSubstr("tensor x names no file"))
        << name;
  }
  EXPECT_THAT(refusal(std::string(200000, '[')), HasSubstr("nested too deep"));
}

TEST(PlainName, IsAnEntryOfItsFolder) {
  for (const char* name : {"a", "...", ".a", "a..b", "a b"}) EXPECT_TRUE(is_plain_name(name)) << name;
  for (const char* name : {"", ".", "..", "/", "a/b", "../a"}) EXPECT_FALSE(is_plain_name(name)) << name;
}

}  // namespace
}  // namespace tandem
