#include "core/params/state_digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little, "values are hashed as they lie in memory");

constexpr int arrays_of_a_parameter = 3;  // master, m, v

unsigned digit_of(char c) {
  if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
  if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
  throw MisuseError(fmt::format("state digest: '{}' is no hexadecimal digit", c));
}

StateDigest::BlockHash hash_of(std::string_view text) {
  StateDigest::BlockHash hash{};
  if (text.size() != 2 * hash.size()) throw MisuseError(fmt::format("state digest: '{}' is no hash", text));
  for (std::size_t i = 0; i < hash.size(); ++i) {
    hash[i] = static_cast<unsigned char>(16 * digit_of(text[2 * i]) + digit_of(text[2 * i + 1]));
  }
  return hash;
}

}  // namespace

struct StateDigest::Impl {
  Hash128 whole;
  Hash128 parameter;
  Hash128 block;
  std::int64_t in_block = 0;  // elements in the open block
  int arrays = 0;             // ended, of the open parameter
  bool open = false;
  BlockHash last{};  // hash of the parameter that was ended last

  void add_hash(const BlockHash& hash) { parameter.add(hash.data(), hash.size()); }
  void require_open() const {
    if (!open) throw MisuseError("state digest fed outside a parameter");
  }
  void end_block() {
    add_hash(block.bytes());
    block.reset();
    in_block = 0;
  }
};

StateDigest::StateDigest() : impl_(std::make_unique<Impl>()) {}
StateDigest::~StateDigest() = default;
StateDigest::StateDigest(StateDigest&&) noexcept = default;
StateDigest& StateDigest::operator=(StateDigest&&) noexcept = default;

void StateDigest::begin_parameter(std::string_view full_name) {
  if (impl_->open) throw MisuseError("state digest: a parameter begun inside another", std::string(full_name));
  impl_->open = true;
  impl_->arrays = 0;
  impl_->parameter.reset();
  impl_->whole.add(full_name.data(), full_name.size());
  impl_->whole.add("\0", 1);
}

void StateDigest::add(const float* values, std::int64_t count) {
  impl_->require_open();
  while (count > 0) {
    const std::int64_t take = std::min(count, state_digest_block - impl_->in_block);
    impl_->block.add(values, static_cast<std::size_t>(take) * sizeof(float));
    impl_->in_block += take;
    values += take;
    count -= take;
    if (impl_->in_block == state_digest_block) impl_->end_block();
  }
}

void StateDigest::add_block(const BlockHash& hash) {
  impl_->require_open();
  if (impl_->in_block != 0) throw MisuseError("state digest: a block begun inside another");
  impl_->add_hash(hash);
}

void StateDigest::end_array() {
  impl_->require_open();
  if (impl_->in_block > 0) impl_->end_block();
  ++impl_->arrays;
}

void StateDigest::end_parameter(std::int64_t missed_updates) {
  impl_->require_open();
  if (impl_->arrays != arrays_of_a_parameter || impl_->in_block != 0) {
    throw MisuseError("state digest: a parameter needs master, m and v", fmt::format("{} arrays ended", impl_->arrays));
  }
  if (missed_updates < 0) throw MisuseError("state digest: a parameter that missed a negative number of updates");
  if (missed_updates > 0) {
    std::array<unsigned char, sizeof(std::int64_t)> bytes{};  // little endian
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(missed_updates) >> (8 * i));
    }
    impl_->parameter.add(bytes.data(), bytes.size());
  }
  impl_->last = impl_->parameter.bytes();
  impl_->whole.add(impl_->last.data(), impl_->last.size());
  impl_->open = false;
}

void StateDigest::add_parameter(std::string_view full_name, std::string_view hash) {
  const BlockHash bytes = hash_of(hash);
  begin_parameter(full_name);
  impl_->last = bytes;
  impl_->whole.add(bytes.data(), bytes.size());
  impl_->open = false;
}

std::string StateDigest::parameter_hash() const {
  std::string text;
  for (const unsigned char byte : impl_->last) text += fmt::format("{:02x}", byte);
  return text;
}

std::string StateDigest::text() const { return impl_->whole.text(); }

}  // namespace tandem
