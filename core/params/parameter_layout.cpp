#include "core/params/parameter_layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/base/hash128.hpp"
#include "core/base/utf8.hpp"
#include "core/params/parameter_access.hpp"
#include "core/tensor/coded_shape.hpp"
#include "core/tensor/layout_quantum.hpp"

namespace tandem {
namespace {

constexpr std::int64_t padded(std::int64_t count) {
  return (count + layout_quantum - 1) / layout_quantum * layout_quantum;
}

/// Checkpoints hold names as JSON does.
void require_utf8(std::string_view name) {
  if (!is_utf8(name)) throw MisuseError("the name of a layer or parameter is no UTF-8");
}

void require_codable(const std::string& full_name, const Shape& shape, const ParameterOptions& options) {
  const std::string what = fmt::format("parameter '{}' cannot be coded", full_name);
  if (options.trainable) throw MisuseError(what, "it is trained", "declare it frozen");
  if (options.weight != DType::bf16) throw MisuseError(what, "its weights are f32");
  if (shape.rank() != 2 && shape.rank() != 3) throw MisuseError(what, "its shape is " + shape.text());
}

void require_factor(const std::string& full_name, const Shape& shape, const ParameterOptions& options) {
  const std::string what = fmt::format("parameter '{}' cannot be an fp8_factor", full_name);
  if (!options.trainable) throw MisuseError(what, "it is frozen", "give it a code instead");
  if (options.weight != DType::bf16) throw MisuseError(what, "its weights are f32");
  if (shape.rank() != 2) throw MisuseError(what, "its shape is " + shape.text());
}

}  // namespace

int Layer::find(std::string_view parameter) const noexcept {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == parameter) return static_cast<int>(i);
  }
  return -1;
}

std::size_t Layer::gradient_offset(std::int64_t element) const noexcept {
  const std::int64_t summed = std::min(element, summed_elements);
  return static_cast<std::size_t>(summed) * size_of(DType::f32) +
         static_cast<std::size_t>(element - summed) * size_of(DType::bf16);
}

std::size_t Layer::weight_offset(std::int64_t element) const noexcept {
  const auto within = [&](std::int64_t begin, std::int64_t end) {
    return static_cast<std::size_t>(std::clamp(element, begin, end) - begin);
  };
  const std::size_t whole = within(0, fp32_elements) + within(frozen_fp32_begin, codes8_begin);
  return whole * size_of(DType::f32) + within(fp32_elements, frozen_fp32_begin) * size_of(DType::bf16) +
         within(codes8_begin, codes4_begin) + within(codes4_begin, elements) / 2;
}

CodedShape Parameter::coded_shape() const noexcept { return tandem::coded_shape(shape); }

ParameterLayout::LayerBuilder& ParameterLayout::LayerBuilder::add(std::string_view name, Shape shape,
                                                                  ParameterOptions options) {
  Layer& layer = layout_->layers_.at(static_cast<std::size_t>(layer_));
  const std::string full_name = fmt::format("{}.{}", layer.name, name);
  if (name.empty()) throw MisuseError(fmt::format("parameter of layer '{}' has no name", layer.name));
  require_utf8(name);
  if (layout_->find(full_name) != nullptr)
    throw MisuseError(fmt::format("parameter '{}' is declared twice", full_name));
  if (shape.count() == 0) {
    throw MisuseError(fmt::format("parameter '{}' has no elements", full_name), "shape " + shape.text());
  }
  if (!std::isfinite(options.lr_scale) || options.lr_scale < 0) {
    throw MisuseError(fmt::format("parameter '{}' has lr_scale {}", full_name, options.lr_scale),
                      "it must be finite and not negative");
  }
  constexpr int most_groups = 1 << 16;
  if (options.group < 0 || options.group >= most_groups) {
    throw MisuseError(fmt::format("parameter '{}' is of group {}", full_name, options.group),
                      fmt::format("groups are 0 to {}", most_groups - 1));
  }
  if (options.gradient == DType::i32) throw MisuseError(fmt::format("parameter '{}' has an i32 gradient", full_name));
  if (options.weight == DType::i32) throw MisuseError(fmt::format("parameter '{}' has i32 weights", full_name));
  if (options.weight == DType::f32 && options.gradient != DType::f32) {
    throw MisuseError(fmt::format("parameter '{}' has f32 weights and a bf16 gradient", full_name), {},
                      "declare its gradient f32");
  }
  if (options.code != WeightCode::none) require_codable(full_name, shape, options);
  if (options.fp8_factor) require_factor(full_name, shape, options);
  Parameter parameter;
  parameter.name = name;
  parameter.full_name = full_name;
  parameter.layer = layer_;
  parameter.shape = shape;
  parameter.options = options;
  parameter.count = shape.count();
  parameter.padded_count = padded(parameter.count);
  layer.parameters.push_back(std::move(parameter));
  layout_->place(layer);
  return *this;
}

