// Loss of pairs by a GPU kernel: rewards and factors of the host's bits, losses within the rounding of a logarithm.
#include "cpu_ops/kernels/kernels.hpp"
#include "cpu_ops/reference/reference.hpp"
#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {
namespace {

class PreferenceOps : public OpsTest {};

TEST_P(PreferenceOps, AreThoseOfTheHost) {
  // Fewer tokens than a block has threads, and several pieces with a short last one.
  for (const auto& shape : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 55}, {4, 128}, {22, 1001}}) {
    const std::int64_t pairs = shape.first, length = shape.second;  // a lambda captures no part of a pair
    SCOPED_TRACE(length);
    Random random(3);
    Tensor losses = random.tensor(DType::f32, {2 * pairs, length}), reference(DType::f32, {2 * pairs});
    for (std::int64_t i = 0; i < losses.count(); ++i) losses.set(i, static_cast<float>(std::abs(losses.get(i))));
    for (std::int64_t i = 0; i < 2 * pairs; ++i)
      reference.set(i, static_cast<float>(-length) * 0.8F + random.normal(9));
    Tensor factors(DType::f32, {2 * pairs}), results(DType::f32, {pairs, 3});
    const auto arena = make_parallel(1);
    fast::preference_loss(*arena, {losses, reference, 0.1F, factors, results});
    const auto made = under_all_schedules([&] {
      const Operand l = bench().put(losses), r = bench().put(reference);
      const Operand f = bench().put(Tensor(DType::f32, {2 * pairs})), p = bench().put(Tensor(DType::f32, {pairs, 3}));
      ops().preference_loss({l, r, 0.1F, f, p}, stream());
      return std::vector<Tensor>{bench().get(f), bench().get(p)};
    });
    EXPECT_SAME_BITS(made[0], factors);
    for (std::int64_t i = 0; i < 3 * pairs; ++i) {
      if (i % 3 == 0) {
        EXPECT_NEAR(made[1].get(i), results.get(i), 2e-7 * results.get(i));
      } else {
        EXPECT_EQ(made[1].get(i), results.get(i)) << i;
      }
    }
    EXPECT_TRUE(made[0].intact() && made[1].intact());
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, PreferenceOps, ::testing::Values(DType::f32));

}  // namespace
}  // namespace tandem::testing
