#pragma once
// The digest of a training state: one line that two people compare. It is a function of names and
// values alone, never of where the values lie. The byte layout is in docs/state-digest.md.
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace tandem {

/// Elements of one hashed block: 4 MiB of fp32.
constexpr std::int64_t state_digest_block = std::int64_t{1} << 20;

/// Fed parameter by parameter in model order, each as begin_parameter, then master, m and v (each any
/// number of `add` and `add_block`, and one `end_array`), then end_parameter. Holds a few hundred bytes. Calls out of
/// order throw MisuseError. Not thread-safe.
class StateDigest {
 public:
  using BlockHash = std::array<unsigned char, 16>;  ///< hash of a block's fp32 bits, as Hash128::bytes

  StateDigest();
  ~StateDigest();
  StateDigest(StateDigest&&) noexcept;
  StateDigest& operator=(StateDigest&&) noexcept;

  void begin_parameter(std::string_view full_name);
  /// The next `count` elements of the current array, fp32.
  void add(const float* values, std::int64_t count);
  /// The next state_digest_block elements of the current array, or its last ones, of which the caller has the hash:
  /// blocks can be hashed side by side.
  void add_block(const BlockHash& hash);
  void end_array();
  /// `missed_updates`: updates of the state that left this parameter as it was. Throws MisuseError where they are
  /// negative.
  void end_parameter(std::int64_t missed_updates = 0);
  /// A whole parameter, of which the caller has the hash as parameter_hash() gave it. Throws MisuseError on other text.
  void add_parameter(std::string_view full_name, std::string_view hash);
  /// Hash of the parameter that was ended last, 32 hexadecimal digits.
  std::string parameter_hash() const;
  /// 32 hexadecimal digits over all parameters ended so far.
  std::string text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
