// How products are described to cuBLASLt, over a cuBLASLt made of this CPU: sides, strides, bias, sums, the choice of
// an algorithm, and what happens where there is none.
#include <cublasLt.h>
#include <gmock/gmock.h>

#include "core/numerics/activation.hpp"
#include "gpu_ops/base/matmul.hpp"
#include "gpu_ops/emulation/grid.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"
#include "tests/gpu_ops/kernels/cublaslt/fake_cublaslt.hpp"

namespace tandem::testing {
namespace {

using gpu::Product;

constexpr int hopper = 90;

/// How many elements further apart than they must be the rows of a, b and c are.
struct Gaps {
  std::int64_t a = 3, b = 2, c = 5;
};

/// Operands of one product.
struct Operands {
  Operands(Random& random, std::int64_t m, std::int64_t n, std::int64_t k, bool ta, bool tb, DType result,
           const Gaps& gaps = {})
      : a(random.tensor(DType::bf16, {ta ? k : m, (ta ? m : k) + gaps.a})),
        b(random.tensor(DType::bf16, {tb ? n : k, (tb ? k : n) + gaps.b})),
        bias(random.tensor(DType::bf16, {n})),
        c(random.tensor(result, {m, n + gaps.c})),
        product{.m = m,
                .n = n,
                .k = k,
                .a = {a.view().data, DType::bf16, a.view().shape[1], ta},
                .b = {b.view().data, DType::bf16, b.view().shape[1], tb},
                .c = c.view().data,
                .c_dtype = result,
                .c_stride = n + gaps.c} {}
  Tensor a, b, bias, c;
  Product product;
};

/// Matrix that is added to a product.
enum class Addend : std::uint8_t { none, result, other };

class CublasLt : public ::testing::Test {
 protected:
  void SetUp() override { fake_cublaslt::reset({}); }
  std::unique_ptr<gpu::Matmul> matmul_ = gpu::make_matmul(hopper);
  Random random_{31};
};

/// Two matrices of codes with their scales.
struct Codes {
  Codes(Random& random, std::int64_t rows, std::int64_t columns) : codes(DType::i32, {rows, columns / 4}) {
    auto* const bytes = static_cast<std::uint8_t*>(codes.view().data);
    for (std::int64_t i = 0; i < rows * columns; ++i) bytes[i] = static_cast<std::uint8_t>(random.bits() % 0x60);
  }
  gpu::Fp8Factor factor(Fp8Format format = Fp8Format::e4m3) const {
    return {static_cast<const std::uint8_t*>(codes.view().data), &scale, format};
  }
  Tensor codes;
  float scale = 0.03125F;
};

TEST_F(CublasLt, ProductsOfEightBitFactorsAreThePlainKernels) {
  const std::int64_t m = 48, n = 80, k = 112;
  const Codes a(random_, m, k), b(random_, n, k);
  const Tensor bias = random_.tensor(DType::bf16, {n});
  int products = 0;
  for (const DType result : {DType::bf16, DType::f32}) {
    for (const auto& [of_a, of_b] : {std::pair{Fp8Format::e4m3, Fp8Format::e4m3},
                                     {Fp8Format::e5m2, Fp8Format::e4m3},
                                     {Fp8Format::e4m3, Fp8Format::e5m2}}) {
      for (const bool adds : {false, true}) {
        Tensor c = random_.tensor(result, {m, n}), expected = c;
        gpu::Fp8Product p{.m = m, .n = n, .k = k, .a = a.factor(of_a), .b = b.factor(of_b)};
        p.bias = result == DType::bf16 ? bias.view().as<bf16>() : nullptr;
        p.c_dtype = result;
        p.c = c.view().data;
        p.addend = adds ? p.c : nullptr;
        matmul_->run(p, nullptr, nullptr);
        p.c = expected.view().data;
        p.addend = adds ? p.c : nullptr;
        gpu::plain_matmul(p, nullptr);
        EXPECT_CLOSE(c, expected);
        EXPECT_EQ(fake_cublaslt::counters().fp8, ++products);
      }
    }
  }
  EXPECT_EQ(fake_cublaslt::counters().fast, 0);
}

TEST_F(CublasLt, FastAccumulationAndCardsWithoutEightBitFactorsAreHonoured) {
  const Codes a(random_, 16, 32), b(random_, 48, 32);
  Tensor c(DType::bf16, {16, 48});
  gpu::Fp8Product p{.m = 16, .n = 48, .k = 32, .a = a.factor(), .b = b.factor(), .c = c.view().data};
  p.sums = Fp8Accumulation::fast;
  matmul_->run(p, nullptr, nullptr);
  EXPECT_EQ(fake_cublaslt::counters().fast, 1);
  EXPECT_TRUE(matmul_->has_fp8());
  EXPECT_TRUE(gpu::make_matmul(89)->has_fp8());
  const auto ampere = gpu::make_matmul(86);
  EXPECT_FALSE(ampere->has_fp8());
  EXPECT_THROW(ampere->run(p, nullptr, nullptr), DeviceError);
}

TEST_F(CublasLt, EveryProductIsThePlainKernels) {
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      for (const DType result : {DType::bf16, DType::f32}) {
        for (const auto addend : {Addend::none, Addend::result, Addend::other}) {
          for (const bool with_bias : {false, true}) {
            SCOPED_TRACE(std::string(ta ? "a'" : "a") + (tb ? " b'" : " b") + " + " +
                         std::to_string(static_cast<int>(addend)));
            Operands x(random_, 7, 11, 5, ta, tb, result);
            const Tensor other = random_.tensor(result, {7, 11 + 5});
            if (addend == Addend::other) x.product.addend = other.view().data;
            x.product.bias = with_bias ? x.bias.view().as<bf16>() : nullptr;
            Tensor expected = x.c;
            Product plain = x.product;
            plain.c = expected.view().data;
            if (addend == Addend::result) {
              x.product.addend = x.product.c;
              plain.addend = plain.c;
            }
            gpu::plain_matmul(plain, nullptr);
            matmul_->run(x.product, nullptr, nullptr);
            // Between rows, and behind the last, nothing is written: all of the tensor is compared.
            EXPECT_CLOSE(x.c, expected);
          }
        }
      }
    }
  }
  EXPECT_GT(fake_cublaslt::counters().products, 20);
}

