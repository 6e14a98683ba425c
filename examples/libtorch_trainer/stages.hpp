#pragma once
// The network: a stem, residual blocks and a head, plain libtorch modules that know nothing of tandem.
#include <memory>
#include <vector>

#include <torch/torch.h>

/// A part of the network whose weights are on the device only while it computes.
struct Stage : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

namespace shape {
constexpr std::int64_t inputs = 32, width = 192, hidden = 4 * width, classes = 10;
constexpr int blocks = 6;
}  // namespace shape

/// Stages in the order of forward, with initial values of libtorch's.
std::vector<std::shared_ptr<Stage>> make_stages();
