// Records of windows: packed rows, documents of a stream, and how long records are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "core/base/error.hpp"
#include "data/record_lengths.hpp"
#include "data/token_source.hpp"
#include "data/window_sampler.hpp"
#include "tests/data/data_files.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Ids = std::vector<std::int32_t>;
using Bytes = std::vector<std::uint8_t>;
using Lengths = std::map<std::int64_t, std::int64_t>;

/// A window as read_window fills it.
struct Window {
  Ids inputs, targets, first, end;
  std::int64_t count = 0;
};

Window window_of(const TokenSource& source, std::int64_t index, std::size_t length) {
  Window w{Ids(length, 99), Ids(length, 99), Ids(length, 99), Ids(length, 99)};
  w.count = read_window(source, index, {w.inputs, w.targets, w.first, w.end});
  Ids inputs(length, 99), targets(length, 99);
  EXPECT_EQ(read_window(source, index, {inputs, targets}), w.count) << "records are asked for or not";
  EXPECT_EQ(inputs, w.inputs);
  EXPECT_EQ(targets, w.targets);
  return w;
}

class Records : public DataFiles {
 protected:
  /// Packed rows: two of seven tokens, three records and padding in the first, one and a half in the second.
  fs::path packed(const std::string& name = "p", const Bytes& mask = {2, 1, 1, 2, 1, 2, 0, 2, 0, 0, 1, 1, 3, 1}) {
    text(name + ".json", R"({"dtype": "uint16", "layout": "packed", "row_length": 7})");
    file(name + ".mask.bin", mask);
    return file<std::uint16_t>(name + ".bin", {11, 12, 13, 21, 22, 0, 0, 31, 32, 33, 34, 35, 41, 42});
  }
  /// A stream whose end token is 9.
  fs::path stream(const std::vector<std::uint16_t>& tokens, const std::string& name = "s",
                  const std::string& json = R"({"dtype": "uint16", "end_token": 9})") {
    text(name + ".json", json);
    return file(name + ".bin", tokens);
  }
  static TokenSourceOptions documents(std::int64_t vocabulary = 50) {
    return {.vocabulary = vocabulary, .token_width{}, .document_attention = true};
  }
};

TEST_F(Records, PackedRowsAreWindowsOfWholeRecords) {
  const TokenSource source({packed()}, {50, {}});
  EXPECT_EQ(source.layout(), TokenLayout::packed);
  EXPECT_TRUE(source.bounded());
  EXPECT_FALSE(source.document_attention());
  EXPECT_EQ(source.row_length(), 7);
  ASSERT_EQ(require_windows(source, 6), 2);
  const Window a = window_of(source, 0, 6);
  EXPECT_EQ(a.inputs, (Ids{11, 12, 13, 21, 22, 0}));
  EXPECT_EQ(a.targets, (Ids{12, 13, -1, 22, -1, -1})) << "no record predicts the next one, or padding";
  EXPECT_EQ(a.first, (Ids{0, 0, 0, 3, 3, 5}));
  EXPECT_EQ(a.end, (Ids{3, 3, 3, 5, 5, 6})) << "cut at the window, which lacks the row's last token";
  EXPECT_EQ(a.count, 3);
  const Window b = window_of(source, 1, 6);
  EXPECT_EQ(b.inputs, (Ids{31, 32, 33, 34, 35, 41}));
  EXPECT_EQ(b.targets, (Ids{-1, -1, 34, 35, -1, 42})) << "a record's first token is no target, whatever its bit 0";
  EXPECT_EQ(b.first, (Ids{0, 0, 0, 0, 0, 5}));
  EXPECT_EQ(b.end, (Ids{5, 5, 5, 5, 5, 6}));
  EXPECT_EQ(b.count, 3);
}