/// A vocabulary whose size is no multiple of eight: its logits, the gradients of the input and of the weight; and
/// others in which it is found along memory.
TEST_F(CublasLt, OfLargeExtentsTheLibraryIsGivenWholePackets) {
  constexpr std::int64_t odd = 4099, gap = 5;  // 4104 elements from row to row
  struct Case {
    std::int64_t m, n, k;
    bool ta, tb;
    Gaps gaps;
  };
  const Case cases[] = {{8, odd, 16, false, true, {0, 0, gap}},
                        {8, odd, 16, true, false, {0, gap, gap}},
                        {8, 16, odd, false, false, {gap, 0, 0}},
                        {8, 16, odd, true, true, {0, gap, 0}},
                        {odd, 16, 8, true, false, {gap, 0, 0}}};
  for (const Case& of : cases) {
    for (const DType result : {DType::bf16, DType::f32}) {
      for (const bool adds : {false, true}) {
        SCOPED_TRACE(::testing::Message() << of.m << " x " << of.n << " of " << of.k << (adds ? ", added" : ""));
        fake_cublaslt::reset({});
        Operands x(random_, of.m, of.n, of.k, of.ta, of.tb, result, of.gaps);
        if (result == DType::bf16 && of.k != odd) x.product.bias = x.bias.view().as<bf16>();
        Tensor expected = x.c;
        Product plain = x.product;
        plain.c = expected.view().data;
        if (adds) {
          x.product.addend = x.product.c;
          plain.addend = plain.c;
        }
        gpu::plain_matmul(plain, nullptr);
        matmul_->run(x.product, nullptr, nullptr);
        EXPECT_CLOSE(x.c, expected);
        // Sums onto which something is added are left: it would be rounded twice.
        const bool divided = of.k != odd || !adds;
        EXPECT_EQ(fake_cublaslt::counters().products, divided ? 2 : 1);
        EXPECT_EQ(fake_cublaslt::counters().ragged, divided ? 0 : 1);
      }
    }
  }
}

