#pragma once
// Functions between libtorch and the engine: a layout made of modules, weights lent to a module while it computes, and
// its gradients added to the engine's.
#include <string>
#include <vector>

#include <torch/torch.h>
#include <tandem/tandem.hpp>

/// Groups of parameters, each with hyperparameters of its own in each step.
enum Group : int { matrices, vectors, groups };

/// Declares a module's parameters as a layer, under their names in the module: matrices in bf16, vectors in fp32.
void declare(tandem::ParameterLayout& layout, const std::string& layer, const torch::nn::Module& module);

/// Views of a layer's weights, or gradients, in the order of the module's parameters.
std::vector<tandem::TensorView> views_of(const torch::nn::Module& module, const tandem::WeightsGuard& weights);
std::vector<tandem::TensorView> views_of(const torch::nn::Module& module, const tandem::GradientsGuard& gradients);

/// Weights in a module's parameters, from its construction to its end, after which they are empty. fp32 is used where
/// it lies; bf16 is widened, so that the module computes in fp32 and its gradients are not rounded.
class Lent {
 public:
  Lent(torch::nn::Module& module, const std::vector<tandem::TensorView>& weights);
  ~Lent();
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  /// Adds the gradients that backward left in the parameters to those of the engine.
  void add_gradients_to(const std::vector<tandem::TensorView>& gradients) const;

 private:
  std::vector<torch::Tensor> parameters_;
};
