// Weights of bitsandbytes: codes and scales of tandem's formulas are its own, its checkpoints are taken over bit for
// bit, and what is stored otherwise is refused by name. fixtures/ is what bitsandbytes wrote (make_fixtures.py).
#include "train/hf/bitsandbytes.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/error.hpp"
#include "core/numerics/weight_codes.hpp"
#include "models/transformer/transformer.hpp"
#include "train/hf/hf_weights.hpp"
#include "train/hf/model_source.hpp"
#include "train/hf/trained_layout.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

const fs::path fixtures = fs::path(TANDEM_SOURCE_DIR) / "tests" / "train" / "fixtures";

std::vector<float> floats_of(const StoredTensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count));
  widen(tensor, 0, values);
  return values;
}

struct Taken : CodeSink {
  Taken(WeightCode code, const CodedShape& shape)
      : bits(code_bits(code)),
        all_codes(static_cast<std::size_t>((shape.count() * bits + 7) / 8)),
        all_scales(static_cast<std::size_t>(scale_floats(code, shape))) {}
  void codes(std::int64_t first, std::span<const std::byte> part) override {
    std::ranges::copy(part, all_codes.begin() + first * bits / 8);
  }
  void scales(std::int64_t first, std::span<const float> part) override {
    std::memcpy(all_scales.data() + first, part.data(), part.size_bytes());
  }
  int bits;
  std::vector<std::byte> all_codes;
  std::vector<float> all_scales;
};

Taken encoded_as(WeightCode code, const CodedShape& shape, const std::vector<float>& values) {
  Taken taken(code, shape);
  WeightEncoder encoder(code, shape, "w", taken);
  encoder.add(values);
  encoder.finish();
  return taken;
}

/// How many bytes of `ours` differ from those of a tensor.
std::size_t differing(const void* ours, const StoredTensor& theirs) {
  const auto* const bytes = static_cast<const std::byte*>(ours);
  std::size_t count = 0;
  for (std::size_t i = 0; i < theirs.bytes.size(); ++i) count += bytes[i] != theirs.bytes[i] ? 1 : 0;
  return count;
}

class BitsAndBytesCodes : public ::testing::Test {
 protected:
  const StoredTensor& tensor(const char* name) const { return file_.tensors().at(name); }
  const SafetensorsReader file_{fixtures / "codes.safetensors"};
  const CodedShape shape_{1, 300, 64};
  const std::vector<float> weight_ = floats_of(tensor("weight"));
};

TEST_F(BitsAndBytesCodes, OfNf4AreOurs) {
  const Taken taken = encoded_as(WeightCode::nf4, shape_, weight_);
  EXPECT_EQ(differing(taken.all_codes.data(), tensor("nf4.codes")), 0U);
  EXPECT_EQ(differing(taken.all_scales.data(), tensor("nf4.absmax")), 0U);
  std::vector<float> values(weight_.size());
  decode_range(WeightCode::nf4, shape_, taken.all_codes.data(), taken.all_scales.data(), 0, values);
  EXPECT_EQ(differing(values.data(), tensor("nf4.values")), 0U);
}

TEST_F(BitsAndBytesCodes, OfScalesInBytesAreOurs) {
  std::vector<float> map(256);
  for (std::uint32_t byte = 0; byte < 256; ++byte) map[byte] = numerics::scale_of_byte(byte);
  EXPECT_EQ(differing(map.data(), tensor("nf4_double.map")), 0U);
  const Taken taken = encoded_as(WeightCode::nf4_double, shape_, weight_);
  EXPECT_EQ(differing(taken.all_scales.data(), tensor("nf4_double.absmax")), 0U);
  // The mean is summed in another order there, so that it, and what is left of the scales, may differ in the last bit.
  const auto scales = numerics::nf4_scales(WeightCode::nf4_double, shape_, taken.all_scales.data());
  const float offset = floats_of(tensor("nf4_double.offset"))[0];
  EXPECT_NEAR(scales.of_bytes[0], offset, 1.2e-7 * offset);
  const std::vector<float> nested = floats_of(tensor("nf4_double.nested_absmax"));
  for (std::size_t i = 0; i < nested.size(); ++i) EXPECT_NEAR(scales.of_bytes[1 + i], nested[i], 2.4e-7F * offset) << i;
}

