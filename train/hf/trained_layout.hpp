#pragma once
// Layouts of a model's parameters: those that a run trains, and how the others are stored.
#include <functional>
#include <string>

#include "core/params/parameter_layout.hpp"
#include "models/config/config.hpp"
#include "train/config/config.hpp"

namespace tandem {

/// The model's layout, but parameters whose Hugging Face name `pattern` is found in are not trained. An empty
/// pattern freezes none. `ends`: of layout_of. Throws UsageError where nothing is left to train.
ParameterLayout frozen_layout(const ModelConfig& config, const std::string& pattern, DType ends = DType::f32);
/// The layout of a run, with what it freezes stored as it asks for, or else as the model's files have it:
/// frozen_layout(), or with adapters these and the modules that are saved whole trained and nothing else. Throws
/// UsageError as that, and where --base has nothing to store so.
ParameterLayout trained_layout(const TrainConfig& config, const ModelConfig& model, DType ends = DType::f32);
/// The model's layout with every parameter frozen: for forwards alone.
ParameterLayout forward_layout(const ModelConfig& config);
/// The layout with the trained ones of the parameters that `is_factor` marked as ParameterOptions::fp8_factor.
ParameterLayout with_fp8_factors(const ParameterLayout& layout, const std::function<bool(const Parameter&)>& is_factor);
/// The layout of a model without its adapters, whose parameters are trained or frozen, and stored, as in `layout`.
ParameterLayout base_layout(const ModelConfig& plain, const ParameterLayout& layout);

/// Format in which the frozen matrices of blocks are stored; none: as weights are.
WeightCode base_format(const ParameterLayout& layout) noexcept;

}  // namespace tandem
