// Token files and the order in which windows are drawn of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "core/base/error.hpp"
#include "data/mix_sampler.hpp"
#include "data/token_source.hpp"
#include "data/window_sampler.hpp"
#include "tests/data/data_files.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Data = DataFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

template <class T>
std::vector<T> with_header(std::int32_t magic, std::int32_t count, const std::vector<T>& tokens,
                           std::int32_t version = 1) {
  std::vector<std::int32_t> head(256, 0);
  head[0] = magic;
  head[1] = version;
  head[2] = count;
  std::vector<T> all(1024 / sizeof(T));
  std::copy_n(reinterpret_cast<const char*>(head.data()), 1024, reinterpret_cast<char*>(all.data()));
  all.insert(all.end(), tokens.begin(), tokens.end());
  return all;
}

TEST_F(Data, ReadsAFolderInByteOrderOfPathAndFollowsNoLinks) {
  text("b.txt", "B");
  text("a/z.txt", "Z");
  text("a/c.txt", "C");
  text("B.txt", "0");
  fs::create_symlink(root_ / "b.txt", root_ / "a" / "link.txt");
  fs::create_directory_symlink(root_ / "a", root_ / "loop");
  const TokenSource source({root_}, {256, {}});
  EXPECT_EQ(all(source), (std::vector<std::int32_t>{'0', 'C', 'Z', 'B'}));
  EXPECT_TRUE(source.bytes());
}

TEST_F(Data, ReadsAcrossFilesAtAnyPosition) {
  const TokenSource source({text("1", "abc"), text("2", ""), text("3", "defg")}, {256, {}});
  for (std::int64_t at = 0; at < 7; ++at) {
    for (std::int64_t count = 0; at + count <= 7; ++count) {
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
      source.read(at, tokens);
      for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(tokens[static_cast<std::size_t>(i)], 'a' + at + i);
    }
  }
  std::vector<std::int32_t> beyond(2);
  EXPECT_THROW(source.read(6, beyond), MisuseError);
}

TEST_F(Data, KnowsTheWidthsOfBinFiles) {
  const std::vector<std::uint16_t> narrow{1, 500, 3};
  const std::vector<std::uint32_t> wide{7, 70000, 9};
  EXPECT_EQ(all(TokenSource({file("plain.bin", narrow)}, {1000, {}})), (std::vector<std::int32_t>{1, 500, 3}));
  EXPECT_EQ(all(TokenSource({file("forced.bin", wide)}, {100000, TokenWidth::uint32})),
            (std::vector<std::int32_t>{7, 70000, 9}));
  text("told.json", R"({"dtype": "uint32", "vocab_size": 100000})");
  EXPECT_EQ(all(TokenSource({file("told.bin", wide)}, {100000, {}})), (std::vector<std::int32_t>{7, 70000, 9}));
  EXPECT_EQ(all(TokenSource({file("h16.bin", with_header(20240520, 3, narrow))}, {1000, {}})),
            (std::vector<std::int32_t>{1, 500, 3}));
  for (const std::int32_t version : {1, 7}) {  // llm.c's own files of Llama 3 have 7
    EXPECT_EQ(all(TokenSource({file("h32.bin", with_header(20240801, 3, wide, version))}, {100000, {}})),
              (std::vector<std::int32_t>{7, 70000, 9}));
  }
  EXPECT_THAT(refusal({file("h7.bin", with_header(20240520, 3, narrow, 7))}, {1000, {}}), HasSubstr("version 7"));
}

