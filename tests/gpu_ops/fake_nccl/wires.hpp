#pragma once
// Connections between the ranks of a communicator of the fake NCCL: sockets of the machine. Internal to it.
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace tandem::fake_nccl {

/// Facts of a rank that the others are told as they connect.
struct Place {
  int rank = 0;
  int process = 0;
  int card = 0;
};

/// A socket to each other rank. Any number of threads may use different ones.
class Wires {
 public:
  Wires(const std::string& id, Place own, int count);
  ~Wires();
  Wires(const Wires&) = delete;
  Wires& operator=(const Wires&) = delete;

  using Ended = std::function<bool()>;
  /// Blocks until all ranks are connected. Returns false where `ended` is true before, or the system refuses.
  bool connect(const Ended& ended);
  /// Whether two ranks have one card.
  bool share_cards() const;

  /// Sends or receives what goes at once: the number of bytes; -1 once the other side is gone.
  std::ptrdiff_t send_some(int peer, const std::byte* data, std::size_t bytes) const;
  std::ptrdiff_t receive_some(int peer, std::byte* data, std::size_t bytes) const;
  /// Whether the peer has sent something that was not received.
  bool has_more(int peer) const;

 private:
  bool connect_to(int peer, const Ended& ended);
  bool accept_one(const Ended& ended);
  bool greet(int socket, const Ended& ended);
  std::string name_of(int rank) const;

  const std::string id_;
  const Place own_;
  int listening_ = -1;
  std::vector<int> sockets_;   ///< by rank; -1: none
  std::vector<Place> places_;  ///< by rank
};

}  // namespace tandem::fake_nccl