TEST_F(CublasLt, SmallRaggedAndWholeProductsAreOne) {
  for (const auto& [n, gap] : {std::pair{4091, 5}, {4104, 0}, {4099, 2}}) {
    fake_cublaslt::reset({});
    Operands x(random_, 3, n, 16, false, true, DType::f32, {0, 0, gap});
    matmul_->run(x.product, nullptr, nullptr);
    EXPECT_EQ(fake_cublaslt::counters().products, 1) << n;
  }
}

/// A product with rows of eight-element packets, and GELU's input.
struct GeluOperands {
  GeluOperands(Random& random, gpu::Epilogue epilogue)
      : operands(random, 7, 19, 5, false, true, DType::bf16), input(random.tensor(DType::bf16, {7, 24})) {
    operands.product.epilogue = epilogue;
    operands.product.input = input.view().data;
  }
  Operands operands;
  Tensor input;
};

/// The product in fp32, with or without bias.
float sum_of(const Operands& x, std::int64_t row, std::int64_t column, bool with_bias) {
  double sum = with_bias ? x.bias.get(column) : 0.0;
  for (std::int64_t l = 0; l < x.product.k; ++l) {
    sum += x.a.get(row * x.product.a.stride + l) * x.b.get(column * x.product.b.stride + l);
  }
  return static_cast<float>(sum);
}

TEST_F(CublasLt, GeluAndItsGradientAreMadeOfTheSumBeforeItIsRounded) {
  for (const bool with_bias : {false, true}) {
    GeluOperands forward(random_, gpu::Epilogue::gelu), backward(random_, gpu::Epilogue::gelu_gradient);
    Operands &x = forward.operands, &d = backward.operands;
    x.product.bias = with_bias ? x.bias.view().as<bf16>() : nullptr;
    Tensor up = forward.input, act = x.c, dup = d.c;
    for (std::int64_t row = 0; row < 7; ++row) {
      for (std::int64_t column = 0; column < 19; ++column) {
        const std::int64_t i = row * 24 + column;
        const float sum = sum_of(x, row, column, with_bias);
        up.set(i, sum);
        act.set(i, numerics::gelu(sum));
        const auto input = static_cast<float>(backward.input.get(i));
        dup.set(i, sum_of(d, row, column, false) * numerics::gelu_derivative(input));
      }
    }
    ASSERT_TRUE(matmul_->fuses(x.product));
    ASSERT_TRUE(matmul_->fuses(d.product));
    matmul_->run(x.product, nullptr, nullptr);
    matmul_->run(d.product, nullptr, nullptr);
    EXPECT_CLOSE(forward.input, up);
    EXPECT_CLOSE(x.c, act);
    EXPECT_CLOSE(d.c, dup);
  }
  EXPECT_EQ(fake_cublaslt::counters().fused, 4);
}