/// Codes, scales and offset of bitsandbytes make its values, bit for bit.
TEST_F(BitsAndBytesCodes, WithScalesInBytesMeanTheirValues) {
  Taken taken = encoded_as(WeightCode::nf4_double, shape_, weight_);
  std::memcpy(taken.all_scales.data(), tensor("nf4_double.absmax").bytes.data(), 300);
  taken.all_scales[75] = floats_of(tensor("nf4_double.offset"))[0];
  std::ranges::copy(floats_of(tensor("nf4_double.nested_absmax")), taken.all_scales.begin() + 76);
  std::vector<float> values(weight_.size());
  decode_range(WeightCode::nf4_double, shape_, taken.all_codes.data(), taken.all_scales.data(), 0, values);
  EXPECT_EQ(differing(values.data(), tensor("nf4_double.values")), 0U);
}

/// bitsandbytes multiplies by 127 / largest where tandem divides by largest / 127: a code differs where both lie beside
/// a tie.
TEST_F(BitsAndBytesCodes, OfInt8AreOurs) {
  const Taken taken = encoded_as(WeightCode::int8, shape_, weight_);
  EXPECT_LE(differing(taken.all_codes.data(), tensor("int8.codes")), 2U);
  const std::vector<float> largest = floats_of(tensor("int8.absmax"));
  for (std::size_t row = 0; row < largest.size(); ++row) EXPECT_EQ(taken.all_scales[row], largest[row] / 127.0F) << row;
}

