// State on disk: saved under one plan, loaded under another, trained on to the same bits.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/params/state_digest.hpp"
#include "io/checkpoint.hpp"
#include "io/safetensors.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

class Saving : public ::testing::Test {
 protected:
  Saving() : folder_(std::filesystem::temp_directory_path() / ("tandem-save-" + std::to_string(::getpid()))) {}
  ~Saving() override { std::filesystem::remove_all(folder_); }

  static std::string straight(int steps) {
    ToyTrainer trainer(toy("host"));
    ToyResult result;
    for (int s = 0; s < steps; ++s) trainer.step(s, result);
    return trainer.engine().state_digest();
  }

  static void write(const std::filesystem::path& file, std::string_view text) { std::ofstream(file) << text; }
  static std::string text_of(const std::filesystem::path& file) {
    std::ifstream stream(file);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  std::filesystem::path folder_;
};

TEST_F(Saving, GoesOnUnderAnyPlanAsIfNothingHadHappened) {
  ToyTrainer first(toy("interleave:2"));
  ToyResult result;
  for (int s = 0; s < 3; ++s) first.step(s, result);
  const auto written = first.engine().save(folder_);
  EXPECT_EQ(written, folder_ / "step-00000003");
  const std::string digest = first.engine().state_digest();
  const std::string expected = straight(5);
  for (const char* policy : {"device", "host", "stream"}) {
    for (const StateFormat state : {StateFormat::fp32, StateFormat::split}) {
      ToyOptions o = toy(policy);
      o.offload.state = state;
      o.offload.subgroup_size = 2048;
      o.seed = 99;  // other weights, all of them replaced
      ToyTrainer second(o);
      second.engine().load(folder_);
      EXPECT_EQ(second.engine().step(), 3);
      EXPECT_EQ(second.engine().state_digest(), digest);
    }
  }
  ToyTrainer second(toy("static:0.4"));
  second.engine().load(written);
  for (int s = 3; s < 5; ++s) second.step(s, result);
  EXPECT_EQ(second.engine().state_digest(), expected);
}

/// The digest's blocks are hashed side by side, out of pieces of other bounds.
TEST(Digest, OfArraysOfSeveralBlocksIsThatOfTheirValues) {
  for (const char* policy : {"device", "host"}) {
    for (const StateFormat state : state_formats) {
      ToyOptions o = toy(policy);
      o.layers = 1;
      o.width = state_digest_block + 70'001;  // no multiple of a piece either
      o.offload.state = state;
      o.device.update_threads = 3;
      ToyTrainer trainer(o);
      ToyResult result;
      trainer.step(0, result);
      OffloadEngine& engine = trainer.engine();
      StateDigest expected;
      for (const Parameter* p : engine.layout().owned_parameters()) {
        expected.begin_parameter(p->full_name);
        for (const StateArray array : {StateArray::master, StateArray::m, StateArray::v}) {
          std::vector<float> values(static_cast<std::size_t>(p->count));
          engine.read(*p, array, values);
          expected.add(values.data(), p->count);
          expected.end_array();
        }
        expected.end_parameter();
      }
      EXPECT_EQ(engine.state_digest(), expected.text()) << policy << ", " << name_of(state);
    }
  }
}

TEST_F(Saving, RefusesWhatDoesNotBelongAndChangesNothing) {
  ToyTrainer trainer(toy("host"));
  const std::string before = trainer.engine().state_digest();
  EXPECT_THROW(trainer.engine().load(folder_), InputError);
  ToyOptions wider = toy("host");
  wider.width = 4000;
  ToyTrainer other(wider);
  other.engine().save(folder_);
  EXPECT_THROW(trainer.engine().load(folder_), InputError);
  EXPECT_EQ(trainer.engine().state_digest(), before);
  const auto whole = trainer.engine().save(folder_ / "own");
  std::fstream state(whole / "state.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  state.seekp(-1, std::ios::end);
  state.put('x');
  state.close();
  EXPECT_THROW(trainer.engine().load(folder_ / "own"), InputError);
  EXPECT_EQ(trainer.engine().state_digest(), before);
}

TEST_F(Saving, OfLionGoesOnUnderAnyPlanAndHoldsNoSecondMoment) {
  ToyOptions o = toy("interleave:2");
  o.offload.state = StateFormat::lion;
  ToyTrainer first(o);
  ToyResult result;
  for (int s = 0; s < 3; ++s) first.step(s, result);
  const Checkpoint written(first.engine().save(folder_));
  EXPECT_EQ(written.manifest().optimizer, Optimizer::lion);
  EXPECT_EQ(written.state_digest(), first.engine().state_digest());
  EXPECT_EQ(written.manifest().state_digest, first.engine().state_digest());
  const SafetensorsReader tensors(written.directory() / "state.safetensors");
  EXPECT_NE(tensors.find("m.h.1.w"), nullptr);
  EXPECT_EQ(tensors.find("v.h.1.w"), nullptr);
  for (int s = 3; s < 5; ++s) first.step(s, result);
  for (const char* policy : {"device", "host", "stream"}) {
    o.offload.policy = parse_policy(policy);
    o.offload.subgroup_size = 2048;
    ToyTrainer second(o);
    second.engine().load(folder_);
    EXPECT_EQ(second.engine().state_digest(), written.manifest().state_digest) << policy;
    for (int s = 3; s < 5; ++s) second.step(s, result);
    EXPECT_EQ(second.engine().state_digest(), first.engine().state_digest()) << policy;
  }
}

TEST_F(Saving, RefusesTheStateOfAnotherOptimizer) {
  ToyOptions of_lion = toy("host");
  of_lion.offload.state = StateFormat::lion;
  ToyTrainer adamw(toy("host")), lion(of_lion);
  adamw.engine().save(folder_ / "adamw");
  lion.engine().save(folder_ / "lion");
  const auto refusal = [](ToyTrainer& t, const std::filesystem::path& folder) -> std::string {
    const std::string before = t.engine().state_digest();
    try {
      t.engine().load(folder);
    } catch (const InputError& error) {
      EXPECT_EQ(t.engine().state_digest(), before);
      return error.what();
    }
    return "loaded";
  };
  const std::string lions = refusal(adamw, folder_ / "lion"), adamws = refusal(lion, folder_ / "adamw");
  EXPECT_NE(lions.find("it holds the state of Lion, and --state fp32 is of AdamW; resume with --state lion"),
            std::string::npos)
      << lions;
  EXPECT_NE(adamws.find("it holds the state of AdamW, and --state lion is of Lion; resume with --state fp32"),
            std::string::npos)
      << adamws;
  for (const std::string& text : {lions, adamws}) EXPECT_EQ(text.find('\n'), std::string::npos) << "one line";
}

TEST_F(Saving, LoadingSaysWhichCheckpointItWas) {
  ToyTrainer trainer(toy("host"));
  const auto older = trainer.engine().save(folder_);
  EXPECT_EQ(trainer.engine().load(older), older);
  ToyResult result;
  trainer.step(0, result);
  const auto newer = trainer.engine().save(folder_);
  EXPECT_EQ(trainer.engine().load(folder_), newer);
  std::filesystem::resize_file(newer / "state.safetensors", 100);
  EXPECT_EQ(trainer.engine().load(folder_), older);
  EXPECT_EQ(trainer.engine().step(), 0);
}

TEST_F(Saving, FilesOfTheCallerAreWholeWhereTheCheckpointIs) {
  ToyTrainer trainer(toy("host"));
  std::filesystem::create_directories(folder_ / "mine");
  const auto position = folder_ / "mine" / "position.json";
  const auto empty = folder_ / "mine" / "empty";
  write(position, "{\"window\": 7}");
  write(empty, "");
  const auto older = trainer.engine().save(folder_, {position, empty});
  ToyResult result;
  trainer.step(0, result);
  write(position, "{\"window\": 8}");
  const auto newer = trainer.engine().save(folder_, {position});
  EXPECT_EQ(text_of(trainer.engine().load(folder_) / "position.json"), "{\"window\": 8}");
  EXPECT_EQ(std::filesystem::file_size(older / "empty"), 0u);
  write(newer / "position.json", "{\"window\": 9}");  // not what was saved: the checkpoint is not whole
  EXPECT_EQ(trainer.engine().load(folder_), older);
  EXPECT_EQ(text_of(older / "position.json"), "{\"window\": 7}");
}

TEST_F(Saving, FilesThatCannotBeKeptAreRefusedAndNothingIsWritten) {
  ToyTrainer trainer(toy("host"));
  const auto saved = trainer.engine().save(folder_);
  std::filesystem::create_directories(folder_ / "mine" / "position");
  const auto refused = [&](const std::vector<std::filesystem::path>& files) {
    EXPECT_THROW(trainer.engine().save(folder_, files), MisuseError);
  };
  for (const char* name : {"a", "state.safetensors", "manifest.json"}) write(folder_ / "mine" / name, "x");
  write(folder_ / "mine" / "position" / "a", "y");
  refused({folder_ / "mine" / "a", folder_ / "mine" / "position" / "a"});
  refused({folder_ / "mine" / "state.safetensors"});
  refused({folder_ / "mine" / "manifest.json"});
  refused({folder_ / "mine" / ""});
  EXPECT_THROW(trainer.engine().save(folder_, {folder_ / "missing"}), InputError);
  EXPECT_THROW(trainer.engine().save(folder_, {folder_ / "mine" / "position"}), InputError);
  EXPECT_EQ(trainer.engine().load(folder_), saved);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 2) << "the checkpoint, and `mine`";
}

TEST_F(Saving, LoadingInsideAStepIsRefusedAndTheStateStays) {
  ToyTrainer t(toy("host"));
  const auto saved = t.engine().save(folder_);
  const std::string before = t.engine().state_digest();
  t.engine().begin_step({.lr = 1e-3});
  EXPECT_THROW(t.engine().load(saved), MisuseError);
  t.engine().abort_step();
  EXPECT_EQ(t.engine().state_digest(), before);
}

}  // namespace
}  // namespace tandem
