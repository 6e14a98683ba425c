// JSON text, read and written; what is none is discarded.
#include "core/base/json_text.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "core/base/nesting.hpp"

namespace tandem {
namespace {

TEST(JsonText, IsReadAndWrittenBack) {
  const auto value = parse_json<nlohmann::json>(R"({"b": [1, 2.5, null], "a": "x"})");
  EXPECT_EQ(json_text(value), R"({"a":"x","b":[1,2.5,null]})");
  EXPECT_EQ(json_text(value["b"], 2), "[\n  1,\n  2.5,\n  null\n]");
}

TEST(JsonText, OfADocumentEndsItsLine) {
  EXPECT_EQ(json_document(nlohmann::json{{"a", 1}}), "{\n  \"a\": 1\n}\n");
  EXPECT_EQ(json_document(nlohmann::ordered_json{{"a", 1}}), "{\n  \"a\": 1\n}\n");
}

TEST(JsonText, KeepsTheOrderOfKeysWhereAsked) {
  EXPECT_EQ(json_text(parse_json<nlohmann::ordered_json>(R"({"b": 1, "a": 2})")), R"({"b":1,"a":2})");
}

TEST(JsonText, WhatIsNoneIsDiscarded) {
  for (const char* text : {"", "{", "{\"a\": }", "1 2", "nan", "\xE9"}) {
    EXPECT_TRUE(parse_json<nlohmann::json>(text).is_discarded()) << text;
    EXPECT_TRUE(parse_json<nlohmann::ordered_json>(text).is_discarded()) << text;
  }
}

TEST(JsonText, ThatNestsTooDeepIsDiscarded) {
  const auto nested = [](int levels) {
    const auto times = static_cast<std::size_t>(levels);
    return std::string(times, '[') + std::string(times, ']');
  };
  EXPECT_TRUE(parse_json<nlohmann::json>(nested(deepest_json)).is_array());
  EXPECT_TRUE(parse_json<nlohmann::json>(nested(deepest_json + 1)).is_discarded());
  EXPECT_TRUE(parse_json<nlohmann::json>(nested(1'000'000)).is_discarded());
}

TEST(JsonText, BytesThatAreNoUtf8AreReplaced) {
  EXPECT_EQ(json_text(nlohmann::json("caf\xE9")), "\"caf\xEF\xBF\xBD\"");
  EXPECT_EQ(json_text(nlohmann::ordered_json("caf\xE9")), "\"caf\xEF\xBF\xBD\"");
}

}  // namespace
}  // namespace tandem