ParameterLayout::LayerBuilder ParameterLayout::add_layer(std::string_view name, const LayerOptions& options) {
  if (name.empty()) throw MisuseError("layer without a name");
  require_utf8(name);
  for (const Layer& layer : layers_) {
    if (layer.name == name) throw MisuseError(fmt::format("layer '{}' is declared twice", name));
  }
  if (options.uses < 1) throw MisuseError(fmt::format("layer '{}' with {} uses", name, options.uses));
  Layer& layer = layers_.emplace_back();
  layer.name = name;
  layer.uses = options.uses;
  return {this, layer_count() - 1};
}

void ParameterLayout::tie(std::string_view owner_name, std::string_view shared_name) {
  Parameter* owner = find(owner_name);
  Parameter* shared = find(shared_name);
  const std::string what = fmt::format("cannot tie '{}' to '{}'", shared_name, owner_name);
  if (owner == nullptr || shared == nullptr) {
    throw MisuseError(what, fmt::format("'{}' is not declared", owner == nullptr ? owner_name : shared_name));
  }
  if (owner == shared) throw MisuseError(what, "they are one");
  if (!(owner->shape == shared->shape)) {
    throw MisuseError(what, fmt::format("shapes {} and {} differ", owner->shape.text(), shared->shape.text()));
  }
  if (owner->tied() || shared->tied()) {
    throw MisuseError(what, fmt::format("'{}' is tied already", owner->tied() ? owner_name : shared_name));
  }
  if (owner->options.gradient != shared->options.gradient) {
    throw MisuseError(what, fmt::format("gradients of {} and {}", name_of(owner->options.gradient),
                                        name_of(shared->options.gradient)));
  }
  if (owner->coded() || shared->coded()) throw MisuseError(what, "coded parameters are tied to none");
  if (owner->options.fp8_factor || shared->options.fp8_factor) throw MisuseError(what, "an fp8_factor is tied to none");
  if (owner->options.weight != shared->options.weight) {
    throw MisuseError(
        what, fmt::format("weights of {} and {}", name_of(owner->options.weight), name_of(shared->options.weight)));
  }
  const int shared_layer = shared->layer;
  const int shared_index = layer(shared_layer).find(shared->name);
  for (const Layer& other : layers_) {
    for (const Parameter& p : other.parameters) {
      if (p.tied_layer == shared_layer && p.tied_index == shared_index) {
        throw MisuseError(what, fmt::format("'{}' is owner of '{}'", shared_name, p.full_name));
      }
    }
  }
  Layer& borrower = layers_[static_cast<std::size_t>(shared_layer)];
  const bool borrows =
      std::find(borrower.borrows.begin(), borrower.borrows.end(), owner->layer) != borrower.borrows.end();
  const bool elsewhere = owner->layer != shared_layer;
  if (elsewhere && !borrows && borrower.borrows.size() + 1 >= LayerBases::capacity) {
    throw MisuseError(what,
                      fmt::format("layer '{}' borrows from {} layers already", borrower.name, borrower.borrows.size()));
  }
  if (elsewhere && !borrows) borrower.borrows.push_back(owner->layer);
  shared->tied_layer = owner->layer;
  shared->tied_index = layer(owner->layer).find(owner->name);
  shared->options = owner->options;
  place(borrower);
}

const Parameter& ParameterLayout::parameter(std::string_view full_name) const {
  const Parameter* found = const_cast<ParameterLayout*>(this)->find(full_name);
  if (found == nullptr) throw MisuseError(fmt::format("no parameter is called '{}'", full_name));
  if (!found->tied()) return *found;
  return layer(found->tied_layer).parameters.at(static_cast<std::size_t>(found->tied_index));
}

