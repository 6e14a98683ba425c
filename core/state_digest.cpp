#include "core/state_digest.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <new>
#include <vector>

#include "core/error.hpp"

namespace tandem {
namespace {

static_assert(std::endian::native == std::endian::little, "values are hashed as they lie in memory");

constexpr int arrays_of_a_parameter = 3;  // master, m, v

class Hasher {
 public:
  Hasher() : state_(XXH3_createState()) {
    if (state_ == nullptr) throw std::bad_alloc();
    reset();
  }
  ~Hasher() { XXH3_freeState(state_); }
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  void reset() { XXH3_128bits_reset(state_); }
  void add(const void* data, std::size_t bytes) { XXH3_128bits_update(state_, data, bytes); }
  XXH128_canonical_t canonical() const {
    XXH128_canonical_t result;
    XXH128_canonicalFromHash(&result, XXH3_128bits_digest(state_));
    return result;
  }

 private:
  XXH3_state_t* state_;
};

}  // namespace

struct StateDigest::Impl {
  Hasher whole;
  Hasher parameter;
  Hasher block;
  std::int64_t in_block = 0;  // elements in the open block
  int arrays = 0;             // ended, of the open parameter
  bool open = false;

  void require_open() const {
    if (!open) throw MisuseError("state digest fed outside a parameter");
  }
  void end_block() {
    const auto hash = block.canonical();
    parameter.add(hash.digest, sizeof(hash.digest));
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

void StateDigest::end_array() {
  impl_->require_open();
  if (impl_->in_block > 0) impl_->end_block();
  ++impl_->arrays;
}

void StateDigest::end_parameter() {
  impl_->require_open();
  if (impl_->arrays != arrays_of_a_parameter || impl_->in_block != 0) {
    throw MisuseError("state digest: a parameter needs master, m and v", fmt::format("{} arrays ended", impl_->arrays));
  }
  const auto hash = impl_->parameter.canonical();
  impl_->whole.add(hash.digest, sizeof(hash.digest));
  impl_->open = false;
}

std::string StateDigest::text() const {
  const auto hash = impl_->whole.canonical();
  std::string result;
  for (const unsigned char byte : hash.digest) result += fmt::format("{:02x}", byte);
  return result;
}

}  // namespace tandem
