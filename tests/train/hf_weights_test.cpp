// Weights in the files of Hugging Face, read and exported.
#include "train/hf/hf_weights.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "core/base/error.hpp"
#include "io/safetensors.hpp"
#include "models/transformer/transformer.hpp"
#include "train/hf/hf_export.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// A tiny model with values that are all different: a GPT-2, whose matrices are stored transposed, a Llama of which
/// several are in one tensor, or experts, of which one is in several.
class HfWeightsFiles : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    fs::create_directories(root_);
    std::vector<TensorSpec> specs;
    for (const Parameter* p : layout_.owned_parameters()) {
      for (std::int64_t i = 0; i < hf_tensor_count(*p); ++i) {
        const HfTensor tensor = hf_tensor_of(config_, *p, i);
        if (tensor.first_row == 0) specs.push_back({tensor.name, "F32", stored_shape(*p, tensor)});
      }
    }
    SafetensorsWriter writer(root_ / "model.safetensors", specs);
    float next = 0.0F;
    for (const Parameter* p : layout_.owned_parameters()) {
      std::vector<float> values(static_cast<std::size_t>(p->count));
      for (float& x : values) x = next++;
      writer.write(values.data(), values.size() * sizeof(float));
    }
    writer.finish();
  }
  void TearDown() override { fs::remove_all(root_); }

  static ModelConfig config() {
    ModelConfig c = builtin_model(GetParam());
    c.layers = 2;
    c.ffn = 55;
    if (c.experts > 0) {
      c.architecture = "MixtralForCausalLM";
      c.expert_names = ExpertNames::block_sparse_moe;
    } else if (c.family == Family::llama) {
      c.architecture = "Phi3ForCausalLM";
      c.fused_tensors = true;
    }
    return c;
  }
  std::vector<float> read(const HfWeights& weights, const std::string& name) const {
    const Parameter& p = layout_.parameter(name);
    std::vector<float> values(static_cast<std::size_t>(p.count));
    weights.read(config_, p, 0, values);
    return values;
  }
  const ModelConfig config_ = config();
  const ParameterLayout layout_ = layout_of(config_);
  const fs::path root_ = fs::path(::testing::TempDir()) / ("tandem_hf_weights_" + std::to_string(::getpid()));
};

class TransposedFiles : public HfWeightsFiles {};

TEST_P(TransposedFiles, TransposesWhatIsStoredSo) {
  const auto opened = HfWeightFiles(root_).weights();
  const HfWeights& weights = *opened;
  const Parameter& p = layout_.parameter("block.0.mlp.c_fc.weight");
  const std::vector<float> values = read(weights, p.full_name);
  const auto outputs = static_cast<std::size_t>(p.shape[0]);
  const auto inputs = static_cast<std::size_t>(p.shape[1]);
  ASSERT_EQ(outputs, 55u);
  EXPECT_EQ(values[1] - values[0], static_cast<float>(outputs)) << "neighbours in a row are a stored row apart";
  EXPECT_EQ(values[inputs] - values[0], 1.0F);
}

class ExpertFiles : public HfWeightsFiles {};

TEST_P(ExpertFiles, EachExpertHasTensorsOfItsOwn) {
  const auto opened = HfWeightFiles(root_).weights();
  const HfWeights& weights = *opened;
  weights.check(config_, layout_);
  const SafetensorsReader file(root_ / "model.safetensors");
  std::vector<float> last(192 * 55);
  widen(file.tensors().at("model.layers.1.block_sparse_moe.experts.15.w2.weight"), 0, last);
  const std::vector<float> all = read(weights, "block.1.mlp.experts.down_proj.weight");
  ASSERT_EQ(all.size(), 16 * last.size());
  EXPECT_EQ(std::vector<float>(all.end() - static_cast<std::ptrdiff_t>(last.size()), all.end()), last);
}

TEST_P(ExpertFiles, AMissingExpertIsNamed) {
  ModelConfig more = config_;
  more.experts = 17;
  try {
    HfWeightFiles(root_).weights()->check(more, layout_of(more));
    FAIL() << "accepted";
  } catch (const InputError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("model.layers.0.block_sparse_moe.experts.16.w1.weight"), std::string::npos) << what;
  }
}

class FusedFiles : public HfWeightsFiles {};