TEST_F(Records, PaddingOfAWindowIsARecord) {
  const TokenSource source({packed()}, {50, {}});
  EXPECT_THROW(require_windows(source, 5), InputError);
  const Window w = window_of(source, 1, 11);
  EXPECT_EQ(w.inputs, (Ids{31, 32, 33, 34, 35, 41, 0, 0, 0, 0, 0}));
  EXPECT_EQ(w.targets, (Ids{-1, -1, 34, 35, -1, 42, -1, -1, -1, -1, -1}));
  EXPECT_EQ(w.first, (Ids{0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 6}));
  EXPECT_EQ(w.end, (Ids{5, 5, 5, 5, 5, 6, 11, 11, 11, 11, 11}));
}

TEST_F(Records, OfUnboundedDataAWindowIsOneRecord) {
  const auto one_record = [](const TokenSource& source, std::int64_t index, std::size_t length) {
    const Window w = window_of(source, index, length);
    EXPECT_FALSE(source.bounded());
    EXPECT_EQ(w.first, Ids(length, 0));
    EXPECT_EQ(w.end, Ids(length, static_cast<std::int32_t>(length)));
    Ids starts(1);
    EXPECT_THROW(source.read_record_starts(0, starts), MisuseError);
  };
  one_record(TokenSource({text("t", "abcdefgh")}, {256, {}}), 1, 3);
  one_record(TokenSource({stream({1, 9, 2, 9, 3})}, {50, {}}), 0, 4);
  text("r.json", R"({"layout": "rows", "row_length": 3})");
  one_record(TokenSource({file<std::uint16_t>("r.bin", {1, 9, 2, 9, 3, 4})}, {50, {}}), 1, 5);
}

TEST_F(Records, ADocumentEndsWithItsEndToken) {
  //                                         0  1  2  3  4  5  6  7  8  9  10
  const TokenSource source({stream({1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 9})}, documents());
  EXPECT_TRUE(source.bounded());
  EXPECT_TRUE(source.document_attention());
  EXPECT_EQ(source.layout(), TokenLayout::stream);
  const Window a = window_of(source, 0, 5);
  EXPECT_EQ(a.targets, (Ids{2, 9, 3, 9, 9})) << "the end token predicts what follows it";
  EXPECT_EQ(a.first, (Ids{0, 0, 0, 3, 3}));
  EXPECT_EQ(a.end, (Ids{3, 3, 3, 5, 5}));
  const Window b = window_of(source, 1, 5);
  EXPECT_EQ(b.inputs, (Ids{9, 4, 5, 6, 7}));
  EXPECT_EQ(b.first, (Ids{0, 1, 1, 1, 1}));
  EXPECT_EQ(b.end, (Ids{1, 5, 5, 5, 5}));
  const Window c = window_of(source, 2, 3);
  EXPECT_EQ(c.inputs, (Ids{4, 5, 6}));
  EXPECT_EQ(c.first, (Ids{0, 0, 0}));
  EXPECT_EQ(c.end, (Ids{3, 3, 3})) << "cut at the window";
}

TEST_F(Records, AFileBeginsADocument) {
  const TokenSource source({stream({1, 9, 2, 3}), stream({4, 5, 9, 6}, "t")}, documents());
  Ids starts(8, 99);
  source.read_record_starts(0, starts);
  EXPECT_EQ(starts, (Ids{1, 0, 1, 0, 1, 0, 0, 1})) << "also where the file before it does not end with an end token";
  Ids some(2, 99);
  source.read_record_starts(4, some);
  EXPECT_EQ(some, (Ids{1, 0}));
}

TEST_F(Records, EachFileHasItsEndToken) {
  const auto other = stream({9, 8, 1}, "t", R"({"dtype": "uint16", "end_token": 8})");
  const TokenSource source({stream({1, 8, 2, 9}), other}, documents());
  Ids starts(7, 99);
  source.read_record_starts(0, starts);
  EXPECT_EQ(starts, (Ids{1, 0, 0, 0, 1, 0, 1}));
  for (std::int64_t at = 0; at < 7; ++at) {
    Ids some(3, 99);
    const auto count = static_cast<std::size_t>(std::min<std::int64_t>(3, 7 - at));
    source.read_record_starts(at, std::span(some).first(count));
    EXPECT_TRUE(std::equal(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count), starts.begin() + at)) << at;
  }
  EXPECT_THROW(source.read_record_starts(-1, starts), MisuseError);
}

