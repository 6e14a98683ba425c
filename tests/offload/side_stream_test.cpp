// Weights that a second stream reads stay what they are until it has read them, however late that is.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

constexpr auto late = std::chrono::milliseconds(20);

/// Copies of each layer's largest parameter, taken by a stream that lags.
class LateReader {
 public:
  explicit LateReader(ToyTrainer& t)
      : t_(t), seen_(static_cast<std::size_t>(t.layout().layer_count())), side_(t.device().make_stream("side")) {}

  void read(int layer) {
    WeightsGuard weights = t_.engine().fetch(layer, t_.stream());
    weights.also_used_on(side_);
    const TensorView w = weights[largest(layer).name];
    std::vector<bf16>* const to = &seen_[static_cast<std::size_t>(layer)];
    t_.toy_device().enqueue(side_, "late reader", w, {}, [w, to](const bf16* values, void*) {
      std::this_thread::sleep_for(late);
      to->assign(values, values + w.count());
    });
  }

  /// The weights are those of the masters as they are now.
  void expect_right() {
    t_.device().synchronize(side_);
    for (int l = 0; l < t_.layout().layer_count(); ++l) {
      const Parameter& p = t_.layout().parameter(largest(l).full_name);
      std::vector<float> masters(static_cast<std::size_t>(p.count));
      t_.engine().read(p, StateArray::master, masters);
      const std::vector<bf16>& seen = seen_[static_cast<std::size_t>(l)];
      ASSERT_EQ(seen.size(), masters.size());
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < seen.size(); ++i) wrong += seen[i] == numerics::weight_of_master(masters[i]) ? 0 : 1;
      EXPECT_EQ(wrong, 0) << "layer " << l;
    }
  }

 private:
  const Parameter& largest(int layer) const {
    const std::vector<Parameter>& all = t_.layout().layer(layer).parameters;
    return *std::max_element(all.begin(), all.end(),
                             [](const Parameter& a, const Parameter& b) { return a.count < b.count; });
  }

  ToyTrainer& t_;
  std::vector<std::vector<bf16>> seen_;  ///< queued work writes them: outlive the stream
  Stream side_;
};

ToyOptions of_one_buffer(const char* policy) {
  ToyOptions o = toy(policy);
  o.offload.resident_layers = 0;
  o.offload.prefetch_layers = 1;
  return o;
}

class SideStream : public ::testing::TestWithParam<const char*> {};

TEST_P(SideStream, ThatReadsALayersWeightsLateSeesThemInAnEvaluation) {
  ToyTrainer t(of_one_buffer(GetParam()));
  LateReader reader(t);
  for (int pass = 0; pass < 2; ++pass) {
    const auto scope = t.engine().evaluation();
    for (int l = 0; l < t.layout().layer_count(); ++l) reader.read(l);
  }
  reader.expect_right();
}

TEST_P(SideStream, ThatReadsALayersWeightsLateSeesThemBetweenTwoUpdates) {
  ToyTrainer t(of_one_buffer(GetParam()));
  LateReader reader(t);
  ToyResult result;
  t.step(0, result);
  t.engine().begin_step({.lr = 1e-2});
  for (int l = 0; l < t.layout().layer_count(); ++l) reader.read(l);
  t.engine().abort_step();
  reader.expect_right();
  t.step(1, result);
}

INSTANTIATE_TEST_SUITE_P(Policies, SideStream, ::testing::Values("host", "stream", "interleave:2"));

}  // namespace
}  // namespace tandem