TEST_P(FusedFiles, PartsOfATensorLieOneBehindTheOther) {
  const auto opened = HfWeightFiles(root_).weights();
  const HfWeights& weights = *opened;
  for (const auto& [before, after] :
       {std::pair{"self_attn.q_proj", "self_attn.k_proj"}, std::pair{"self_attn.k_proj", "self_attn.v_proj"},
        std::pair{"mlp.gate_proj", "mlp.up_proj"}}) {
    const std::vector<float> first = read(weights, std::string("block.1.") + before + ".weight");
    const std::vector<float> second = read(weights, std::string("block.1.") + after + ".weight");
    EXPECT_EQ(second.front(), first.back() + 1.0F) << after;
    EXPECT_EQ(second.back() - second.front(), static_cast<float>(second.size() - 1)) << after;
  }
}

TEST_P(FusedFiles, AMissingTensorIsNamedOnce) {
  ModelConfig more = config_;
  more.layers = 3;
  try {
    HfWeightFiles(root_).weights()->check(more, layout_of(more));
    FAIL() << "accepted";
  } catch (const InputError& error) {
    const std::string what = error.what();
    const std::string name = "model.layers.2.self_attn.qkv_proj.weight";
    ASSERT_NE(what.find(name), std::string::npos) << what;
    EXPECT_EQ(what.find(name, what.find(name) + 1), std::string::npos) << what;
  }
}

TEST_P(HfWeightsFiles, WhatIsExportedIsReadBack) {
  const auto opened = HfWeightFiles(root_).weights();
  const HfWeights& weights = *opened;
  const auto values = [&](const Parameter& p, std::int64_t first, std::span<float> part) {
    weights.read(config_, p, first, part);
  };
  for (const std::uint64_t shard_bytes : {std::uint64_t{1} << 40, std::uint64_t{100000}}) {
    const fs::path to = root_ / ("out" + std::to_string(shard_bytes));
    export_hf(to, {.config = config_,
                   .layout = layout_,
                   .type = ExportType::fp32,
                   .shard_bytes = shard_bytes,
                   .beside = {},
                   .values = values});
    const auto exported_files = HfWeightFiles(to).weights();
    const HfWeights& exported = *exported_files;
    exported.check(config_, layout_);
    for (const Parameter* p : layout_.owned_parameters()) {
      EXPECT_EQ(read(exported, p->full_name), read(weights, p->full_name)) << p->full_name;
    }
  }
}

TEST_P(HfWeightsFiles, PiecesAreTheWhole) {
  const auto opened = HfWeightFiles(root_).weights();
  const HfWeights& weights = *opened;
  weights.check(config_, layout_);
  for (const Parameter* p : layout_.owned_parameters()) {
    std::vector<float> whole(static_cast<std::size_t>(p->count));
    weights.read(config_, *p, 0, whole);
    for (const std::size_t piece : {std::size_t{22}, std::size_t{55}, std::size_t{1021}}) {
      std::vector<float> values(whole.size(), -1.0F);
      for (std::size_t first = 0; first < values.size(); first += piece) {
        weights.read(config_, *p, static_cast<std::int64_t>(first),
                     std::span(values).subspan(first, std::min(piece, values.size() - first)));
      }
      ASSERT_EQ(values, whole) << p->full_name << " in pieces of " << piece;
    }
  }
}

std::string plain_name(const ::testing::TestParamInfo<const char*>& instance) {
  const std::string_view name = instance.param;
  return name == "tiny-gpt2" ? "transposed" : name == "tiny-moe" ? "experts" : "fused";
}

// The files that were checked are the files that are read, also where others take their place meanwhile.
TEST_P(HfWeightsFiles, AreOpenedOnceUntilTheyAreClosed) {
  HfWeightFiles files(root_);
  const Parameter& p = *layout_.owned_parameters().front();
  const auto opened = files.weights();
  const std::vector<float> values = read(*opened, p.full_name);
  std::filesystem::rename(files.files().front(), root_ / "old");
  { std::ofstream(files.files().front()) << "no tensors"; }
  EXPECT_EQ(files.weights(), opened);
  EXPECT_EQ(read(*files.weights(), p.full_name), values);
  files.close();
  EXPECT_EQ(read(*opened, p.full_name), values);
  EXPECT_THROW(files.weights(), InputError);
}

INSTANTIATE_TEST_SUITE_P(Models, HfWeightsFiles, ::testing::Values("tiny-gpt2", "tiny-llama", "tiny-moe"), plain_name);
INSTANTIATE_TEST_SUITE_P(Models, TransposedFiles, ::testing::Values("tiny-gpt2"), plain_name);
INSTANTIATE_TEST_SUITE_P(Models, ExpertFiles, ::testing::Values("tiny-moe"), plain_name);
INSTANTIATE_TEST_SUITE_P(Models, FusedFiles, ::testing::Values("tiny-llama"), plain_name);

}  // namespace
}  // namespace tandem
