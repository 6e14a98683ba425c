#include "offload/state/state_access.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "core/device/watched_wait.hpp"
#include "core/ops/update_kernels.hpp"
#include "core/params/coded_moments.hpp"

namespace tandem {
namespace {

// Elements read or written at a time: 4 MiB of fp32, and no more beside it where other formats are converted.
constexpr std::int64_t chunk_elements = std::int64_t{1} << 20;

/// The values of a coded parameter are neither written nor read here: its codes are.
[[noreturn]] void refuse_coded(const char* call, const Parameter& parameter) {
  throw MisuseError(fmt::format("{} of the values of {}", call, parameter.full_name), "it is stored in another format",
                    "write its codes, and fetch its layer to see its values");
}

}  // namespace

StateAccess::StateAccess(Device& device, const ParameterLayout& layout, const Plan& plan, const Storage& storage,
                         double watchdog_seconds)
    : device_(device),
      layout_(layout),
      plan_(plan),
      storage_(storage),
      stream_(device.make_stream("state access")),
      watchdog_seconds_(watchdog_seconds),
      coded_(device, layout, storage, watchdog_seconds) {}

void StateAccess::copy(void* to, const void* from, std::size_t bytes, CopyKind kind) const {
  device_.copy(to, from, bytes, kind, stream_);
  wait_to_the_end(device_, stream_, {"a copy of state", watchdog_seconds_});
}

/// Pieces of elements [first, first + count) of a parameter, in order. Cuts lie at the ends of records of coded
/// moments, as several threads write at once.
std::vector<StateAccess::Piece> StateAccess::pieces_of(const Parameter& parameter, std::int64_t first,
                                                       std::int64_t count, std::int64_t largest) const {
  const std::int64_t begin = parameter.offset + first;
  const std::int64_t end = begin + count;
  const auto all = plan_.subgroups.begin();
  const auto first_of_it = std::partition_point(all, plan_.subgroups.end(), [&](const Subgroup& s) {
    return s.layer < parameter.layer || (s.layer == parameter.layer && s.end <= begin);
  });
  std::vector<Piece> pieces;
  for (auto s = first_of_it; s != plan_.subgroups.end() && s->layer == parameter.layer && s->begin < end; ++s) {
    const std::int64_t to = std::min(end, s->end);
    for (std::int64_t at = std::max(begin, s->begin); at < to;) {
      const std::int64_t next = std::min(to, at + largest - at % layout_quantum);
      pieces.push_back({SubgroupIndex(static_cast<int>(s - all)), at - s->begin, at - begin, next - at});
      at = next;
    }
  }
  return pieces;
}

/// Whether the array is stored; what is not is zero.
bool StateAccess::has(const Parameter& parameter, StateArray array) const noexcept {
  const std::span<const StateArray> stored = arrays_of(parameter.options.trainable, optimizer_of(plan_.state));
  return std::ranges::find(stored, array) != stored.end();
}

void StateAccess::read(const Parameter& parameter, StateArray array, std::int64_t first,
                       std::span<float> values) const {
  if (parameter.coded() && array == StateArray::master) refuse_coded("read", parameter);
  if (!has(parameter, array)) {
    std::fill(values.begin(), values.end(), 0.0F);
    return;
  }
  if (!parameter.options.trainable) return read_weights(parameter, first, values);
  for (const Piece& p : pieces_of(parameter, first, std::ssize(values), chunk_elements)) {
    read_piece(p.subgroup, array, p.at,
               values.subspan(static_cast<std::size_t>(p.offset), static_cast<std::size_t>(p.count)));
  }
}

/// Stored bytes of one array of a subgroup, from element `at` on, into `to`; or from `to` where `write`.
void StateAccess::move(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<std::byte> bytes,
                       bool write) const {
  const Tier tier = tier_of(subgroup);
  if (tier == Tier::file) {
    return write ? storage_.write_file(subgroup, array, at, bytes) : storage_.read_file(subgroup, array, at, bytes);
  }
  const StateArrays from = storage_.subgroup(subgroup).state.from(at, storage_.subgroup(subgroup).format);
  void* const stored = array == StateArray::master ? from.master : array == StateArray::m ? from.m : from.v;
  if (tier == Tier::host) {
    write ? std::memcpy(stored, bytes.data(), bytes.size()) : std::memcpy(bytes.data(), stored, bytes.size());
  } else if (write) {
    copy(stored, bytes.data(), bytes.size(), CopyKind::host_to_device);
  } else {
    copy(bytes.data(), stored, bytes.size(), CopyKind::device_to_host);
  }
}

bool StateAccess::stored_as_fp32(SubgroupIndex subgroup, StateArray array) const noexcept {
  const StateFormat format = storage_.subgroup(subgroup).format;
  const bool master = array == StateArray::master;
  return (master ? master_bytes(format, 1) : m_bytes(format, 1)) == sizeof(float);
}

bool StateAccess::stored_in_records(SubgroupIndex subgroup, StateArray array) const noexcept {
  return array != StateArray::master && storage_.subgroup(subgroup).format == StateFormat::byte_moments;
}

/// Whether the array is the weights themselves.
bool StateAccess::lies_in_weights(SubgroupIndex subgroup, StateArray array) const noexcept {
  return array == StateArray::master && has_fp32_weights(storage_.subgroup(subgroup).format);
}

void StateAccess::read_piece(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<float> values) const {
  const bool master = array == StateArray::master;
  const Subgroup& s = subgroup_at(plan_, subgroup);
  // Weights that are a master or half of one: from where the subgroup's updater writes them.
  const bool resident = placement_at(plan_, layer_of(s)).resident && s.updater == Updater::device;
  if (lies_in_weights(subgroup, array)) {
    return load_weights(layer_of(s), resident, s.begin + at, std::as_writable_bytes(values));
  }
  if (stored_as_fp32(subgroup, array)) {
    return move(subgroup, array, at, std::as_writable_bytes(values), /*write=*/false);
  }
  if (stored_in_records(subgroup, array)) {
    const std::int64_t past = at % coded_record;
    std::vector<std::uint8_t> records(coded_bytes(past + std::ssize(values)));
    move(subgroup, array, at - past, std::as_writable_bytes(std::span(records)), /*write=*/false);
    return decode_moments(array, records.data(), past, values);
  }
  std::vector<bf16> halves(values.size());
  move(subgroup, array, at, std::as_writable_bytes(std::span(halves)), /*write=*/false);
  if (!master) {
    std::transform(halves.begin(), halves.end(), values.begin(), numerics::bf16_to_float);
    return;
  }
  std::vector<bf16> weights(values.size());
  load_weights(layer_of(s), resident, s.begin + at, std::as_writable_bytes(std::span(weights)));
  std::transform(weights.begin(), weights.end(), halves.begin(), values.begin(),
                 [](bf16 weight, bf16 residual) { return numerics::join_master(weight, residual.bits); });
}

/// Weights of a layer from element `begin` on, from the device where `resident`, else from the host.
void StateAccess::load_weights(LayerIndex layer, bool resident, std::int64_t begin, std::span<std::byte> to) const {
  if (resident) {
    copy(to.data(), storage_.resident_weight(layer, begin), to.size(), CopyKind::device_to_host);
  } else {
    std::memcpy(to.data(), storage_.host_weight(layer, begin), to.size());
  }
}

void StateAccess::read_weights(const Parameter& parameter, std::int64_t first, std::span<float> values) const {
  const bool resident = !storage_.has_host_weights(layer_of(parameter));
  constexpr auto chunk = static_cast<std::size_t>(chunk_elements);
  for (std::size_t done = 0; done < values.size(); done += chunk) {
    const std::int64_t begin = parameter.offset + first + static_cast<std::int64_t>(done);
    const std::span<float> part = values.subspan(done, std::min(chunk, values.size() - done));
    if (parameter.options.weight == DType::f32) {
      load_weights(layer_of(parameter), resident, begin, std::as_writable_bytes(part));
      continue;
    }
    std::vector<bf16> weights(part.size());
    load_weights(layer_of(parameter), resident, begin, std::as_writable_bytes(std::span(weights)));
    std::transform(weights.begin(), weights.end(), part.begin(), numerics::bf16_to_float);
  }
}

void StateAccess::write(const Parameter& parameter, StateArray array, std::int64_t first,
                        std::span<const float> values) const {
  if (!has(parameter, array)) return;
  if (parameter.coded()) refuse_coded("write", parameter);
  if (parameter.options.trainable) {
    const auto write_one = [&](const Piece& p) {
      write_piece(p.subgroup, array, p.at,
                  values.subspan(static_cast<std::size_t>(p.offset), static_cast<std::size_t>(p.count)));
    };
    std::vector<Piece> pieces = pieces_of(parameter, first, std::ssize(values), part_elements);
    const auto at_once = [&](const Piece& p) { return tier_of(p.subgroup) != Tier::host; };
    std::erase_if(pieces, at_once);
    device_.host_kernels().parallel().run(std::ssize(pieces),
                                          [&](std::int64_t i) { write_one(pieces[static_cast<std::size_t>(i)]); });
    // A copy and the wait for it take as long as the bytes of a small part: the device's are large, one after another,
    // and so are the file's.
    for (const Piece& p : pieces_of(parameter, first, std::ssize(values), chunk_elements)) {
      if (at_once(p)) write_one(p);
    }
  }
  if (array == StateArray::master) write_weights(parameter, first, values);
}

void StateAccess::write_piece(SubgroupIndex subgroup, StateArray array, std::int64_t at,
                              std::span<const float> values) const {
  if (lies_in_weights(subgroup, array)) return;  // they are written with all weights
  if (stored_as_fp32(subgroup, array)) {
    // `move` only reads what it writes to the state.
    std::byte* const bytes = reinterpret_cast<std::byte*>(const_cast<float*>(values.data()));
    return move(subgroup, array, at, {bytes, values.size_bytes()}, /*write=*/true);
  }
  if (stored_in_records(subgroup, array)) return write_records(subgroup, array, at, values);
  std::vector<bf16> halves(values.size());
  for_parts(subgroup, 0, std::ssize(values), [&](std::int64_t begin, std::int64_t count) {
    const auto first = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(count);
    to_stored(array, values.subspan(first, n), std::span(halves).subspan(first, n));
  });
  move(subgroup, array, at, std::as_writable_bytes(std::span(halves)), /*write=*/true);
}

void StateAccess::write_records(SubgroupIndex subgroup, StateArray array, std::int64_t at,
                                std::span<const float> values) const {
  const std::int64_t past = at % coded_record;
  const std::int64_t end = past + std::ssize(values);
  std::vector<std::uint8_t> records(coded_bytes(end));
  // Elements of the first and the last record that are not written stay what they are.
  if (past != 0 || end % coded_record != 0) {
    move(subgroup, array, at - past, std::as_writable_bytes(std::span(records)), /*write=*/false);
  }
  for_parts(subgroup, past, end, [&](std::int64_t begin, std::int64_t count) {
    const auto first = static_cast<std::size_t>(begin - past), n = static_cast<std::size_t>(count);
    encode_moments(array, values.subspan(first, n), records.data(), begin);
  });
  move(subgroup, array, at - past, std::as_writable_bytes(std::span(records)), /*write=*/true);
}

/// Calls part(begin, count) for all of [begin, end), cut where a record ends: of a subgroup not in memory, which is not
/// written by one of the threads, by all of them.
template <class Part>
void StateAccess::for_parts(SubgroupIndex subgroup, std::int64_t begin, std::int64_t end, const Part& part) const {
  if (tier_of(subgroup) == Tier::host) return part(begin, end - begin);
  const std::int64_t first = begin / part_elements;
  device_.host_kernels().parallel().run((end + part_elements - 1) / part_elements - first, [&](std::int64_t i) {
    const std::int64_t from = std::max(begin, (first + i) * part_elements);
    part(from, std::min(end, (first + i + 1) * part_elements) - from);
  });
}

void StateAccess::to_stored(StateArray array, std::span<const float> values, std::span<bf16> halves) const {
  const bool master = array == StateArray::master;
  std::transform(values.begin(), values.end(), halves.begin(),
                 [&](float x) { return master ? bf16{numerics::master_residual(x)} : numerics::round_to_bf16(x); });
}

/// Writes the weights of the elements that are the rank's own.
void StateAccess::write_weights(const Parameter& parameter, std::int64_t first, std::span<const float> master) const {
  const LayerSlice& slice = storage_.slice(layer_of(parameter));
  const ElementRange& own = parameter.options.trainable ? slice.trained : slice.frozen;
  const std::int64_t begin = parameter.offset + first;
  const std::int64_t at = std::max(begin, own.begin);
  const std::int64_t end = std::min(begin + std::ssize(master), own.end);
  if (at >= end) return;
  const std::span<const float> part =
      master.subspan(static_cast<std::size_t>(at - begin), static_cast<std::size_t>(end - at));
  if (parameter.options.weight == DType::f32) return write_own_fp32_weights(layer_of(parameter), at, part);
  write_own_weights(layer_of(parameter), at, part);
}

/// Writes own weights in fp32 from element `at` of the layer on.
void StateAccess::write_own_fp32_weights(LayerIndex layer, std::int64_t at, std::span<const float> weights) const {
  if (storage_.has_host_weights(layer))
    std::memcpy(storage_.host_weight(layer, at), weights.data(), weights.size_bytes());
  if (storage_.resident_weights(layer) == nullptr) return;
  copy(storage_.resident_weight(layer, at), weights.data(), weights.size_bytes(), CopyKind::host_to_device);
}

/// Writes own weights from element `at` of the layer on.
void StateAccess::write_own_weights(LayerIndex layer, std::int64_t at, std::span<const float> master) const {
  bf16* const host =
      storage_.has_host_weights(layer) ? reinterpret_cast<bf16*>(storage_.host_weight(layer, at)) : nullptr;
  const bool resident = storage_.resident_weights(layer) != nullptr;
  UpdateKernels& kernels = device_.host_kernels();
  if (host != nullptr) kernels.weights_of_master(master.data(), host, std::ssize(master));
  if (!resident) return;
  std::byte* const to = storage_.resident_weight(layer, at);
  if (host != nullptr) return copy(to, host, master.size() * sizeof(bf16), CopyKind::host_to_device);
  // No more bytes than all threads' parts of fp32, which the plan counts for a digest: there is none meanwhile.
  const std::int64_t scratch = std::min(chunk_elements, 2 * std::max(1, kernels.parallel().threads()) * part_elements);
  std::vector<bf16> weights(std::min(master.size(), static_cast<std::size_t>(scratch)));
  for (std::size_t done = 0; done < master.size(); done += weights.size()) {
    const std::size_t count = std::min(weights.size(), master.size() - done);
    kernels.weights_of_master(master.data() + done, weights.data(), static_cast<std::int64_t>(count));
    copy(to + done * sizeof(bf16), weights.data(), count * sizeof(bf16), CopyKind::host_to_device);
  }
}

StateDigest::BlockHash StateAccess::hash_block(const Parameter& parameter, StateArray array, std::int64_t first,
                                               const Reader& read) {
  const std::int64_t end = std::min(first + state_digest_block, parameter.count);
  Hash128 hash;
  std::vector<float> values(static_cast<std::size_t>(std::min(part_elements, end - first)));
  for (std::int64_t at = first; at < end; at += part_elements) {
    const auto part = std::span(values).first(static_cast<std::size_t>(std::min(part_elements, end - at)));
    read(parameter, array, at, part);
    hash.add(part.data(), part.size_bytes());
  }
  return hash.bytes();
}

std::string StateAccess::digest(std::span<const std::int64_t> missed) const {
  const auto read_own = [this](const Parameter& p, StateArray array, std::int64_t first, std::span<float> values) {
    read(p, array, first, values);
  };
  return digest(missed, read_own, &device_.host_kernels().parallel());
}

std::string StateAccess::digest(std::span<const std::int64_t> missed, const Reader& read) const {
  return digest(missed, read, nullptr);
}

/// A coded parameter has no moments, and as a master the hash of its codes and scales.
void StateAccess::add_coded(StateDigest& digest, const Parameter& parameter) const {
  digest.begin_parameter(parameter.full_name);
  digest.add_block(coded_.hash(parameter));
  for (std::size_t i = 0; i < state_arrays.size(); ++i) digest.end_array();
  digest.end_parameter(0);
}

std::string StateAccess::code_hash(const Parameter& parameter) const {
  StateDigest digest;
  add_coded(digest, parameter);
  return digest.parameter_hash();
}

/// Digest of the state on `threads`, or on this thread where that is null.
std::string StateAccess::digest(std::span<const std::int64_t> missed, const Reader& read, Parallel* threads) const {
  StateDigest digest;
  std::size_t index = 0;
  for (const Parameter* p : layout_.owned_parameters()) {
    if (p->coded()) {
      add_coded(digest, *p);
      ++index;
      continue;
    }
    const std::int64_t blocks = (p->count + state_digest_block - 1) / state_digest_block;
    std::vector<StateDigest::BlockHash> hashes(state_arrays.size() * static_cast<std::size_t>(blocks));
    const auto hash = [&](std::int64_t i) {
      const StateArray array = state_arrays[static_cast<std::size_t>(i / blocks)];
      hashes[static_cast<std::size_t>(i)] = hash_block(*p, array, i % blocks * state_digest_block, read);
    };
    if (threads != nullptr) threads->run(std::ssize(hashes), hash);
    for (std::int64_t i = 0; threads == nullptr && i < std::ssize(hashes); ++i) hash(i);
    digest.begin_parameter(p->full_name);
    for (std::int64_t i = 0; i < std::ssize(hashes); ++i) {
      digest.add_block(hashes[static_cast<std::size_t>(i)]);
      if ((i + 1) % blocks == 0) digest.end_array();
    }
    digest.end_parameter(missed.empty() ? 0 : missed[index]);
    ++index;
  }
  return digest.text();
}

}  // namespace tandem