/// Boundaries of every kind, against what one finds token by token.
TEST_F(Records, OddSizesAgreeWithTheTokens) {
  for (const std::int64_t size : {22, 55, 20011, 100003}) {
    std::vector<std::uint16_t> tokens(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>((i * i + i / 7) % 37);
    const TokenSource source({stream(tokens)}, documents());
    for (const std::int64_t length : {1, 5, 21, 16385}) {
      for (std::int64_t index = 0; index < window_count(size, length); index += 1 + size / length / 40) {
        const Window w = window_of(source, index, static_cast<std::size_t>(length));
        for (std::int64_t i = 0; i < length; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const bool starts = i == 0 || w.inputs[at - 1] == 9;
          ASSERT_EQ(w.first[at], starts ? i : w.first[at - 1]) << size << " " << index << " " << i;
          const bool ends = i + 1 == length || w.inputs[at] == 9;
          ASSERT_EQ(w.end[at], ends ? i + 1 : w.end[at + 1]) << size << " " << index << " " << i;
        }
      }
    }
  }
}

TEST_F(Records, SpansOfAWindowHaveOneLength) {
  const TokenSource source({packed()}, {50, {}});
  Ids six(6), five(5);
  EXPECT_THROW(read_window(source, 0, {six, five}), MisuseError);
  EXPECT_THROW(read_window(source, 0, {six, six, six}), MisuseError);
  EXPECT_THROW(read_window(source, 0, {six, six, {}, six}), MisuseError);
  EXPECT_THROW(read_window(source, 0, {six, six, six, five}), MisuseError);
  EXPECT_THROW(read_window(source, 0, {six, six, five, five}), MisuseError);
}

TEST_F(Records, PackedDataNeedAFittingMask) {
  const auto said = [&](const Bytes& mask) { return refusal({packed("p", mask)}, {50, {}}); };
  EXPECT_EQ(said({2, 1, 1, 2, 1, 2, 0, 2, 0, 0, 1, 1, 2, 1}), "accepted");
  EXPECT_THAT(said({2, 1, 1, 2, 4, 2, 0, 2, 0, 0, 1, 1, 2, 1}), HasSubstr("byte 4 is 4, not of 0 to 3"));
  EXPECT_THAT(said({1, 1, 1, 2, 1, 2, 0, 2, 0, 0, 1, 1, 2, 1}),
              HasSubstr("byte 0 is 1, but a row of packed data begins"));
  EXPECT_THAT(said({2, 1, 1, 2, 1, 2, 0, 0, 0, 0, 1, 1, 2, 1}),
              HasSubstr("byte 7 is 0, but a row of packed data begins"));
  EXPECT_THAT(said({3, 0, 0, 3, 0, 3, 0, 3, 0, 0, 0, 0, 3, 0}), HasSubstr("leaves no token to be a target"));
  EXPECT_THAT(said({2, 1}), HasSubstr("it has 2 bytes"));
  const auto bin = packed();
  fs::remove(root_ / "p.mask.bin");
  EXPECT_THAT(refusal({bin}, {50, {}}),
              AllOf(HasSubstr("packed rows need a mask"), HasSubstr("p.mask.bin is missing")));
  packed();
  text("p.json", R"({"layout": "packed"})");
  EXPECT_THAT(refusal({bin}, {50, {}}), HasSubstr("layout packed needs a \"row_length\" of at least 2"));
  text("p.json", R"({"layout": "packed", "row_length": 4})");
  EXPECT_THAT(refusal({bin}, {50, {}}), HasSubstr("no multiple of its row length 4"));
  text("p.json", R"({"layout": "rows", "row_length": 7})");
  EXPECT_THAT(refusal({bin}, {50, {}}), HasSubstr("byte 0 is 2, neither 0 nor 1"));
}

TEST_F(Records, ARowFarBehindIsChecked) {
  constexpr std::size_t rows = 5000, length = 13;  // over several pieces of the mask as it is read
  Bytes mask(rows * length, 1);
  for (std::size_t row = 0; row < rows; ++row) mask[row * length] = 2;
  file("p.bin", std::vector<std::uint16_t>(mask.size(), 3));
  text("p.json", R"({"layout": "packed", "row_length": 13})");
  for (const std::size_t row : {1261UL, 4999UL}) {  // 1261: the first row behind 2^14 bytes
    file("p.mask.bin", mask);
    EXPECT_EQ(refusal({root_ / "p.bin"}, {50, {}}), "accepted");
    Bytes wrong = mask;
    wrong[row * length] = 1;
    file("p.mask.bin", wrong);
    EXPECT_THAT(refusal({root_ / "p.bin"}, {50, {}}),
                HasSubstr("byte " + std::to_string(row * length) + " is 1, but a row"));
  }
}

TEST_F(Records, LayoutsAreNotMixed) {
  const auto bin = packed();
  text("r.json", R"({"layout": "rows", "row_length": 7})");
  const auto rows = file("r.bin", std::vector<std::uint16_t>(14, 3));
  const auto plain = file("plain.bin", std::vector<std::uint16_t>(14, 3));
  EXPECT_THAT(refusal({bin, rows}, {50, {}}), HasSubstr("layout is another"));
  EXPECT_THAT(refusal({rows, bin}, {50, {}}), HasSubstr("layout is another"));
  EXPECT_THAT(refusal({bin, plain}, {50, {}}), HasSubstr("layout is another"));
  EXPECT_EQ(refusal({bin, packed("q")}, {50, {}}), "accepted");
}

TEST_F(Records, ADigestTellsLayoutsAndBoundariesApart) {
  const auto digest = [&](const TokenSourceOptions& options) {
    return TokenSource({root_ / "p.bin"}, options).digest();
  };
  packed("p", {2, 1, 1, 2, 1, 2, 0, 2, 0, 0, 1, 1, 2, 1});
  const std::string one = digest({50, {}});
  EXPECT_EQ(digest(documents()), one);
  packed("p", {2, 1, 1, 0, 1, 2, 0, 2, 0, 0, 1, 1, 2, 1});
  EXPECT_NE(digest({50, {}}), one);
  // Rows whose mask has the same bytes cannot be: each row of a packed mask has a 2. The layout counts all the same.
  packed("p");
  const std::string as_packed = digest({50, {}});
  file("p.mask.bin", Bytes(14, 1));
  text("p.json", R"({"layout": "rows", "row_length": 7})");
  const std::string as_rows = digest({50, {}});
  EXPECT_NE(as_rows, as_packed);
  stream({1, 9, 2, 9, 3, 4, 5}, "p");
  fs::remove(root_ / "p.mask.bin");
  EXPECT_EQ(digest({50, {}}), digest(documents())) << "document attention is a setting of the run";
}

TEST_F(Records, DocumentAttentionNeedsAnEndToken) {
  const auto said = [&](const std::string& json) { return refusal({stream({1, 9, 2, 9, 3}, "s", json)}, documents()); };
  EXPECT_EQ(said(R"({"end_token": 9})"), "accepted");
  for (const char* json : {R"({"end_token": null})", R"({"end_token": "</s>"})", R"({"end_token": -1})", "{}"}) {
    EXPECT_THAT(said(json), AllOf(HasSubstr("needs the token that ends a document"),
                                  HasSubstr("add \"end_token\": ID to " + (root_ / "s.json").string())))
        << json;
  }
  EXPECT_THAT(said(R"({"end_token": 50})"), HasSubstr("its end token 50 is beyond the vocabulary of 50"));
  EXPECT_THAT(refusal({file<std::uint16_t>("bare.bin", {1, 2})}, documents()), HasSubstr("bare.json"));
  EXPECT_THAT(refusal({text("t.txt", "hello")}, documents(256)),
              AllOf(HasSubstr("text has none"), HasSubstr("tools/prepare_data.py")));
  text("r.json", R"({"layout": "rows", "row_length": 2, "end_token": 9})");
  EXPECT_THAT(refusal({file<std::uint16_t>("r.bin", {1, 2})}, documents()), HasSubstr("one record already"));
  const TokenSource with({packed()}, documents());
  EXPECT_FALSE(with.document_attention());
  EXPECT_EQ(window_of(with, 0, 6).first, (Ids{0, 0, 0, 3, 3, 5})) << "rows have their records";
}

TEST_F(Records, EndTokensThatHardlyEndTheRecordsAreTold) {
  const auto told = [&](const std::string& more, const std::vector<std::uint16_t>& tokens) {
    return TokenSource({stream(tokens, "s", R"({"dtype": "uint16", "end_token": 9)" + more + "}")}, documents())
        .notices();
  };
  EXPECT_THAT(told(R"(, "records": 2)", {1, 9, 2, 9}), ::testing::IsEmpty());
  EXPECT_THAT(told("", {1, 9, 2, 9, 3}), ::testing::IsEmpty());
  EXPECT_THAT(told(R"(, "records": 1)", {1, 9, 2, 9}),
              ::testing::ElementsAre(HasSubstr("its end token 9 is 2 times in its 1 records")));
  EXPECT_THAT(told("", {1, 2, 3}), ::testing::ElementsAre(HasSubstr("its end token 9 is not in it")));
  EXPECT_THAT(TokenSource({stream({1, 2, 3})}, {50, {}}).notices(), ::testing::IsEmpty());
}

TEST_F(Records, StatisticsCountRecordsAndTargets) {
  const auto statistics = window_statistics(TokenSource({packed()}, {50, {}}), 8);
  EXPECT_EQ(statistics.windows, 2);
  EXPECT_EQ(statistics.targets, 6);
  EXPECT_EQ(statistics.records, (Lengths{{1, 2}, {2, 3}, {3, 1}, {5, 1}})) << "padding is a record";
  const auto documents_of = window_statistics(TokenSource({stream({1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 9})}, documents()), 5);
  EXPECT_EQ(documents_of.records, (Lengths{{1, 1}, {2, 1}, {3, 1}, {4, 1}}));
  EXPECT_EQ(documents_of.targets, 10);
  const auto whole = window_statistics(TokenSource({text("t", "abcdefgh")}, {256, {}}), 3);
  EXPECT_EQ(whole.records, (Lengths{{3, 2}}));
  EXPECT_THROW(window_statistics(TokenSource({text("t", "abc")}, {256, {}}), 3), InputError);
}

TEST_F(Records, StatisticsOfMuchDataAreOfASampleOfAllOfIt) {
  // Documents of two tokens in the first half, of five in the second.
  std::vector<std::uint16_t> tokens;
  for (int i = 0; i < 50000; ++i) tokens.insert(tokens.end(), {1, 9});
  for (int i = 0; i < 20000; ++i) tokens.insert(tokens.end(), {1, 2, 3, 4, 9});
  tokens.push_back(1);
  const auto statistics = window_statistics(TokenSource({stream(tokens)}, documents()), 10);
  EXPECT_EQ(statistics.windows, 1024);
  EXPECT_EQ(statistics.targets, 10240);
  EXPECT_EQ(statistics.records, (Lengths{{2, 512 * 5}, {5, 512 * 2}}));
}

}  // namespace
}  // namespace tandem
