#pragma once
// Layout of the parameters of a model, in the order in which forward uses them, and where each lies in the flat arrays
// of its layer.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/numerics/weight_code.hpp"
#include "core/tensor/tensor.hpp"

namespace tandem {

struct ParameterOptions {
  bool decay = true;      ///< weight decay applies
  bool trainable = true;  ///< false: no gradient, no optimizer state, no decay
  double lr_scale = 1.0;  ///< multiplies the learning rate
  int group = 0;          ///< index of its learning rate and hyperparameters in UpdateValues::groups
  /// Type of the gradient that the caller writes in a micro-batch. f32, the default: it adds to a buffer that is zero
  /// at first. bf16: it writes the gradient whole, rounded to nearest even, into a buffer whose contents are undefined
  /// at first; that halves the memory, and saves the passes that zero, add and round it. A tied parameter with bf16 is
  /// written by the first layer that commits; the layer that follows finds that gradient, and changes it to the sum of
  /// both, rounded once.
  DType gradient = DType::f32;
  /// Type of the weights: bf16, rounded from the fp32 master; or f32, which are the master themselves, never rounded,
  /// and neither are their gradients. For norms, routers, biases, small heads. With f32 gradients alone.
  DType weight = DType::bf16;
  /// Format in which a frozen weight of bf16 is stored. It is decoded when its layer is fetched, so that whoever uses
  /// it sees bf16. For matrices (O, I), or (E, O, I), that are neither tied nor trained.
  WeightCode code = WeightCode::none;
  /// Whether whoever uses the weight rounds it whole to e4m3, as Ops::quantize does: then its layer may be fetched in a
  /// byte an element, and views have the rounded values. For trained matrices (O, I) of bf16 that are not tied.
  bool fp8_factor = false;
};

/// One parameter of a layer. Its elements occupy [offset, offset + count) of the layer's flat arrays,
/// padded with zeros to a multiple of `layout_quantum`.
struct Parameter {
  std::string name;       ///< within its layer: "w1"
  std::string full_name;  ///< "h.0.w1"
  int layer = 0;
  Shape shape;
  ParameterOptions options;
  std::int64_t offset = 0;  ///< elements, multiple of layout_quantum
  std::int64_t count = 0;
  std::int64_t padded_count = 0;
  int tied_layer = -1;  ///< layer and index of the parameter whose storage this one shares; -1: its own
  int tied_index = -1;
  std::int64_t scales_offset = 0;   ///< elements: where its scales lie as frozen f32 weights do, of a coded one
  std::int64_t decoded_offset = 0;  ///< elements: where its bf16 values lie among the decoded ones of its layer
  bool tied() const noexcept { return tied_layer >= 0; }
  bool coded() const noexcept { return options.code != WeightCode::none; }
  /// Matrices of a coded parameter.
  CodedShape coded_shape() const noexcept;
};

struct LayerOptions {
  /// Uses of the layer in backward of a micro-batch, each of which commits gradients: what the layer is used for
  /// several times in forward. They add to one buffer, as those of tied parameters do, which is held from the first to
  /// the last.
  int uses = 1;
};

/// One layer: the unit of fetching. Trainable parameters come first in its flat arrays, so that the
/// optimizer state is the prefix [0, state_elements); and of those the ones with f32 gradients, so that a buffer for
/// the layer's gradients is their sums and then the bf16 of the others. Trainable parameters with f32 weights are the
/// first of all, frozen ones follow those of bf16, with the scales of coded parameters behind them; the codes come
/// last, first those of a byte, then those of four bits.
struct Layer {
  std::string name;
  std::vector<Parameter> parameters;  ///< in order of declaration
  std::int64_t elements = 0;          ///< length of the flat weights, padded
  std::int64_t state_elements = 0;    ///< trainable part, padded
  std::int64_t summed_elements = 0;   ///< the part of it with f32 gradients, padded
  std::int64_t fp32_elements = 0;     ///< the part of that with f32 weights, padded
  /// First elements of frozen parameters with f32 weights, with codes of a byte, and with codes of four bits;
  /// `elements` where there are none.
  std::int64_t frozen_fp32_begin = 0, codes8_begin = 0, codes4_begin = 0;
  std::int64_t decoded_elements = 0;  ///< bf16 values that its coded parameters have, padded
  int uses = 1;                       ///< LayerOptions::uses
  std::vector<int> borrows;           ///< layers whose parameters this one shares through ties
  /// Bytes from the start of the layer's gradient buffer to the gradient of a trained element. Asked for
  /// `state_elements`, one past the last, it gives the size of the buffer.
  std::size_t gradient_offset(std::int64_t element) const noexcept;
  /// Bytes from the start of the layer's weights to an element. Asked for `elements` it gives the bytes of them all.
  std::size_t weight_offset(std::int64_t element) const noexcept;
  /// Index in `parameters`, or -1.
  int find(std::string_view parameter) const noexcept;
};

/// Built once, then read. Weights are bf16 unless their options say f32, the master state fp32.
class ParameterLayout {
 public:
  /// Adds parameters to one layer. A handle: valid while the layout lives.
  class LayerBuilder {
   public:
    /// Appends a parameter. `shape` counts elements. Throws MisuseError where its full name is taken, the name is empty
    /// or no UTF-8, the shape has no elements, lr_scale is negative or not finite, group is not in [0, 65536), the
    /// gradient's or the weight's type is i32, an f32 weight has a bf16 gradient, or an option is not for it.
    LayerBuilder& add(std::string_view name, Shape shape, ParameterOptions options = {});

   private:
    friend class ParameterLayout;
    LayerBuilder(ParameterLayout* layout, int layer) : layout_(layout), layer_(layer) {}
    ParameterLayout* layout_;
    int layer_;
  };

  /// Throws MisuseError when the name is taken, empty or no UTF-8, and for fewer uses than one.
  LayerBuilder add_layer(std::string_view name, const LayerOptions& options = {});
  /// `shared` ("head.weight") uses the storage of `owner` ("embedding.tokens"); both declared, of one
  /// shape and with weights and gradients of one type, neither tied yet, `shared` no owner itself. Any number of layers
  /// may share a parameter, and one layer have it under several names; a layer shares parameters of three others at
  /// most. Gradients of both go into one buffer and are counted once; the owner's options hold for both. Throws
  /// MisuseError otherwise.
  void tie(std::string_view owner, std::string_view shared);

  const std::vector<Layer>& layers() const noexcept { return layers_; }
  int layer_count() const noexcept { return static_cast<int>(layers_.size()); }
  /// Throws std::out_of_range where there is none.
  const Layer& layer(int i) const { return layers_.at(static_cast<std::size_t>(i)); }
  /// Parameter by full name; throws MisuseError where there is none. A tied name gives the owner.
  const Parameter& parameter(std::string_view full_name) const;
  /// All parameters that own storage, in model order.
  std::vector<const Parameter*> owned_parameters() const;
  std::int64_t parameter_count() const noexcept;  ///< without padding, tied ones once
  std::int64_t state_elements() const noexcept;   ///< sum over layers, padded
  int group_count() const noexcept;               ///< one more than the highest group of a parameter; at least 1
  /// Equal for two layouts whose storage is the same: the same layers in the same order, with parameters of the same
  /// counts, frozen, tied and rounded alike and with weights and gradients of the same types; names and shapes do not
  /// enter.
  std::string storage_hash() const;

 private:
  void place(Layer& layer);
  Parameter* find(std::string_view full_name);
  std::vector<Layer> layers_;
};

}  // namespace tandem
