#include "models/input_store.hpp"

#include <utility>

#include "core/error.hpp"

namespace tandem {

std::size_t InputStore::host_bytes(std::size_t slots, std::size_t layers, std::size_t input_bytes) noexcept {
  return slots > layers ? 0 : (layers + 1 - slots) * align_up(input_bytes);
}

InputStore::InputStore(Device& device, std::vector<TensorView> slots, std::size_t layers)
    : device_(device), slots_(std::move(slots)), layers_(layers) {
  if (slots_.size() < 2) throw MisuseError("an input store needs two slots");
  stride_ = align_up(slots_.front().bytes());
  const std::size_t bytes = host_bytes(slots_.size(), layers_, slots_.front().bytes());
  if (bytes == 0) return;
  host_ = device.allocate_pinned(bytes, "activations, offloaded");
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    copied_.push_back(device.make_event());
    fetched_.push_back(device.make_event());
  }
  passed_ = device.make_event();
  out_ = device.make_stream("activations to host");
  in_ = device.make_stream("activations to device");
}

void* InputStore::host(std::size_t i) const noexcept { return static_cast<std::byte*>(host_.data()) + i * stride_; }

void InputStore::begin_pass(bool keep, StreamView stream) {
  keep_ = keep;
  for (const Event& event : copied_) device_.wait(stream, event);
  for (const Event& event : fetched_) device_.wait(stream, event);
}

TensorView InputStore::begin_write(std::size_t i, StreamView stream) {
  if (i >= slots_.size() && leaves(i - slots_.size())) device_.wait(stream, copied_[slot(i)]);
  return slots_[slot(i)];
}

void InputStore::end_write(std::size_t i, StreamView stream) {
  if (!leaves(i)) return;
  device_.record(passed_, stream);
  device_.wait(out_, passed_);
  device_.copy(host(i), slots_[slot(i)].data, slots_[slot(i)].bytes(), CopyKind::device_to_host, out_);
  device_.record(copied_[slot(i)], out_);
}

TensorView InputStore::begin_read(std::size_t i, StreamView stream) {
  if (leaves(i)) device_.wait(stream, fetched_[slot(i)]);
  return slots_[slot(i)];
}

void InputStore::end_read(std::size_t i, StreamView stream) {
  if (keep_ && i >= slots_.size()) fetch(i - slots_.size(), stream);
}

/// Into the slot that `after` has just done with.
void InputStore::fetch(std::size_t i, StreamView after) {
  device_.record(passed_, after);
  device_.wait(in_, passed_);
  device_.copy(slots_[slot(i)].data, host(i), slots_[slot(i)].bytes(), CopyKind::host_to_device, in_);
  device_.record(fetched_[slot(i)], in_);
}

}  // namespace tandem