std::string ParameterLayout::storage_hash() const {
  Hash128 hash;
  for (const Layer& layer : layers_) {
    const auto parameters = static_cast<std::int64_t>(layer.parameters.size());
    hash.add(&parameters, sizeof parameters);
    hash.add(&layer.uses, sizeof layer.uses);
    for (const Parameter& p : layer.parameters) {
      const std::array<std::int64_t, 8> of{p.count,
                                           p.options.trainable ? 1 : 0,
                                           p.tied_layer,
                                           p.tied_index,
                                           p.options.gradient == DType::bf16 ? 1 : 0,
                                           p.options.weight == DType::f32 ? 1 : 0,
                                           static_cast<std::int64_t>(p.options.code),
                                           p.options.fp8_factor ? 1 : 0};
      hash.add(of.data(), sizeof of);
    }
  }
  return hash.text();
}

std::vector<const Parameter*> ParameterLayout::owned_parameters() const {
  std::vector<const Parameter*> owned;
  for (const Layer& layer : layers_) {
    for (const Parameter& p : layer.parameters) {
      if (!p.tied()) owned.push_back(&p);
    }
  }
  return owned;
}

std::int64_t ParameterLayout::parameter_count() const noexcept {
  std::int64_t count = 0;
  for (const Layer& layer : layers_) {
    for (const Parameter& p : layer.parameters) count += p.tied() ? 0 : p.count;
  }
  return count;
}

int ParameterLayout::group_count() const noexcept {
  int count = 1;
  for (const Layer& layer : layers_) {
    for (const Parameter& p : layer.parameters) count = std::max(count, p.options.group + 1);
  }
  return count;
}

std::int64_t ParameterLayout::state_elements() const noexcept {
  std::int64_t elements = 0;
  for (const Layer& layer : layers_) elements += layer.state_elements;
  return elements;
}

void ParameterLayout::place(Layer& layer) {
  std::int64_t offset = 0;
  const auto append = [&](const auto& belongs) {
    for (Parameter& p : layer.parameters) {
      if (p.tied() || !belongs(p.options)) continue;
      p.offset = offset;
      offset += p.padded_count;
    }
    return offset;
  };
  using Options = ParameterOptions;
  const auto whole = [](const Options& o) { return o.weight == DType::f32; };
  layer.fp32_elements = append([&](const Options& o) { return o.trainable && whole(o); });
  layer.summed_elements =
      append([&](const Options& o) { return o.trainable && !whole(o) && o.gradient == DType::f32; });
  layer.state_elements = append([](const Options& o) { return o.trainable && o.gradient != DType::f32; });
  const auto codes_of = [](const Options& o, int bits) {
    return o.code != WeightCode::none && code_bits(o.code) == bits;
  };
  layer.frozen_fp32_begin =
      append([&](const Options& o) { return !o.trainable && !whole(o) && o.code == WeightCode::none; });
  append([&](const Options& o) { return !o.trainable && whole(o); });
  layer.decoded_elements = 0;
  for (Parameter& p : layer.parameters) {
    if (!p.coded()) continue;
    p.scales_offset = offset;
    offset += padded(scale_floats(p.options.code, p.coded_shape()));
    p.decoded_offset = layer.decoded_elements;
    layer.decoded_elements += p.padded_count;
  }
  layer.codes8_begin = offset;
  layer.codes4_begin = append([&](const Options& o) { return codes_of(o, 8); });
  layer.elements = append([&](const Options& o) { return codes_of(o, 4); });
  // A tied parameter says where its owner lies, also after the owner's layer has grown.
  for (Layer& other : layers_) {
    for (Parameter& p : other.parameters) {
      if (!p.tied()) continue;
      const Layer& owner = layers_[static_cast<std::size_t>(p.tied_layer)];
      p.offset = owner.parameters[static_cast<std::size_t>(p.tied_index)].offset;
    }
  }
}

Parameter* ParameterLayout::find(std::string_view full_name) {
  for (Layer& layer : layers_) {
    for (Parameter& p : layer.parameters) {
      if (p.full_name == full_name) return &p;
    }
  }
  return nullptr;
}

}  // namespace tandem