TEST_F(Data, RefusesWhatContradictsItselfAndSaysWhere) {
  const std::vector<std::uint16_t> tokens{1, 500, 3};
  EXPECT_THAT(refusal({root_ / "none"}, {256, {}}), HasSubstr("no such file"));
  EXPECT_THAT(refusal({text("empty.txt", "")}, {256, {}}), HasSubstr("no tokens"));
  EXPECT_THAT(refusal({file("odd.bin", std::vector<char>{1, 0, 2})}, {256, {}}), HasSubstr("no multiple"));
  EXPECT_THAT(refusal({file("short.bin", with_header(20240520, 4, tokens))}, {1000, {}}), HasSubstr("promises 4"));
  EXPECT_THAT(refusal({file("big.bin", tokens)}, {400, {}}), HasSubstr("token 500 at position 1"));
  EXPECT_THAT(refusal({text("a.txt", "x"), file("b.bin", tokens)}, {1000, {}}), HasSubstr("mixed"));
  text("bad.json", "{]");
  EXPECT_THAT(refusal({file("bad.bin", tokens)}, {1000, {}}), HasSubstr("bad.json"));
  fs::create_directory(root_ / "hollow");
  EXPECT_THAT(refusal({root_ / "hollow"}, {256, {}}), HasSubstr("holds no files"));
}

TEST_F(Data, AWidthThatNothingStatesIsTakenWhereNoOtherCanBeMeant) {
  const std::vector<std::uint32_t> wide{7, 400, 9, 0};
  EXPECT_THAT(refusal({file("wide.bin", wide)}, {1000, {}}), HasSubstr("look like 32-bit ids"));
  EXPECT_THAT(refusal({file("wider.bin", std::vector<std::uint64_t>{7, 400})}, {1000, {}}),
              HasSubstr("look like 64-bit ids"));
  EXPECT_EQ(all(TokenSource({file("narrow.bin", std::vector<std::uint16_t>{7, 0, 9, 1})}, {1000, {}})),
            (std::vector<std::int32_t>{7, 0, 9, 1}));
  EXPECT_EQ(all(TokenSource({file("wide.bin", wide)}, {1000, TokenWidth::uint16})).size(), 8u) << "as the user says";
  EXPECT_EQ(refusal({file("zeros.bin", std::vector<std::uint32_t>(9, 0))}, {1000, {}}), "accepted");
  // 16 bits have room for 65,536 tokens.
  const auto any = file("any.bin", std::vector<std::uint16_t>{1, 2, 3});
  EXPECT_EQ(refusal({any}, {65536, {}}), "accepted");
  EXPECT_THAT(refusal({any}, {65537, {}}), AllOf(HasSubstr("vocabulary of 65537"), HasSubstr("--token-dtype uint32")));
  // Said, but hardly meant.
  const TokenSource doubtful({file("ids.bin", std::vector<std::uint64_t>{7, 400})}, {1000, TokenWidth::uint32});
  EXPECT_THAT(doubtful.notices(), ::testing::ElementsAre(HasSubstr("64-bit ids that are read as uint32")));
}

TEST_F(Data, ReadsFoldersOfNumpyArrays) {
  const auto array = [&](const std::string& name, const std::string& type, const std::vector<std::int64_t>& values) {
    const std::string head =
        "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + std::to_string(values.size()) + ",), }\n";
    std::string content = std::string("\x93NUMPY\1\0", 8) + static_cast<char>(head.size()) + '\0' + head;
    for (const std::int64_t value : values) {
      content.append(reinterpret_cast<const char*>(&value), static_cast<std::size_t>(type.back() - '0'));
    }
    return text(name, content);
  };
  array("folder/a.npy", "<u2", {1, 2});
  array("folder/b.npy", "<i8", {3, 70000});
  text("folder/b.json", R"({"vocab_size": 100000})");
  EXPECT_EQ(all(TokenSource({root_ / "folder"}, {100000, {}})), (std::vector<std::int32_t>{1, 2, 3, 70000}));
  EXPECT_THAT(refusal({array("c.npy", "<i8", {5, -1})}, {100000, {}}), HasSubstr("token -1 at position 1"));
  EXPECT_THAT(refusal({array("d.npy", "<f8", {5})}, {100000, {}}), HasSubstr("'<f8'"));
}

