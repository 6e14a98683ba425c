#include "models/transformer/input_store.hpp"

#include <utility>

#include "core/base/error.hpp"

namespace tandem {

std::size_t InputStore::host_bytes(std::size_t slots, std::size_t inputs, std::size_t input_bytes) noexcept {
  return slots >= inputs ? 0 : (inputs - slots) * align_up(input_bytes);
}

InputStore::InputStore(Device& device, std::vector<TensorView> slots, std::size_t layers, std::size_t micro_batches)
    : device_(device), slots_(std::move(slots)), layers_(layers), micro_batches_(micro_batches) {
  if (slots_.size() < 2) throw MisuseError("an input store needs two slots");
  stride_ = align_up(slots_.front().bytes());
  const std::size_t bytes = host_bytes(slots_.size(), count(), slots_.front().bytes());
  if (bytes == 0 || slots_.size() < ring(micro_batches)) return;
  host_ = device.allocate_pinned(bytes, "activations, offloaded");
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    copied_.push_back(device.make_event());
    fetched_.push_back(device.make_event());
  }
  fetched_to_.resize(count() - slots_.size());
  passed_ = device.make_event();
  out_ = device.make_stream("activations to host");
  in_ = device.make_stream("activations to device");
}

void* InputStore::host(std::size_t n) const noexcept { return static_cast<std::byte*>(host_.data()) + n * stride_; }

void InputStore::begin_pass(std::size_t micro_batches, bool keep, StreamView stream) {
  micro_batches_ = micro_batches;
  if (keep && !host_ && slots_.size() < count()) throw MisuseError("an input store for forward alone asked to keep");
  keep_ = keep;
  next_read_ = 0;
  for (const Event& event : copied_) device_.wait(stream, event);
  for (const Event& event : fetched_) device_.wait(stream, event);
}

TensorView InputStore::begin_write(std::size_t i, std::size_t micro, StreamView stream) {
  const std::size_t n = number(i, micro);
  if (n >= slots_.size() && leaves(n - slots_.size())) device_.wait(stream, copied_[slot(n)]);
  return slots_[slot(n)];
}

void InputStore::end_write(std::size_t i, std::size_t micro, StreamView stream) {
  const std::size_t n = number(i, micro);
  if (!leaves(n)) return;
  const TensorView& from = slots_[slot(n)];
  device_.record(passed_, stream);
  device_.wait(out_, passed_);
  device_.copy(host(n), from.data, from.bytes(), CopyKind::device_to_host, out_);
  traffic_.to_host += from.bytes();
  device_.record(copied_[slot(n)], out_);
}

TensorView InputStore::begin_read(std::size_t i, std::size_t micro, StreamView stream) {
  const std::size_t n = number(i, micro);
  if (!leaves(n)) return slots_[slot(n)];
  device_.wait(stream, fetched_[fetched_to_[n]]);
  return slots_[fetched_to_[n]];
}

void InputStore::end_read(std::size_t i, std::size_t micro, StreamView stream) {
  const std::size_t n = number(i, micro);
  fetch_next(leaves(n) ? fetched_to_[n] : slot(n), stream);
}

/// Fetches the next input that backward reads, of all that left, into the slot that `after` has just done with.
void InputStore::fetch_next(std::size_t slot, StreamView after) {
  std::size_t n = 0;
  do {
    if (next_read_ == count()) return;
    n = number(layers_ - next_read_ / micro_batches_, next_read_ % micro_batches_);
    ++next_read_;
  } while (!leaves(n));
  fetched_to_[n] = slot;
  device_.record(passed_, after);
  device_.wait(in_, passed_);
  device_.copy(slots_[slot].data, host(n), slots_[slot].bytes(), CopyKind::host_to_device, in_);
  traffic_.to_device += slots_[slot].bytes();
  device_.record(fetched_[slot], in_);
}

}  // namespace tandem
