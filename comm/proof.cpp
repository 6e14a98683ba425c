#include "comm/proof.hpp"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "core/base/error.hpp"

namespace tandem {
namespace {

unsigned char* bytes_of(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }
const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

}  // namespace

std::string random_nonce() {
  std::string nonce(nonce_bytes, '\0');
  if (RAND_bytes(bytes_of(nonce), static_cast<int>(nonce.size())) != 1) {
    throw DeviceError("no random bytes for the handshake of ranks", "OpenSSL has no source of them");
  }
  return nonce;
}

// Nonces have one length, so that no two handshakes are one text.
std::string proof_of(std::string_view secret, const Nonces& nonces, std::uint32_t rank, std::uint32_t count) {
  const std::string text = fmt::format("tandem rank {} of {}:{}{}", rank, count, nonces.of_host, nonces.of_member);
  std::string proof(proof_bytes, '\0');
  unsigned int written = 0;
  if (HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), bytes_of(text), text.size(), bytes_of(proof),
           &written) == nullptr ||
      written != proof_bytes) {
    throw DeviceError("no proof of the secret of the launch", "OpenSSL has no HMAC-SHA256");
  }
  return proof;
}

bool same_proof(std::string_view one, std::string_view other) noexcept {
  return one.size() == other.size() && CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

}  // namespace tandem