TEST_F(Data, TextIsText) {
  EXPECT_EQ(all(TokenSource({text("mark.txt", "\xef\xbb\xbfhi")}, {256, {}})), (std::vector<std::int32_t>{'h', 'i'}));
  EXPECT_THAT(refusal({text("zero.txt", std::string("\xef\xbb\xbf"
                                                    "a\0b",
                                                    6))},
                      {256, {}}),
              HasSubstr("byte 4 is 0"));
  std::string large(20'000'003, 'x');
  large[9'000'001] = '\0';
  large[15'000'001] = '\0';
  EXPECT_THAT(refusal({text("large.txt", large)}, {256, {}}), HasSubstr("byte 9000001 is 0"));
  EXPECT_THAT(refusal({text("a.txt", "\xff\xfeh")}, {256, {}}), HasSubstr("UTF-16"));
  EXPECT_THAT(refusal({text("b.JSONL", "hi")}, {256, {}}), HasSubstr("tools/prepare_data.py"));
  EXPECT_EQ(refusal({text("latin1.txt", "caf\xe9")}, {256, {}}), "accepted");
}

TEST_F(Data, RecordsInFoldersAreNoText) {
  text("folder/a.txt", "hello");
  const auto said = [&](const std::string& json) {
    text("folder/b.json", json);
    return refusal({root_ / "folder"}, {256, {}});
  };
  const std::string record = R"({"text": ")" + std::string(5000, 'x') + R"("})";
  EXPECT_THAT(said(" [\n  {\"text\": 1}]"), HasSubstr("b.json"));
  EXPECT_THAT(said(record + "\n" + record), HasSubstr("b.json"));
  EXPECT_THAT(said(record + "\r\n" + record), HasSubstr("b.json"));
  EXPECT_EQ(said("{\n  \"name\": {\n  }\n}"), "accepted");
  EXPECT_EQ(said("[1, 2]"), "accepted");
  EXPECT_EQ(said(""), "accepted");
}

TEST_F(Data, HiddenFilesAreLeftOutAndTold) {
  text("folder/a.txt", "hello");
  text("folder/.b.txt", "other");
  text("folder/.cache/c.txt", "other");
  fs::create_symlink("a.txt", root_ / "folder" / "link");
  text("folder/z.txt", "");
  const TokenSource source({root_ / "folder"}, {256, {}});
  EXPECT_EQ(source.size(), 5);
  EXPECT_THAT(source.notices(),
              ::testing::ElementsAre(HasSubstr("2 hidden files"), HasSubstr("1 link"), HasSubstr("1 empty file")));
  EXPECT_EQ(TokenSource({root_ / "folder" / ".b.txt"}, {256, {}}).size(), 5) << "what is named is meant";
}

TEST_F(Data, ADigestIsOfContentNotOfNames) {
  const auto digest = [&](const fs::path& name) { return TokenSource({name}, {256, {}}).digest(); };
  const auto one = text("one/a.txt", "abcdef"), same = text("two/b.txt", "abcdef");
  EXPECT_EQ(digest(one), digest(same));
  EXPECT_NE(digest(one), digest(text("c.txt", "abcdeg")));
  const auto bin = file<std::uint16_t>("a.bin", {1, 2, 3});
  const std::string plain = digest(bin);
  file<std::uint8_t>("a.mask.bin", {1, 1, 0});
  const std::string masked = digest(bin);
  EXPECT_NE(masked, plain);
  file<std::uint8_t>("a.mask.bin", {1, 0, 1});
  EXPECT_NE(digest(bin), masked);
  std::vector<std::uint16_t> many(9'000'000, 5);  // as long as several blocks of the digest
  const std::string before = digest(file("m.bin", many));
  many[8'999'999] = 6;
  EXPECT_NE(digest(file("m.bin", many)), before);
}

TEST_F(Data, FindsTheFirstBadTokenOfAFileThatManyThreadsScan) {
  std::vector<std::uint16_t> tokens(20'000'003, 5);
  tokens[4'200'001] = 300;
  tokens[19'999'999] = 301;
  EXPECT_THAT(refusal({file("large.bin", tokens)}, {256, {}}), HasSubstr("token 300 at position 4200001"));
}

