#pragma once
// Policies: how a user asks for a division of the optimizer's work.
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

/// Choice of the place of each subgroup's state, and of the processor that updates it.
///  `device`         everything on the device, nothing offloaded
///  `host`           all state in host memory, every update on the CPU (ZeRO-Offload)
///  `static:R`       the first share R lives and is updated on the host, the rest resident on the device (TwinFlow)
///  `interleave:K`   all state on the host; every K-th subgroup is streamed through the device, the others
///                   are updated on the CPU; with `,resident=S` the last share S is resident (Deep Optimizer States)
///  `stream`         all state on the host, every subgroup streamed through the device
///  `auto`           `make_plan`: as much on the device as fits, that is the first of `device`, `static:0.1` to
///                   `static:0.9` and `host` that does; `choose_plan`: what is predicted to be the fastest
struct Policy {
  enum class Kind : std::uint8_t { automatic, device, host, static_share, interleave, stream };
  Kind kind = Kind::automatic;
  double host_share = 1.0;      ///< R of static_share, [0, 1]
  std::int64_t stride = 1;      ///< K of interleave, >= 1; 1 streams every subgroup
  double resident_share = 0.0;  ///< S of interleave, [0, 1]

  static Policy automatic() { return {}; }
  static Policy device() { return {.kind = Kind::device}; }
  static Policy host() { return {.kind = Kind::host}; }
  static Policy stream() { return {.kind = Kind::stream}; }
  static Policy static_share(double on_cpu) { return {.kind = Kind::static_share, .host_share = on_cpu}; }
  static Policy interleave(std::int64_t stride, double resident = 0.0) {
    return {.kind = Kind::interleave, .stride = stride, .resident_share = resident};
  }

  /// Throws UsageError where a number is out of its range.
  void check() const;
  /// Text that `parse_policy` reads back: "interleave:4,resident=0.25".
  std::string text() const;
  bool operator==(const Policy&) const = default;
};

/// The policy that `text` names. Throws UsageError that names what is wrong and the accepted forms.
Policy parse_policy(std::string_view text);

}  // namespace tandem
