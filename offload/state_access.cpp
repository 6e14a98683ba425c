#include "offload/state_access.hpp"

#include <algorithm>
#include <cstring>

#include "core/error.hpp"
#include "core/state_digest.hpp"
#include "core/update_kernels.hpp"

namespace tandem {
namespace {

// Elements read or written at a time: 4 MiB of fp32, and no more beside it where other formats are converted.
constexpr std::int64_t chunk_elements = std::int64_t{1} << 20;

}  // namespace

StateAccess::StateAccess(Device& device, const ParameterLayout& layout, const Plan& plan, const Storage& storage)
    : device_(device), layout_(layout), plan_(plan), storage_(storage), stream_(device.make_stream("state access")) {}

void StateAccess::copy(void* to, const void* from, std::size_t bytes, CopyKind kind) const {
  device_.copy(to, from, bytes, kind, stream_);
  device_.synchronize(stream_);
}

/// Calls call(subgroup index, offset in the subgroup, offset from `first`, count) for each overlap, in pieces.
template <class Call>
void StateAccess::for_subgroups(const Parameter& parameter, std::int64_t first, std::int64_t count, Call call) const {
  const std::int64_t begin = parameter.offset + first;
  const std::int64_t end = begin + count;
  for (std::size_t i = 0; i < plan_.subgroups.size(); ++i) {
    const Subgroup& s = plan_.subgroups[i];
    if (s.layer != parameter.layer) continue;
    const std::int64_t from = std::max(begin, s.begin);
    const std::int64_t to = std::min(end, s.end);
    for (std::int64_t at = from; at < to; at += chunk_elements) {
      call(static_cast<int>(i), at - s.begin, at - begin, std::min(chunk_elements, to - at));
    }
  }
}

void StateAccess::read(const Parameter& parameter, StateArray array, std::int64_t first,
                       std::span<float> values) const {
  if (!parameter.options.trainable) {
    if (array == StateArray::master) return read_weights(parameter, first, values);
    std::fill(values.begin(), values.end(), 0.0F);
    return;
  }
  for_subgroups(parameter, first, static_cast<std::int64_t>(values.size()),
                [&](int subgroup, std::int64_t at, std::int64_t offset, std::int64_t count) {
                  read_piece(subgroup, array, at,
                             values.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count)));
                });
}

/// Stored bytes of one array of a subgroup, from element `at` on, into `to`; or from `to` where `write`.
void StateAccess::move(int subgroup, StateArray array, std::int64_t at, std::span<std::byte> bytes, bool write) const {
  const StateArrays from = storage_.subgroup(subgroup).state.from(at, plan_.state);
  void* const stored = array == StateArray::master ? from.master : array == StateArray::m ? from.m : from.v;
  if (plan_.subgroups[static_cast<std::size_t>(subgroup)].tier == Tier::host) {
    write ? std::memcpy(stored, bytes.data(), bytes.size()) : std::memcpy(bytes.data(), stored, bytes.size());
  } else if (write) {
    copy(stored, bytes.data(), bytes.size(), CopyKind::host_to_device);
  } else {
    copy(bytes.data(), stored, bytes.size(), CopyKind::device_to_host);
  }
}

bool StateAccess::stored_as_fp32(StateArray array) const noexcept {
  const bool master = array == StateArray::master;
  return (master ? master_bytes(plan_.state) : moment_bytes(plan_.state)) == sizeof(float);
}

void StateAccess::read_piece(int subgroup, StateArray array, std::int64_t at, std::span<float> values) const {
  const bool master = array == StateArray::master;
  if (stored_as_fp32(array)) {
    return move(subgroup, array, at, std::as_writable_bytes(values), /*write=*/false);
  }
  std::vector<bf16> halves(values.size());
  move(subgroup, array, at, std::as_writable_bytes(std::span(halves)), /*write=*/false);
  if (!master) {
    std::transform(halves.begin(), halves.end(), values.begin(), numerics::bf16_to_float);
    return;
  }
  // The weights are the master's other half: from where the subgroup's updater writes them.
  const Subgroup& s = plan_.subgroups[static_cast<std::size_t>(subgroup)];
  const bool resident = plan_.layers[static_cast<std::size_t>(s.layer)].resident && s.updater == Updater::device;
  const std::vector<bf16> weights = load_weights(s.layer, resident, s.begin + at, values.size());
  std::transform(weights.begin(), weights.end(), halves.begin(), values.begin(),
                 [](bf16 weight, bf16 residual) { return numerics::join_master(weight, residual.bits); });
}