TEST_F(Data, AFileThatBecomesShorterIsNamedAndEndsNothing) {
  const auto tokens = file("a.bin", std::vector<std::uint16_t>(100'000, 7));
  const auto mask = file("a.mask.bin", std::vector<std::uint8_t>(100'000, 1));
  const TokenSource source({tokens}, {256, {}});
  std::vector<std::int32_t> window(1000);
  const auto said = [&](std::int64_t position) -> std::string {
    try {
      source.read_targets(position, window);
    } catch (const InputError& error) {
      return error.what();
    }
    return "read";
  };
  fs::resize_file(mask, 50'500);
  EXPECT_EQ(said(49'000), "read");
  EXPECT_THAT(said(50'000), AllOf(HasSubstr(mask.string()), HasSubstr("changed"), HasSubstr("ends at byte 50500")));
  fs::resize_file(tokens, 0);
  EXPECT_THAT(said(0), AllOf(HasSubstr(tokens.string()), HasSubstr("changed"), HasSubstr("ends at byte 0 of 200000")));
}

TEST_F(Data, LiesInMoreFilesThanMayBeOpenAtFirst) {
  for (int i = 0; i < 300; ++i) text("many/" + std::to_string(i), "ab");
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < 400) GTEST_SKIP() << "this process may not open so many";
  const rlimit few{256, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const TokenSource source({root_ / "many"}, {256, {}});
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(source.size(), 600);
  EXPECT_EQ(all(source).back(), 'b');
}

TEST_F(Data, WindowsFeedAndPredictNeighbouringTokens) {
  const TokenSource source({text("t", "abcdefgh")}, {256, {}});
  EXPECT_EQ(window_count(source.size(), 3), 2);
  EXPECT_EQ(window_count(7, 3), 2);
  EXPECT_EQ(window_count(6, 3), 1);
  EXPECT_EQ(window_count(0, 3), 0);
  std::vector<std::int32_t> inputs(3), targets(3);
  read_window(source, 1, {inputs, targets});
  EXPECT_EQ(inputs, (std::vector<std::int32_t>{'d', 'e', 'f'}));
  EXPECT_EQ(targets, (std::vector<std::int32_t>{'e', 'f', 'g'}));
  EXPECT_THROW(require_windows(source, 8), InputError);
  EXPECT_EQ(require_windows(source, 7), 1);
}

TEST(Permutation, VisitsEveryWindowOnce) {
  for (const std::int64_t count : {1, 2, 3, 4, 5, 22, 55, 1023, 1024, 1025, 100003}) {
    for (const std::uint64_t epoch : {0U, 1U}) {
      const Permutation order(count, 42, epoch);
      std::vector<bool> seen(static_cast<std::size_t>(count), false);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t window = order(i);
        ASSERT_GE(window, 0);
        ASSERT_LT(window, count);
        ASSERT_FALSE(seen[static_cast<std::size_t>(window)]) << count;
        seen[static_cast<std::size_t>(window)] = true;
      }
    }
  }
}

TEST(Permutation, DiffersWithSeedAndEpochAndIsNoIdentity) {
  const auto order = [](std::uint64_t seed, std::uint64_t epoch) {
    const Permutation p(1000, seed, epoch);
    std::vector<std::int64_t> result;
    for (std::int64_t i = 0; i < 1000; ++i) result.push_back(p(i));
    return result;
  };
  std::vector<std::int64_t> identity(1000);
  std::iota(identity.begin(), identity.end(), 0);
  const std::set<std::vector<std::int64_t>> orders{order(1, 0), order(1, 1), order(2, 0), identity};
  EXPECT_EQ(orders.size(), 4U);
  std::int64_t fixed = 0;
  for (std::int64_t i = 0; i < 1000; ++i) fixed += order(1, 0)[static_cast<std::size_t>(i)] == i ? 1 : 0;
  EXPECT_LT(fixed, 10);  // about one is expected
}

TEST(WindowSampler, ContinuesExactlyFromASavedState) {
  WindowSampler straight(22, 7);
  WindowSampler first(22, 7);
  for (int i = 0; i < 30; ++i) EXPECT_EQ(first.next(), straight.next());
  WindowSampler second(22, 7);
  second.restore(first.state());
  for (int i = 0; i < 100; ++i) EXPECT_EQ(second.next(), straight.next()) << i;
}

TEST(WindowSampler, RefusesAStateOfOtherDataOrSeed) {
  WindowSampler sampler(22, 7);
  EXPECT_THROW(sampler.restore({8, 22, 0, 0}), InputError);
  EXPECT_THROW(sampler.restore({7, 23, 0, 0}), InputError);
  EXPECT_THROW(sampler.restore({7, 22, 0, 23}), InputError);
  EXPECT_THROW(WindowSampler(0, 7), MisuseError);
}

TEST(MixSampler, OfOneSourceItIsItsOrder) {
  MixSampler mix({{.windows = 22}}, 7);
  WindowSampler alone(22, 7);
  for (int i = 0; i < 60; ++i) EXPECT_EQ(mix.next(), (MixSampler::Draw{0, alone.next()}));
}

TEST(MixSampler, DrawsByShareAndEachSourceInEpochsOfItsOwn) {
  const std::vector<MixPart> parts = {{1000, 0.6}, {7, 0.3}, {1000, 0.1}};
  MixSampler mix(parts, 42);
  std::vector<std::vector<std::int64_t>> drawn(3);
  for (int i = 0; i < 10000; ++i) {
    const auto [source, window] = mix.next();
    drawn.at(source).push_back(window);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(static_cast<double>(drawn[i].size()), 10000 * parts[i].share, 200) << i;  // 4 deviations
    const auto windows = static_cast<std::ptrdiff_t>(parts[i].windows);
    ASSERT_GE(std::ssize(drawn[i]), 900);
    if (windows > std::ssize(drawn[i])) continue;
    for (std::ptrdiff_t at = 0; at + windows <= std::ssize(drawn[i]); at += windows) {  // each window once an epoch
      EXPECT_EQ(std::set(drawn[i].begin() + at, drawn[i].begin() + at + windows).size(), parts[i].windows);
    }
  }
  EXPECT_NE(std::vector(drawn[0].begin(), drawn[0].begin() + 900),
            std::vector(drawn[2].begin(), drawn[2].begin() + 900))
      << "sources of one size have orders of their own";
}

TEST(MixSampler, ContinuesExactlyFromASavedState) {
  const std::vector<MixPart> parts = {{22, 0.5}, {5, 0.5}};
  MixSampler straight(parts, 7), first(parts, 7), second(parts, 7);
  for (int i = 0; i < 37; ++i) EXPECT_EQ(straight.next(), first.next());
  second.restore(first.state());
  for (int i = 0; i < 60; ++i) EXPECT_EQ(second.next(), straight.next());
}

TEST(MixSampler, RefusesAStateOfOtherDataOrSeed) {
  MixSampler mix({{22, 0.5}, {5, 0.5}}, 7);
  const MixSampler::State good = mix.state();
  const auto refused = [&](const auto& change) {
    MixSampler::State state = good;
    change(state);
    EXPECT_THROW(mix.restore(state), InputError);
  };
  refused([](auto& state) { state.sources.pop_back(); });
  refused([](auto& state) { state.sources[1].windows = 6; });
  refused([](auto& state) { state.sources[0].seed = 8; });
  refused([](auto& state) { state.sources[0].position = 23; });
  refused([](auto& state) { state.drawn = 1; });
  refused([](auto& state) { state.sources[0].epoch = INT64_MAX; });
  EXPECT_EQ(mix.state(), good);
  EXPECT_THROW(MixSampler({}, 7), MisuseError);
  EXPECT_THROW(MixSampler({{22, 0.0}}, 7), MisuseError);
}

std::vector<std::int32_t> targets_of(const TokenSource& source, std::int64_t window, std::size_t length) {
  std::vector<std::int32_t> inputs(length);
  std::vector<std::int32_t> targets(length);
  read_window(source, window, {inputs, targets});
  return targets;
}

TEST_F(Data, AMaskSaysWhichTokensAreTargets) {
  const auto bin = file<std::uint16_t>("a.bin", {1, 2, 3, 4, 5, 6, 7});
  file<std::uint8_t>("a.mask.bin", {1, 0, 1, 1, 0, 0, 1});
  const auto plain = file<std::uint16_t>("b.bin", {8, 9});
  const TokenSource source({bin, plain}, {10, {}});
  EXPECT_TRUE(source.masked());
  EXPECT_EQ(targets_of(source, 0, 3), (std::vector<std::int32_t>{-1, 3, 4}));
  EXPECT_EQ(targets_of(source, 1, 3), (std::vector<std::int32_t>{-1, -1, 7}));
  EXPECT_EQ(targets_of(source, 0, 8), (std::vector<std::int32_t>{-1, 3, 4, -1, -1, 7, 8, 9}));  // over the seam
  std::vector<std::int32_t> inputs(3);
  std::vector<std::int32_t> targets(3);
  EXPECT_EQ(read_window(source, 1, {inputs, targets}), 1);
  EXPECT_EQ(inputs, (std::vector<std::int32_t>{4, 5, 6}));
}

TEST_F(Data, RefusesMasksThatDoNotFit) {
  const auto bin = file<std::uint16_t>("a.bin", {1, 2, 3});
  file<std::uint8_t>("a.mask.bin", {1, 0});
  EXPECT_THAT(refusal({bin}, {10, {}}), HasSubstr("it has 2 bytes"));
  file<std::uint8_t>("a.mask.bin", {1, 0, 2});
  EXPECT_THAT(refusal({bin}, {10, {}}), HasSubstr("byte 2 is 2"));
  EXPECT_THAT(refusal({root_ / "a.mask.bin"}, {10, {}}), HasSubstr("a mask, not tokens"));
}

TEST_F(Data, TellsWhatAFileIsTakenForOfWhichNothingSays) {
  const auto notices = [&](const std::vector<fs::path>& names, std::optional<TokenWidth> width = {}) {
    return TokenSource(names, {10, width}).notices();
  };
  const auto bin = file<std::uint16_t>("a.bin", {1, 2, 3});
  EXPECT_THAT(notices({bin}), ::testing::ElementsAre(AllOf(HasSubstr("a.bin: nothing says"), HasSubstr("uint16"))));
  EXPECT_THAT(notices({bin}, TokenWidth::uint16), ::testing::IsEmpty()) << "the user has said it";
  file<std::uint16_t>("b.bin", {4, 5});
  EXPECT_THAT(notices({root_}), ::testing::ElementsAre(HasSubstr("a.bin and 1 more"))) << "one line for a folder";
  file<std::uint8_t>("a.mask.bin", {1, 0, 1});
  EXPECT_THAT(
      notices({bin}, TokenWidth::uint16),
      ::testing::ElementsAre(AllOf(HasSubstr("a.json is missing, though a.mask.bin"), HasSubstr("put it back"))));
  file<std::uint8_t>("a.mask.bin", {2, 1, 1});
  EXPECT_THAT(refusal({bin}, {10, {}}), HasSubstr("put back a.json"));
  file<std::uint8_t>("a.mask.bin", {1, 0, 1});
  text("a.json", R"({"dtype": "uint16"})");
  EXPECT_THAT(notices({bin}), ::testing::IsEmpty());
  EXPECT_THAT(notices({file<std::uint16_t>("a-validation.bin", {1})}),
              ::testing::ElementsAre(HasSubstr("a-validation.json is missing, though a.json")));
}

TEST_F(Data, RowsAreNeverJoinedAndPaddingIsNoTarget) {
  const auto bin = file<std::uint16_t>("a.bin", {1, 2, 3, 0, 4, 5, 0, 0});
  file<std::uint8_t>("a.mask.bin", {0, 1, 1, 0, 0, 1, 0, 0});
  text("a.json", R"({"dtype": "uint16", "layout": "rows", "row_length": 4, "vocab_size": 6, "tokens": 8})");
  const TokenSource source({root_}, {6, {}});  // named by its folder: neither mask nor description is data
  EXPECT_EQ(source.layout(), TokenLayout::rows);
  EXPECT_EQ(require_windows(source, 5), 2);
  std::vector<std::int32_t> inputs(5);
  std::vector<std::int32_t> targets(5);
  EXPECT_EQ(read_window(source, 1, {inputs, targets}), 1);
  EXPECT_EQ(inputs, (std::vector<std::int32_t>{4, 5, 0, 0, 0}));
  EXPECT_EQ(targets, (std::vector<std::int32_t>{5, -1, -1, -1, -1}));
  EXPECT_EQ(read_window(source, 0, {inputs, targets}), 2);
  EXPECT_EQ(targets, (std::vector<std::int32_t>{2, 3, -1, -1, -1}));
  EXPECT_THROW(require_windows(source, 2), InputError);
}

TEST_F(Data, RowsOfPairsAreToldFromOthers) {
  const auto write = [&](const char* name, bool pairs) {
    const std::string file_name = name;
    file<std::uint8_t>(file_name + ".mask.bin", {0, 1, 0, 1});
    text(file_name + ".json", pairs ? R"({"layout": "rows", "row_length": 2, "pairs": true})"
                                    : R"({"layout": "rows", "row_length": 2, "pairs": false})");
    return file<std::uint16_t>(file_name + ".bin", {1, 2, 3, 4});
  };
  const auto pairs = write("a", true), rows = write("b", false);
  const TokenSource source({pairs}, {10, {}}), other({rows}, {10, {}});
  EXPECT_TRUE(source.pairs());
  EXPECT_FALSE(other.pairs());
  EXPECT_NE(source.digest(), other.digest());
  EXPECT_THAT(refusal({pairs, rows}, {10, {}}), HasSubstr("pairs of answers and other records are mixed"));
}

TEST_F(Data, RefusesDescriptionsThatContradict) {
  const auto bin = file<std::uint16_t>("a.bin", {1, 2, 3, 4});
  const auto refused = [&](const char* json, const char* why) {
    text("a.json", json);
    EXPECT_THAT(refusal({bin}, {10, {}}), HasSubstr(why)) << json;
  };
  refused(R"({"vocab_size": 75})", "vocabulary of 75, the model 10");
  refused(R"({"tokens": 5})", "promises 5");
  refused(R"({"layout": "rows"})", "row_length");
  refused(R"({"layout": "rows", "row_length": 3})", "no multiple of its row length");
  refused(R"({"layout": "columns"})", "none of stream, rows and packed");
  refused(R"({"layout": "rows", "row_length": 4, "pairs": true})", "1 rows are no pairs");
  refused(R"({"layout": "rows", "row_length": 2, "pairs": true})", "pairs of answers need a mask");
  refused(R"({"layout": "stream", "pairs": true})", "pairs need the layout rows");
  refused(R"({"layout": "rows", "row_length": 2, "pairs": 1})", "no true or false");
  refused(R"({"dtype": 3})", "no text");
  refused(R"({"tokens": -1})", "no natural number");
  refused("[", "not a JSON object");
  text("a.json", R"({"vocab_size": 74})");  // some added tokens, of which none is in the data
  EXPECT_THAT(TokenSource({bin}, {10, {}}).notices(),
              ::testing::ElementsAre(HasSubstr("vocabulary of 74, the model 10")));
  text("a.json", R"({"dtype": null})");
  EXPECT_EQ(refusal({bin}, {10, {}}), "accepted");
  file<std::uint16_t>("b.bin", {1, 2, 3, 4});
  text("b.json", R"({"layout": "rows", "row_length": 2})");
  EXPECT_THAT(refusal({root_ / "a.bin", root_ / "b.bin"}, {10, {}}), HasSubstr("layout is another"));
}

}  // namespace
}  // namespace tandem
