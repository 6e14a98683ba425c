#include "lending.hpp"

namespace {

/// The memory of a view as a tensor, which owns none.
torch::Tensor tensor_over(const tandem::TensorView& view) {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < view.shape.rank(); ++i) sizes.push_back(view.shape[i]);
  const auto type = view.dtype == tandem::DType::f32 ? torch::kFloat : torch::kBFloat16;
  return torch::from_blob(view.data, sizes, torch::TensorOptions(type));
}

template <class Guard>
std::vector<tandem::TensorView> views_by_name(const torch::nn::Module& module, const Guard& guard) {
  std::vector<tandem::TensorView> views;
  for (const auto& parameter : module.named_parameters()) views.push_back(guard[parameter.key()]);
  return views;
}

}  // namespace

void declare(tandem::ParameterLayout& layout, const std::string& layer, const torch::nn::Module& module) {
  auto builder = layout.add_layer(layer);
  for (const auto& parameter : module.named_parameters()) {
    const torch::IntArrayRef sizes = parameter.value().sizes();
    const bool matrix = sizes.size() > 1;
    builder.add(parameter.key(), tandem::Shape(std::span(sizes.data(), sizes.size())),
                {.group = matrix ? matrices : vectors, .weight = matrix ? tandem::DType::bf16 : tandem::DType::f32});
  }
}

std::vector<tandem::TensorView> views_of(const torch::nn::Module& module, const tandem::WeightsGuard& weights) {
  return views_by_name(module, weights);
}

std::vector<tandem::TensorView> views_of(const torch::nn::Module& module, const tandem::GradientsGuard& gradients) {
  return views_by_name(module, gradients);
}

Lent::Lent(torch::nn::Module& module, const std::vector<tandem::TensorView>& weights)
    : parameters_(module.parameters()) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(tensor_over(weights[i]).to(torch::kFloat));  // shares the memory where it is fp32
  }
}

Lent::~Lent() {
  for (torch::Tensor& parameter : parameters_) {
    parameter.mutable_grad().reset();
    parameter.set_data(torch::empty(0));
  }
}

void Lent::add_gradients_to(const std::vector<tandem::TensorView>& gradients) const {
  const torch::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) tensor_over(gradients[i]).add_(parameters_[i].grad());
}
