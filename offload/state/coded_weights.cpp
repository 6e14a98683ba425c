#include "offload/state/coded_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "core/device/watched_wait.hpp"

namespace tandem {

/// Progress of one parameter.
class CodedWeights::Writing final : public CodeSink {
 public:
  Writing(const CodedWeights& to, const Parameter& parameter)
      : to_(to),
        parameter_(parameter),
        elements_in_byte_(8 / code_bits(parameter.options.code)),
        scale_count_(scale_floats(parameter.options.code, parameter.coded_shape())) {}

  void codes(std::int64_t first, std::span<const std::byte> codes) override {
    require_next(first, codes_, "codes");
    const std::int64_t count = std::ssize(codes) * elements_in_byte_;
    require_room(first + count - elements_in_byte_ + 1, parameter_.count, "codes");
    to_.write(layer_of(parameter_), parameter_.offset + first, count, codes.data());
    hash_of_codes_.add(codes.data(), codes.size());
    codes_ += count;
  }
  void scales(std::int64_t first, std::span<const float> scales) override {
    require_next(first, scales_, "scales");
    require_room(first + std::ssize(scales), scale_count_, "scales");
    to_.write(layer_of(parameter_), parameter_.scales_offset + first, std::ssize(scales),
              reinterpret_cast<const std::byte*>(scales.data()));
    hash_of_scales_.add(scales.data(), scales.size_bytes());
    scales_ += std::ssize(scales);
  }
  std::array<unsigned char, 16> hash() const {
    if (codes_ < parameter_.count || scales_ < scale_count_) {
      throw MisuseError(fmt::format("parameter {} has {} of {} codes and {} of {} scales", parameter_.full_name, codes_,
                                    parameter_.count, scales_, scale_count_));
    }
    Hash128 both;
    for (const Hash128* part : {&hash_of_codes_, &hash_of_scales_}) {
      const std::array<unsigned char, 16> bytes = part->bytes();
      both.add(bytes.data(), bytes.size());
    }
    return both.bytes();
  }

 private:
  void require_next(std::int64_t first, std::int64_t next, const char* what) const {
    if (first == next) return;
    throw MisuseError(fmt::format("{} of {} from {} on", what, parameter_.full_name, first),
                      fmt::format("{} is next", next), "write them in order");
  }
  void require_room(std::int64_t end, std::int64_t count, const char* what) const {
    if (end <= count) return;
    throw MisuseError(fmt::format("{} {} of {}", end, what, parameter_.full_name), fmt::format("it has {}", count));
  }

  const CodedWeights& to_;
  const Parameter& parameter_;
  std::int64_t elements_in_byte_, scale_count_;
  std::int64_t codes_ = 0, scales_ = 0;
  Hash128 hash_of_codes_, hash_of_scales_;
};

CodedWeights::CodedWeights(Device& device, const ParameterLayout& layout, const Storage& storage,
                           double watchdog_seconds)
    : device_(device),
      layout_(layout),
      storage_(storage),
      stream_(device.make_stream("coded weights")),
      watchdog_seconds_(watchdog_seconds) {}

CodedWeights::~CodedWeights() = default;

CodeSink& CodedWeights::begin(const Parameter& parameter) {
  const Parameter& p = layout_.parameter(parameter.full_name);
  if (!p.coded()) {
    throw MisuseError(fmt::format("codes of {}", p.full_name), "it is stored as its values are", "write its values");
  }
  std::unique_ptr<Writing>& writing = writing_[p.full_name];
  writing = std::make_unique<Writing>(*this, p);
  return *writing;
}

std::array<unsigned char, 16> CodedWeights::hash(const Parameter& parameter) const {
  const auto found = writing_.find(parameter.full_name);
  if (found == writing_.end()) throw MisuseError(fmt::format("no codes of {} were written", parameter.full_name));
  return found->second->hash();
}

/// Writes stored elements of a layer, those that are the rank's own.
void CodedWeights::write(LayerIndex layer, std::int64_t element, std::int64_t count, const std::byte* bytes) const {
  const ElementRange& own = storage_.slice(layer).frozen;
  const std::int64_t begin = std::max(element, own.begin), end = std::min(element + count, own.end);
  if (begin >= end) return;
  const Layer& of = layer_at(layout_, layer);
  const std::byte* const from = bytes + (of.weight_offset(begin) - of.weight_offset(element));
  const std::size_t size = of.weight_offset(end) - of.weight_offset(begin);
  if (storage_.has_host_weights(layer)) std::memcpy(storage_.host_weight(layer, begin), from, size);
  if (storage_.resident_weights(layer) != nullptr) copy_to_device(storage_.resident_weight(layer, begin), from, size);
}

void CodedWeights::copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes) const {
  device_.copy(to, from, bytes, CopyKind::host_to_device, stream_);
  wait_to_the_end(device_, stream_, {"a copy of weights", watchdog_seconds_});
}

}  // namespace tandem
