#pragma once
// Proofs that a process knows the secret of a launch, which never crosses the network: HMAC-SHA256 over random bytes of
// both sides.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem {

constexpr std::size_t nonce_bytes = 32;
constexpr std::size_t proof_bytes = 32;

/// Random bytes for one handshake, made by the cryptographic generator. Throws DeviceError where it has none.
std::string random_nonce();

/// Random bytes of both sides of a handshake.
struct Nonces {
  std::string of_host;    ///< rank 0's
  std::string of_member;  ///< bytes of the rank that connects
};

/// Proof of rank `rank` of `count`. That of rank 0, which answers, is different for every connection too.
std::string proof_of(std::string_view secret, const Nonces& nonces, std::uint32_t rank, std::uint32_t count);
/// Whether two proofs are equal, in a time that does not depend on where they differ.
bool same_proof(std::string_view one, std::string_view other) noexcept;

}  // namespace tandem