/// Weights [begin, begin + count) of a layer, from the device where `resident`, else from the host.
std::vector<bf16> StateAccess::load_weights(int layer, bool resident, std::int64_t begin, std::size_t count) const {
  std::vector<bf16> weights(count);
  const std::size_t bytes = count * sizeof(bf16);
  if (resident) {
    copy(weights.data(), storage_.resident_weights(layer) + begin, bytes, CopyKind::device_to_host);
  } else {
    std::memcpy(weights.data(), storage_.host_weights(layer) + begin, bytes);
  }
  return weights;
}

void StateAccess::read_weights(const Parameter& parameter, std::int64_t first, std::span<float> values) const {
  const bool resident = storage_.host_weights(parameter.layer) == nullptr;
  constexpr auto chunk = static_cast<std::size_t>(chunk_elements);
  for (std::size_t done = 0; done < values.size(); done += chunk) {
    const std::int64_t begin = parameter.offset + first + static_cast<std::int64_t>(done);
    const auto weights = load_weights(parameter.layer, resident, begin, std::min(chunk, values.size() - done));
    std::transform(weights.begin(), weights.end(), values.begin() + static_cast<std::ptrdiff_t>(done),
                   numerics::bf16_to_float);
  }
}

void StateAccess::write(const Parameter& parameter, StateArray array, std::int64_t first,
                        std::span<const float> values) const {
  if (parameter.options.trainable) {
    for_subgroups(parameter, first, static_cast<std::int64_t>(values.size()),
                  [&](int subgroup, std::int64_t at, std::int64_t offset, std::int64_t count) {
                    write_piece(subgroup, array, at,
                                values.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(count)));
                  });
  }
  if (array == StateArray::master) write_weights(parameter, first, values);
}

void StateAccess::write_piece(int subgroup, StateArray array, std::int64_t at, std::span<const float> values) const {
  const bool master = array == StateArray::master;
  if (stored_as_fp32(array)) {
    // `move` only reads what it writes to the state.
    std::byte* const bytes = reinterpret_cast<std::byte*>(const_cast<float*>(values.data()));
    return move(subgroup, array, at, {bytes, values.size_bytes()}, /*write=*/true);
  }
  std::vector<bf16> halves(values.size());
  std::transform(values.begin(), values.end(), halves.begin(),
                 [&](float x) { return master ? bf16{numerics::master_residual(x)} : numerics::round_to_bf16(x); });
  move(subgroup, array, at, std::as_writable_bytes(std::span(halves)), /*write=*/true);
}

void StateAccess::write_weights(const Parameter& parameter, std::int64_t first, std::span<const float> master) const {
  const auto total = static_cast<std::int64_t>(master.size());
  constexpr std::int64_t piece = chunk_elements / 8;  // from one cache to the other
  std::vector<bf16> weights(static_cast<std::size_t>(std::min(total, piece)));
  for (std::int64_t done = 0; done < total; done += piece) {
    const std::int64_t count = std::min(piece, total - done);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(bf16);
    const std::int64_t at = parameter.offset + first + done;
    device_.host_kernels().weights_of_master(master.data() + done, weights.data(), count);
    if (bf16* host = storage_.host_weights(parameter.layer)) std::memcpy(host + at, weights.data(), bytes);
    if (bf16* resident = storage_.resident_weights(parameter.layer)) {
      copy(resident + at, weights.data(), bytes, CopyKind::host_to_device);
    }
  }
}

std::string StateAccess::digest() const {
  StateDigest digest;
  std::vector<float> values;
  for (const Parameter* p : layout_.owned_parameters()) {
    digest.begin_parameter(p->full_name);
    for (const StateArray array : {StateArray::master, StateArray::m, StateArray::v}) {
      for (std::int64_t first = 0; first < p->count; first += chunk_elements) {
        values.resize(static_cast<std::size_t>(std::min(chunk_elements, p->count - first)));
        read(*p, array, first, values);
        digest.add(values.data(), static_cast<std::int64_t>(values.size()));
      }
      digest.end_array();
    }
    digest.end_parameter();
  }
  return digest.text();
}

}  // namespace tandem
