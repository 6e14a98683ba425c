#include "train/hf/base_hashes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "core/numerics/bf16.hpp"
#include "core/params/state_array.hpp"
#include "core/params/state_digest.hpp"

namespace tandem {
namespace {

/// Digest of the values of one parameter at a time.
class ParameterHash {
 public:
  void add(const Parameter& p, std::int64_t first, std::span<const float> values) {
    if (first == 0) digest_.begin_parameter(p.full_name);
    std::array<float, 4096> rounded;  // the values as weights of bf16
    for (std::size_t at = 0; at < values.size(); at += rounded.size()) {
      const auto part = values.subspan(at, std::min(rounded.size(), values.size() - at));
      const bool whole = p.options.weight == DType::f32;
      std::ranges::transform(part, rounded.begin(), [whole](float x) {
        return whole ? x : numerics::bf16_to_float(numerics::weight_of_master(x));
      });
      digest_.add(rounded.data(), std::ssize(part));
    }
  }

  std::string of_whole(const Parameter& p) {
    digest_.end_array();
    for (std::size_t array = 1; array < state_arrays.size(); ++array) add_zeros(p.count);
    digest_.end_parameter();
    return digest_.parameter_hash();
  }

 private:
  /// Whole blocks of zeros have one hash, which is made once: a large base has hundreds of gigabytes of them.
  void add_zeros(std::int64_t count) {
    static const std::vector<float> zeros(static_cast<std::size_t>(state_digest_block));
    static const StateDigest::BlockHash hash_of_block = hash_of(zeros);
    for (; count >= state_digest_block; count -= state_digest_block) digest_.add_block(hash_of_block);
    digest_.add(zeros.data(), count);
    digest_.end_array();
  }
  static StateDigest::BlockHash hash_of(const std::vector<float>& values) {
    Hash128 hash;
    hash.add(values.data(), values.size() * sizeof(float));
    return hash.bytes();
  }

  StateDigest digest_;
};

[[noreturn]] void refuse_base(const Checkpoint& checkpoint, const std::string& parameter) {
  throw InputError(
      fmt::format("checkpoint {}", checkpoint.directory().string()),
      fmt::format("the base has changed since {} trained: {} has other values",
                  checkpoint.manifest().adapter.empty() ? "the others were" : "its adapters were", parameter),
      "put the base back as it was, or name by --model where it is");
}

}  // namespace

ParameterValues hashing(ParameterValues values, std::function<bool(const Parameter&)> wanted,
                        std::function<void(const Parameter&, const std::string&)> done) {
  auto hash = std::make_shared<ParameterHash>();
  return [values = std::move(values), wanted = std::move(wanted), done = std::move(done), hash](
             const Parameter& p, std::int64_t first, std::span<float> to) {
    values(p, first, to);
    if (!wanted(p)) return;
    hash->add(p, first, to);
    if (first + std::ssize(to) == p.count) done(p, hash->of_whole(p));
  };
}

void check_base(const Checkpoint& checkpoint, const BaseHashes& hashes) {
  const auto hash_in = [](const std::map<std::string, std::string>& all, const std::string& name) {
    const auto found = all.find(name);
    return found == all.end() ? std::string() : found->second;
  };
  for (const CheckpointParameter& p : checkpoint.manifest().parameters) {
    if (p.elsewhere.empty() || p.elsewhere == hash_in(hashes.stored, p.name)) continue;
    // Checkpoints made before codes had a hash have that of the values alone.
    if (p.original.empty() && p.elsewhere == hash_in(hashes.original, p.name)) continue;
    refuse_base(checkpoint, p.name);
  }
}

void check_base(const Checkpoint& checkpoint, const Parameter& p, const std::string& hash_of_values) {
  const auto& stored = checkpoint.manifest().parameters;
  const auto found = std::ranges::find(stored, p.full_name, &CheckpointParameter::name);
  if (found == stored.end() || found->elsewhere.empty()) return;
  if (hash_of_values != (found->original.empty() ? found->elsewhere : found->original)) {
    refuse_base(checkpoint, p.full_name);
  }
}

}  // namespace tandem
