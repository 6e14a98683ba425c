// Magnitudes that GPU kernels write beside their results: matrices quantized by them have the codes that a pass of its
// own gives, and the results have the bits that they have without.
#include "gpu_ops/base/fp8_matrix.hpp"
#include "tests/cpu_ops/magnitudes.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

class MagnitudeKernel : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (const std::string why = bench().why_not(); !why.empty()) GTEST_SKIP() << why;
  }
};

/// Memory of a magnitude on the device, full of what an earlier tensor may have left.
struct MagnitudeMemory {
  MagnitudeMemory() : memory(bench().put(filled())) {}
  static std::int64_t floats() { return static_cast<std::int64_t>(bench().ops().magnitude_bytes() / sizeof(float)); }
  static Tensor filled() {
    Tensor t(DType::f32, {floats()});
    for (std::int64_t i = 0; i < t.count(); ++i) t.set(i, std::numeric_limits<float>::quiet_NaN());
    return t;
  }
  /// The largest of all parts.
  std::uint32_t value() const {
    const Tensor all = bench().get(memory);
    const auto* const of = static_cast<const gpu::Largest*>(all.view().data);
    EXPECT_LE(of->parts, gpu::most_fp8_parts);
    return *std::max_element(of->part, of->part + std::min<std::int64_t>(of->parts, gpu::most_fp8_parts));
  }
  void* data() const { return memory.view().data; }
  Operand memory;
};

/// Runs op(a, b), which writes two results at most, with magnitudes and without, and compares.
template <class Op>
void expect_magnitudes(const Shape& shape, DType type, std::size_t offset, const std::string& what, const Op& op,
                       bool two = false) {
  const Tensor empty(type, shape);
  const auto results = under_all_schedules([&] {
    const Operand a = bench().put(empty, offset), b = bench().put(empty, offset), plain_a = bench().put(empty, offset),
                  plain_b = bench().put(empty, offset);
    const MagnitudeMemory of_a, of_b;
    op(MeasuredView(a, of_a.data()), MeasuredView(b, of_b.data()));
    op(MeasuredView(plain_a), MeasuredView(plain_b));
    std::vector<Tensor> all{bench().get(a), bench().get(plain_a), bench().get(b), bench().get(plain_b)};
    EXPECT_EQ(of_a.value(), magnitude_of(all[0])) << what << " " << shape.text() << " " << offset;
    if (two) {
      EXPECT_EQ(of_b.value(), magnitude_of(all[2])) << what << " " << shape.text() << " " << offset;
    }
    return all;
  });
  EXPECT_SAME_BITS(results[0], results[1]) << what;
  EXPECT_SAME_BITS(results[2], results[3]) << what;
}

/// Rows that a warp takes and rows that a block takes, both held in registers or not, and more of them than there are
/// parts.
TEST_P(MagnitudeKernel, IsThatOfTheResultOfANorm) {
  const Values few{"normal numbers"};
  for (const Shape& shape : {Shape{1, 1}, Shape{3, 22}, Shape{5, 64}, Shape{9, 1024}, Shape{3, 1030}, Shape{3, 2048},
                             Shape{2, 8200}, Shape{4100, 8}}) {
    for (const Values& values : shape.count() > 4000 ? std::vector<Values>{few} : all_values()) {
      const NormOperands of(values, GetParam(), shape);
      for (const std::size_t offset : offsets(GetParam())) {
        const Operand x = bench().put(of.x, offset), w = bench().put(of.weight);
        const Operand mean = bench().put(Tensor(DType::f32, {shape[0]})),
                      rstd = bench().put(Tensor(DType::f32, {shape[0]}));
        Ops& ops = bench().ops();
        const StreamView s = bench().stream();
        expect_magnitudes(shape, GetParam(), offset, "layer_norm of " + values.name,
                          [&](MeasuredView y, MeasuredView) { ops.layer_norm(x, w, w, y, mean, rstd, 1e-5F, s); });
        expect_magnitudes(shape, GetParam(), offset, "rms_norm of " + values.name, [&](MeasuredView y, MeasuredView) {
          ops.rms_norm(x, NormWeight(w, 1.0F), y, rstd, 1e-5F, s);
        });
      }
    }
  }
}

TEST_P(MagnitudeKernel, IsThatOfTheResultsOfActivations) {
  for (const Shape& shape : {Shape{1, 1}, Shape{5, 55}, Shape{7, 300}}) {
    for (const Values& values : all_values()) {
      const NormOperands of(values, GetParam(), shape);
      for (const std::size_t offset : offsets(GetParam())) {
        const Operand x = bench().put(of.x, offset), up = bench().put(of.up, offset), dy = bench().put(of.dy, offset);
        Ops& ops = bench().ops();
        const StreamView s = bench().stream();
        using Out = const MeasuredView&;
        const auto expect = [&](const char* op, const auto& run, bool two = false) {
          expect_magnitudes(shape, GetParam(), offset, std::string(op) + " of " + values.name, run, two);
        };
        expect("gelu", [&](Out y, Out) { ops.gelu(x, y, s); });
        expect("gelu_backward", [&](Out dx, Out) { ops.gelu_backward(dy, x, dx, s); });
        expect("swiglu", [&](Out y, Out) { ops.swiglu(x, up, y, s); });
        expect("geglu", [&](Out y, Out) { ops.geglu(x, up, y, s); });
        expect(
            "swiglu_backward", [&](Out g, Out u) { ops.swiglu_backward(dy, x, up, g, u, s); }, true);
        expect(
            "geglu_backward", [&](Out g, Out u) { ops.geglu_backward(dy, x, up, g, u, s); }, true);
      }
    }
  }
}

TEST_P(MagnitudeKernel, QuantizesAsAPassOfItsOwnDoes) {
  const Shape shape{48, 144};
  for (const Fp8Sums sums : {Fp8Sums::columns, Fp8Sums::rows, Fp8Sums::both}) {
    for (const Values& values : all_values()) {
      Random random(3);
      const Tensor x = values.tensor(random, GetParam(), shape);
      const auto floats = static_cast<std::int64_t>(gpu::fp8_bytes(shape[0], shape[1], sums) / sizeof(float));
      const auto results = under_all_schedules([&] {
        const Operand of = bench().put(x), with = bench().put(Tensor(DType::f32, {floats})),
                      without = bench().put(Tensor(DType::f32, {floats}));
        const MagnitudeMemory magnitude;
        Ops& ops = bench().ops();
        ops.measure(MeasuredView(of, magnitude.data()), bench().stream());
        ops.quantize(MeasuredView(of, magnitude.data()), {with.view().data, shape[0], shape[1], sums},
                     bench().stream());
        ops.quantize(of, {without.view().data, shape[0], shape[1], sums}, bench().stream());
        EXPECT_EQ(magnitude.value(), magnitude_of(x)) << values.name;
        return std::vector<Tensor>{bench().get(with), bench().get(without)};
      });
      // Scale and codes; between them lies the magnitude that only the second one has found.
      const auto parts = [&](const Tensor& t) {
        const auto* const bytes = t.bytes().data();
        const std::size_t first = align_up(gpu::fp8_head);
        std::vector<std::uint8_t> all(bytes, bytes + sizeof(float));
        all.insert(all.end(), bytes + first, bytes + gpu::fp8_bytes(shape[0], shape[1], sums));
        return all;
      };
      EXPECT_EQ(parts(results[0]), parts(results[1])) << values.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, MagnitudeKernel, ::testing::Values(DType::f32, DType::bf16), dtype_name);

}  // namespace
}  // namespace tandem::testing