TEST_F(CublasLt, FusesWhatTheLibraryTakesAndNothingElse) {
  for (const gpu::Epilogue epilogue : {gpu::Epilogue::gelu, gpu::Epilogue::gelu_gradient}) {
    GeluOperands good(random_, epilogue);
    EXPECT_TRUE(matmul_->fuses(good.operands.product));
    const auto without = [&](auto&& change) {
      Product p = good.operands.product;
      change(p);
      return matmul_->fuses(p);
    };
    EXPECT_FALSE(without([](Product& p) { p.c_stride = 23; })) << "rows of no whole packets";
    EXPECT_FALSE(without([](Product& p) { p.input = static_cast<bf16*>(p.input) + 4; })) << "not aligned";
    EXPECT_FALSE(without([](Product& p) { p.addend = p.c; }));
    EXPECT_FALSE(without([](Product& p) { p.c_dtype = DType::f32; }));
    EXPECT_FALSE(without([](Product& p) { p.a.dtype = DType::f32; }));
    EXPECT_FALSE(without([](Product& p) { p.m = 0; }));
    for (const int refusal : {CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE}) {
      fake_cublaslt::reset({.epilogue_status = refusal});
      EXPECT_FALSE(gpu::make_matmul(hopper)->fuses(good.operands.product)) << refusal;
      fake_cublaslt::reset({});
    }
    EXPECT_THROW(gpu::plain_matmul(good.operands.product, nullptr), MisuseError);
  }
}

TEST_F(CublasLt, FusesOnCardsThatGainByIt) {
  for (const gpu::Epilogue epilogue : {gpu::Epilogue::gelu, gpu::Epilogue::gelu_gradient}) {
    const GeluOperands x(random_, epilogue);
    fake_cublaslt::reset({});
    for (const int capability : {80, 86, 89, 110, 120, 121}) {
      EXPECT_FALSE(gpu::make_matmul(capability)->fuses(x.operands.product)) << capability;
      EXPECT_FALSE(gpu::make_matmul(capability)->fuses_any()) << capability;
    }
    EXPECT_EQ(fake_cublaslt::counters().choices, 0) << "whatever the library says";
    for (const int capability : {90, 100, 103}) {
      EXPECT_TRUE(gpu::make_matmul(capability)->fuses(x.operands.product)) << capability;
      EXPECT_TRUE(gpu::make_matmul(capability)->fuses_any()) << capability;
    }
  }
}

/// Operations that LinearOps checks, over this library too: with epilogues and, where it offers none, without.
TEST_F(CublasLt, OperationsTakeEpiloguesWhereTheyAreOffered) {
  const auto run = [&](int epilogue_status, std::int64_t rows) {
    fake_cublaslt::reset({.epilogue_status = epilogue_status});
    Random random(8);
    bench().lend({.tokens = rows, .channels = 32, .activations = DType::bf16});
    const Operand x = bench().put(random.tensor(DType::bf16, {rows, 16}));
    const Operand w = bench().put(random.tensor(DType::bf16, {32, 16}));
    const Operand up = bench().put(Tensor(DType::bf16, {rows, 32})), act = bench().put(Tensor(DType::bf16, {rows, 32}));
    bench().ops().linear_gelu(x, w, {}, up, act, bench().stream());
    const Operand dup = bench().put(Tensor(DType::bf16, {rows, 16}));
    bench().ops().linear_gelu_backward_input(act, w, x, dup, bench().stream());
    return fake_cublaslt::counters().fused;
  };
  EXPECT_FALSE(bench().ops().repeats_gelu()) << "what is fused is not rounded in between";
  EXPECT_EQ(run(0, 3), 2);
  EXPECT_EQ(run(CUBLAS_STATUS_NOT_SUPPORTED, 4), 0);
}

TEST_F(CublasLt, AnAlgorithmIsChosenOnceForEachShape) {
  Operands x(random_, 7, 11, 5, false, true, DType::bf16), other(random_, 7, 12, 5, false, true, DType::bf16);
  for (int i = 0; i < 3; ++i) matmul_->run(x.product, nullptr, nullptr);
  EXPECT_EQ(fake_cublaslt::counters().choices, 1);
  matmul_->run(other.product, nullptr, nullptr);
  EXPECT_EQ(fake_cublaslt::counters().choices, 2);
  EXPECT_EQ(fake_cublaslt::counters().products, 4);
}