/// The tiny Llama in one of both forms; its layout with the linear layers in a code.
class BitsAndBytesModel : public ::testing::TestWithParam<const char*> {
 protected:
  static ParameterLayout coded(const ModelConfig& config, WeightCode code, bool trainable = false) {
    const ParameterLayout plain = layout_of(config);
    ParameterLayout layout;
    for (const Layer& layer : plain.layers()) {
      auto builder = layout.add_layer(layer.name);
      for (const Parameter& p : layer.parameters) {
        ParameterOptions options = p.options;
        const bool linear = layer.name.starts_with("block.") && p.shape.rank() == 2;
        options.trainable = trainable;
        if (linear && code != WeightCode::none) {
          options.weight = DType::bf16;
          options.code = code;
        }
        builder.add(p.name, p.shape, options);
      }
    }
    return layout;
  }
  WeightCode stored() const { return GetParam() == std::string_view("nf4") ? WeightCode::nf4 : WeightCode::nf4_double; }
  std::string refusal(const ParameterLayout& layout) const {
    try {
      check_weights(source_, layout);
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  }
  /// Values of a matrix as bitsandbytes dequantizes them.
  std::vector<float> expected(const Parameter& p) const {
    return floats_of(values_.tensors().at(hf_tensor_of(source_.config, p).name + "." + GetParam()));
  }
  const ModelSource source_ = find_model((fixtures / GetParam()).string());
  const SafetensorsReader values_{fixtures / "values.safetensors"};
};

std::vector<float> as_bf16(std::vector<float> values) {
  for (float& x : values) x = numerics::bf16_to_float(numerics::round_to_bf16(x));
  return values;
}

TEST_P(BitsAndBytesModel, IsReadAsItsValues) {
  EXPECT_EQ(source_.config.stored_code, stored());
  const ParameterLayout layout = coded(source_.config, WeightCode::none);
  const ParameterValues values = initial_values(source_, layout, 0);
  int matrices = 0;
  for (const Parameter* p : layout.owned_parameters()) {
    if (p->shape.rank() != 2 || !p->full_name.starts_with("block.")) continue;
    std::vector<float> read(static_cast<std::size_t>(p->count));
    const auto half = std::span(read).first(read.size() / 2 + 1);
    values(*p, 0, half);
    values(*p, std::ssize(half), std::span(read).subspan(half.size()));
    EXPECT_EQ(as_bf16(read), expected(*p)) << p->full_name;
    ++matrices;
  }
  EXPECT_EQ(matrices, 7);
}

TEST_P(BitsAndBytesModel, IsTakenOverBitForBit) {
  for (const WeightCode code : {WeightCode::nf4, stored()}) {
    const ParameterLayout layout = coded(source_.config, code);
    const ParameterCodes codes = initial_codes(source_);
    for (const Parameter* p : layout.owned_parameters()) {
      if (!p->coded()) continue;
      const CodedShape shape = p->coded_shape();
      Taken taken(code, shape);
      ASSERT_TRUE(codes(*p, taken)) << p->full_name;
      std::vector<float> read(static_cast<std::size_t>(p->count));
      decode_range(code, shape, taken.all_codes.data(), taken.all_scales.data(), 0, read);
      EXPECT_EQ(as_bf16(read), expected(*p)) << p->full_name;
      if (code != WeightCode::nf4) continue;
      // Scales are what its blocks reach: encoded again, the values have these codes and scales.
      const Taken again = encoded_as(code, shape, read);
      EXPECT_EQ(again.all_codes, taken.all_codes) << p->full_name;
      EXPECT_EQ(again.all_scales, taken.all_scales) << p->full_name;
    }
  }
}

TEST_P(BitsAndBytesModel, IsRefusedWhereItWouldBeRoundedAgain) {
  EXPECT_THAT(refusal(coded(source_.config, WeightCode::none, /*trainable=*/true)),
              AllOf(HasSubstr("NF4 by bitsandbytes"), HasSubstr("--base nf4")));
  EXPECT_THAT(refusal(coded(source_.config, WeightCode::int8)), HasSubstr("rounded again"));
  EXPECT_THAT(refusal(coded(source_.config, WeightCode::fp8)), HasSubstr("rounded again"));
  EXPECT_EQ(refusal(coded(source_.config, WeightCode::nf4_double)).find("scales in fp32") != std::string::npos,
            stored() == WeightCode::nf4);
}

INSTANTIATE_TEST_SUITE_P(Stored, BitsAndBytesModel, ::testing::Values("nf4", "nf4_double"),
                         [](const auto& instance) { return std::string(instance.param); });

/// A copy of the fixture in which a piece of text of one file is another one of the same length.
class ChangedModel : public ::testing::Test {
 protected:
  void SetUp() override { fs::copy(fixtures / "nf4_double", root_, fs::copy_options::recursive); }
  void TearDown() override { fs::remove_all(root_); }
  void change(const char* file, const std::string& from, const std::string& to) const {
    std::ifstream in(root_ / file, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(in), {}};
    in.close();
    ASSERT_NE(text.find(from), std::string::npos) << from;
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
      text.replace(at, from.size(), to);
    }
    std::ofstream(root_ / file, std::ios::binary) << text;
  }
  std::string refusal() const {
    try {
      const ModelSource source = find_model(root_.string());
      check_weights(source, forward_layout(source.config));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  const fs::path root_ = fs::path(::testing::TempDir()) / ("tandem_bitsandbytes_" + std::to_string(::getpid()));
};

TEST_F(ChangedModel, AsItIsItIsRead) { EXPECT_EQ(refusal(), ""); }

TEST_F(ChangedModel, OtherMethodsAreRefusedByName) {
  change("config.json", "\"bitsandbytes\"", "\"gptq\"");
  EXPECT_THAT(refusal(), HasSubstr("GPTQ"));
  change("config.json", "\"gptq\"", "\"mxfp4\"");
  EXPECT_THAT(refusal(), HasSubstr("MXFP4"));
  change("config.json", "\"mxfp4\"", "\"compressed-tensors\"");
  EXPECT_THAT(refusal(), HasSubstr("compressed-tensors"));
  change("config.json", "\"compressed-tensors\"", "\"fp8\"");
  EXPECT_THAT(refusal(), HasSubstr("FP8"));
  change("config.json", "\"fp8\"", "\"somebody's\"");
  EXPECT_THAT(refusal(), HasSubstr("somebody's"));
  change("config.json", "\"quant_method\"", "\"other_method\"");
  EXPECT_THAT(refusal(), HasSubstr("does not say how"));
}

TEST_F(ChangedModel, OtherTypesOfBitsandbytesAreRefusedByName) {
  change("config.json", "\"nf4\"", "\"fp4\"");
  EXPECT_THAT(refusal(), HasSubstr("'fp4' by bitsandbytes"));
  change("config.json", "\"load_in_8bit\": false", "\"load_in_8bit\": true");
  EXPECT_THAT(refusal(), HasSubstr("int8 by bitsandbytes"));
}

TEST_F(ChangedModel, TensorsOfFp4AreRefusedByName) {
  change("model.safetensors", "bitsandbytes__nf4", "bitsandbytes__fp4");
  EXPECT_THAT(refusal(), HasSubstr("is FP4 by bitsandbytes"));
}

TEST_F(ChangedModel, OtherBlocksAreRefused) {
  change("model.safetensors", "\"blocksize\": 64", "\"blocksize\": 32");
  EXPECT_THAT(refusal(), HasSubstr("scales are for 32 elements"));
}

TEST_F(ChangedModel, AMissingPartIsNamed) {
  change("model.safetensors", ".nested_absmax", ".nested_abs___");
  EXPECT_THAT(refusal(), HasSubstr("nested_absmax is missing"));
}

TEST_F(ChangedModel, AnotherCodeBookIsRefused) {
  const float number = numerics::scale_of_byte(200), next = std::nextafter(number, 1.0F);
  const auto text = [](float x) { return std::string(reinterpret_cast<const char*>(&x), sizeof x); };
  change("model.safetensors", text(number), text(next));
  EXPECT_THAT(refusal(), HasSubstr("nested_quant_map"));
}

}  // namespace
}  // namespace tandem
