#include "train/hf_weights.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "io/safetensors.hpp"
#include "models/transformer.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// A tiny GPT-2, whose matrices are stored transposed, with values that are all different.
class HfWeightsFiles : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(root_);
    std::vector<TensorSpec> specs;
    for (const Parameter* p : layout_.owned_parameters()) {
      const HfTensor tensor = hf_tensor_of(config_, *p);
      specs.push_back({tensor.name, "F32", stored_shape(*p, tensor.transposed)});
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
    ModelConfig c = builtin_model("tiny-gpt2");
    c.ffn = 55;
    return c;
  }
  const ModelConfig config_ = config();
  const ParameterLayout layout_ = layout_of(config_);
  const fs::path root_ = fs::path(testing::TempDir()) / ("tandem_hf_weights_" + std::to_string(::getpid()));
};

TEST_F(HfWeightsFiles, TransposesWhatIsStoredSo) {
  const HfWeights weights(root_);
  const Parameter& p = layout_.parameter("block.0.mlp.c_fc.weight");
  std::vector<float> values(static_cast<std::size_t>(p.count));
  weights.read(config_, p, 0, values);
  const auto outputs = static_cast<std::size_t>(p.shape[0]);
  const auto inputs = static_cast<std::size_t>(p.shape[1]);
  ASSERT_EQ(outputs, 55u);
  EXPECT_EQ(values[1] - values[0], static_cast<float>(outputs)) << "neighbours in a row are a stored row apart";
  EXPECT_EQ(values[inputs] - values[0], 1.0F);
}

TEST_F(HfWeightsFiles, PiecesAreTheWhole) {
  const HfWeights weights(root_);
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

}  // namespace
}  // namespace tandem
