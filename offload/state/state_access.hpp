#pragma once
// Reading and writing parameters and their optimizer state wherever the plan keeps them. Only while no
// task in flight touches what is asked for.
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "core/host/parallel.hpp"
#include "core/params/parameter_layout.hpp"
#include "core/params/state_digest.hpp"
#include "offload/state/coded_weights.hpp"
#include "offload/storage/storage.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {

class StateAccess {
 public:
  /// All references must outlive the object. A copy that takes longer than `watchdog_seconds` is told as a stall, and
  /// waited for.
  StateAccess(Device& device, const ParameterLayout& layout, const Plan& plan, const Storage& storage,
              double watchdog_seconds);

  /// Elements that a thread takes at a time where all work: what it makes of them stays in its cache.
  static constexpr std::int64_t part_elements = std::int64_t{1} << 16;

  /// Copies elements [first, first + values.size()) of one array of a parameter that owns storage, all of them the
  /// rank's own, on the calling thread; any number of threads may. An array that the parameter does not have is zero.
  /// Blocks.
  void read(const Parameter& parameter, StateArray array, std::int64_t first, std::span<float> values) const;
  /// Writes elements of one array, any of them: those that are not the rank's own are left out, as is an array that the
  /// parameter does not have. A master also sets the
  /// weight; that of a coded parameter is refused. Moments are rounded to nearest where the format keeps fewer bits,
  /// which leaves values read from the same format unchanged. On the threads of the device's host kernels, with
  /// part_elements of scratch each; to the device by few large copies, with the scratch of `read`. Blocks.
  void write(const Parameter& parameter, StateArray array, std::int64_t first, std::span<const float> values) const;
  /// Sink for the stored form of a coded parameter.
  CodeSink& write_codes(const Parameter& parameter) { return coded_.begin(parameter); }
  /// Hash of a coded parameter by which the digest has it. Throws MisuseError as CodedWeights::hash.
  std::string code_hash(const Parameter& parameter) const;
  /// Reads a range of one array of a parameter, as `read` does.
  using Reader = std::function<void(const Parameter&, StateArray, std::int64_t first, std::span<float>)>;
  /// Digest of the state, see docs/state-digest.md. `missed`: updates that each owned parameter has missed; empty:
  /// none. On the threads and with the scratch of `write`. Blocks.
  /// A coded parameter counts by the hash of what was written, see CodedWeights.
  std::string digest(std::span<const std::int64_t> missed) const;
  /// Digest of what `read` gives, on the calling thread, a range after the other in one order.
  std::string digest(std::span<const std::int64_t> missed, const Reader& read) const;

 private:
  static StateDigest::BlockHash hash_block(const Parameter& parameter, StateArray array, std::int64_t first,
                                           const Reader& read);
  std::string digest(std::span<const std::int64_t> missed, const Reader& read, Parallel* threads) const;
  void add_coded(StateDigest& digest, const Parameter& parameter) const;
  bool has(const Parameter& parameter, StateArray array) const noexcept;
  void read_piece(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<float> values) const;
  void write_piece(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<const float> values) const;
  void write_records(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<const float> values) const;
  template <class Part>
  void for_parts(SubgroupIndex subgroup, std::int64_t begin, std::int64_t end, const Part& part) const;
  void to_stored(StateArray array, std::span<const float> values, std::span<bf16> halves) const;
  Tier tier_of(SubgroupIndex subgroup) const noexcept { return subgroup_at(plan_, subgroup).tier; }
  void move(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<std::byte> bytes, bool write) const;
  bool stored_as_fp32(SubgroupIndex subgroup, StateArray array) const noexcept;
  bool stored_in_records(SubgroupIndex subgroup, StateArray array) const noexcept;
  bool lies_in_weights(SubgroupIndex subgroup, StateArray array) const noexcept;
  void load_weights(LayerIndex layer, bool resident, std::int64_t begin, std::span<std::byte> to) const;
  void write_weights(const Parameter& parameter, std::int64_t first, std::span<const float> master) const;
  void write_own_weights(LayerIndex layer, std::int64_t at, std::span<const float> master) const;
  void write_own_fp32_weights(LayerIndex layer, std::int64_t at, std::span<const float> weights) const;
  void read_weights(const Parameter& parameter, std::int64_t first, std::span<float> values) const;
  /// `count` elements of a subgroup from `at` on, which are those from `offset` on of the values that are read or
  /// written.
  struct Piece {
    SubgroupIndex subgroup;
    std::int64_t at;
    std::int64_t offset;
    std::int64_t count;
  };
  std::vector<Piece> pieces_of(const Parameter& parameter, std::int64_t first, std::int64_t count,
                               std::int64_t largest) const;
  void copy(void* to, const void* from, std::size_t bytes, CopyKind kind) const;

  Device& device_;
  const ParameterLayout& layout_;
  const Plan& plan_;
  const Storage& storage_;
  Stream stream_;
  double watchdog_seconds_;
  CodedWeights coded_;
};

}  // namespace tandem
