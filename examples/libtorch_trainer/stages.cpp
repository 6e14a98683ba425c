#include "stages.hpp"

namespace {

using torch::nn::LayerNorm;
using torch::nn::LayerNormOptions;
using torch::nn::Linear;

struct Stem final : Stage {
  Stem() { register_module("in", in); }
  torch::Tensor forward(torch::Tensor x) override { return in(x); }
  Linear in{shape::inputs, shape::width};
};

/// y = x + down(gelu(up(norm(x))))
struct Block final : Stage {
  Block() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  torch::Tensor forward(torch::Tensor x) override { return x + down(torch::gelu(up(norm(x)))); }
  LayerNorm norm{LayerNormOptions({shape::width})};
  Linear up{shape::width, shape::hidden}, down{shape::hidden, shape::width};
};

struct Head final : Stage {
  Head() {
    register_module("norm", norm);
    register_module("out", out);
  }
  torch::Tensor forward(torch::Tensor x) override { return out(norm(x)); }
  LayerNorm norm{LayerNormOptions({shape::width})};
  Linear out{shape::width, shape::classes};
};

}  // namespace

std::vector<std::shared_ptr<Stage>> make_stages() {
  std::vector<std::shared_ptr<Stage>> stages{std::make_shared<Stem>()};
  for (int i = 0; i < shape::blocks; ++i) stages.push_back(std::make_shared<Block>());
  stages.push_back(std::make_shared<Head>());
  return stages;
}