TEST_F(CublasLt, EachCallTakesItsOwnBias) {
  Operands x(random_, 3, 4, 2, false, true, DType::bf16);
  const Tensor second = random_.tensor(DType::bf16, {4});
  x.product.bias = x.bias.view().as<bf16>();
  matmul_->run(x.product, nullptr, nullptr);
  x.product.bias = second.view().as<bf16>();
  matmul_->run(x.product, nullptr, nullptr);
  Tensor expected = x.c;
  x.product.c = expected.view().data;
  gpu::plain_matmul(x.product, nullptr);
  EXPECT_CLOSE(x.c, expected);
}

TEST_F(CublasLt, WhatTheLibraryDoesNotTakeGoesToThePlainKernel) {
  fake_cublaslt::reset({.has_algorithms = false});
  Operands x(random_, 7, 11, 5, false, true, DType::bf16);
  Tensor expected = x.c;
  Product plain = x.product;
  plain.c = expected.view().data;
  gpu::plain_matmul(plain, nullptr);
  std::vector<std::string> told;
  matmul_ = gpu::make_matmul(hopper, [&](const std::string& why) { told.push_back(why); });
  matmul_->run(x.product, nullptr, nullptr);
  EXPECT_SAME_BITS(x.c, expected);
  matmul_->run(x.product, nullptr, nullptr);
  EXPECT_THAT(told, ::testing::ElementsAre(::testing::HasSubstr("(7 x 11 of 5 products) runs in a plain kernel")));
  // f32 factors do not even reach it.
  const Tensor a = random_.tensor(DType::f32, {3, 3}), b = random_.tensor(DType::f32, {3, 3});
  Tensor c(DType::f32, {3, 3});
  const int asked = fake_cublaslt::counters().choices;
  matmul_->run({.m = 3,
                .n = 3,
                .k = 3,
                .a = {a.view().data, DType::f32, 3, false},
                .b = {b.view().data, DType::f32, 3, false},
                .c = c.view().data,
                .c_dtype = DType::f32,
                .c_stride = 3},
               nullptr, nullptr);
  EXPECT_EQ(fake_cublaslt::counters().choices, asked);
  EXPECT_NE(c.get(0), 0.0);
}

TEST_F(CublasLt, AFailureIsADeviceErrorThatNamesIt) {
  fake_cublaslt::reset({.product_status = 14});
  Operands x(random_, 7, 11, 5, false, true, DType::bf16);
  try {
    matmul_->run(x.product, nullptr, nullptr);
    FAIL() << "the failure was not seen";
  } catch (const DeviceError& error) {
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::HasSubstr("cuBLASLt"), ::testing::HasSubstr("14")));
  }
}

TEST_F(CublasLt, ALostDeviceIsNamedWhereAProductReportsIt) {
  fake_cublaslt::reset({.product_status = CUBLAS_STATUS_EXECUTION_FAILED});
  Operands x(random_, 7, 11, 5, false, true, DType::bf16);
  emulation::lose_device(true);
  EXPECT_THAT([&] { matmul_->run(x.product, nullptr, nullptr); },
              ::testing::ThrowsMessage<DeviceError>(::testing::HasSubstr("device lost")));
  emulation::lose_device(false);
}

TEST_F(CublasLt, AProductThatIsWrongWithoutItsEpilogueTooIsAnError) {
  GeluOperands x(random_, gpu::Epilogue::gelu);
  x.operands.product.c_stride = 16;  // less than a row
  EXPECT_THROW((void)matmul_->fuses(x.operands.product), DeviceError);
  x.operands.product.c_stride = 24;
  EXPECT_TRUE(matmul_->fuses(x.operands.product));
}

TEST_F(CublasLt, TheKeyNamesTheVersion) { EXPECT_EQ(gpu::matmul_key(), "cublaslt 130000"); }

}  // namespace
}  // namespace tandem::testing
