#pragma once
// Copies from other cards, tried before they are trusted. Internal to gpu_ops.
#include <cstddef>
#include <mutex>
#include <optional>
#include <set>

#include "core/device/device.hpp"

namespace tandem {

/// The cards from which a device copies. There are machines whose driver says that cards reach each other's memory, and
/// whose copies arrive changed all the same.
class CudaPeers {
 public:
  /// `slower` is told once where copies of this device go through the host since straight ones arrive changed.
  CudaPeers(int ordinal, Notice slower) : ordinal_(ordinal), slower_(std::move(slower)) {}
  CudaPeers(const CudaPeers&) = delete;
  CudaPeers& operator=(const CudaPeers&) = delete;

  /// Bytes that are copied to try a peer, and taken for that of the memory of both cards.
  static constexpr std::size_t tried_bytes = std::size_t{256} << 10;

  /// Lets copies come from the memory of `peer`, another card: straight where the driver lets them and a pattern that
  /// is copied so arrives as it is, else through the host. Blocks at the first call for a peer. The device of `ordinal`
  /// is current. Throws RuntimeError where copies arrive changed and nothing can be done about it.
  void reach(int peer);

 private:
  std::optional<bool> arrives(int peer) const;
  void go_through_the_host(int peer, bool tried);

  const int ordinal_;
  const Notice slower_;
  std::mutex mutex_;
  std::set<int> reached_;
  std::set<int> enabled_;  ///< by this object, which may take it back
  bool told_ = false;
};

}  // namespace tandem
