// TOML text beyond ASCII, and what is refused with its line.
#include "core/base/toml_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::string refusal(std::string_view toml) {
  try {
    return "accepted: " + toml_in_ascii(toml, "text");
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(TomlText, AsciiStaysAsItIs) {
  const std::string text =
      "a = \"b\\\"c\" # d \"e\n'f\\' = \"\"\"g\n\"h\" \\\n  i\"\"\"\"\"\nj = '''k'l''''' # \"\nm = [1, \"\"]\r\n";
  EXPECT_EQ(toml_in_ascii(text, "text"), text);
  EXPECT_EQ(toml_in_ascii("", "text"), "");
}

TEST(TomlText, CharactersOfEveryLengthBecomeEscapes) {
  EXPECT_EQ(toml_in_ascii("\xef\xbb\xbf"
                          "a = \"\xc2\xa7\xe2\x82\xac\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf\"",
                          "text"),
            R"(a = "\U000000a7\U000020ac\U0001f600\U0010ffff")");
  EXPECT_EQ(toml_in_ascii("a = 1 # \xc2\xa7!\nb = \"#\xc2\xa7\"", "text"), "a = 1 # ?!\nb = \"#\\U000000a7\"");
  // The very place that the library stumbles over: behind a line that ends in a backslash.
  EXPECT_EQ(toml_in_ascii("a = \"\"\"\\\n\xc2\xa7\"\"\"", "text"), "a = \"\"\"\\\n\\U000000a7\"\"\"");
  EXPECT_EQ(toml_in_ascii("a = \"\"\"b\"\"\"\"\"\nc = \"\xc2\xa7\"", "text"),
            "a = \"\"\"b\"\"\"\"\"\nc = \"\\U000000a7\"");
}

TEST(TomlText, WhatTomlOrTheLibraryCannotTakeIsRefusedWithItsLine) {
  EXPECT_THAT(refusal("a = 1\n\xc2\xa7 = 2\n"), HasSubstr("text: line 2: a character beyond ASCII"));
  EXPECT_THAT(refusal("a = 6.6\xef\xb9\xbf"), HasSubstr("line 1"));
  EXPECT_THAT(refusal("a = 'b\xc2\xa7'"), HasSubstr("quote it \"like this\""));
  EXPECT_THAT(refusal("a = \"\\\xc2\xa7\""), HasSubstr("line 1"));
  for (const char* bytes :
       {"\x80", "\xc2", "\xc0\xaf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff", "\xc2\x22"}) {
    EXPECT_THAT(refusal(std::string("\n\na = \"") + bytes + "\""), HasSubstr("line 3: bytes that are no UTF-8"))
        << bytes;
    EXPECT_THAT(refusal(std::string("# ") + bytes), HasSubstr("line 1: bytes that are no UTF-8")) << bytes;
  }
  EXPECT_THAT(refusal(std::string((1U << 20) + 1, ' ')), HasSubstr("1048577 bytes are too many"));
}

}  // namespace
}  // namespace tandem
