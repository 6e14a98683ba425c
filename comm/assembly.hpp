#pragma once
// The group of a launch as rank 0 keeps it: who has come, what all agree on, who has come to which meeting, and what
// has ended the group. No input or output of its own.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/wire.hpp"
#include "core/base/reminder.hpp"

namespace tandem {

/// Classes of errors that end a group, told to every rank.
enum class Ending : std::uint32_t { peer, left, stalled, misuse, usage, device };

/// A property that all ranks must share, such as {"version", "0.1.0"}.
struct Fact {
  std::string name;
  std::string value;
  bool operator==(const Fact&) const = default;
};

/// "ranks differ in version: '1' (rank 0, rank 2), '2' (rank 1); ...": the first of the facts, by rank, in which they
/// do, and what to do about it; empty where all agree.
std::string difference_of(const std::vector<std::vector<Fact>>& facts);

/// Seconds that ranks are waited for.
struct AssemblyLimits {
  double join_seconds = 300.0;   ///< until all ranks are there
  double silent_seconds = 3.0;   ///< until those that are there are told for whom they wait
  double stall_seconds = 300.0;  ///< until a meeting, without anybody coming to it
};

/// Used by one thread. Each rank is told of the start, of each meeting that is complete and of the end by a message.
class Assembly {
 public:
  /// Sends a message to a rank; must not call back.
  using Send = std::function<void(int rank, const Message& message)>;

  /// `meetings`: independent sequences of meetings. `now`: seconds, on the clock of `look`.
  Assembly(int count, std::size_t meetings, const AssemblyLimits& limits, double now, Send send);

  /// A rank that has proven the secret and believes that there are `count`. `from`: its address. Returns false, after
  /// the end of the group, where there is no place for it.
  bool enter(int rank, int count, const std::string& from);
  /// Takes a message of a rank that has entered. `receiver`: where the message comes to a meeting, the rank that alone
  /// gets its values; none: all ranks do. Rank 0's word counts.
  void take(int rank, const Message& message, double now, std::optional<int> receiver = {});
  /// The rank is gone without having left.
  void lose(int rank, const std::string& why);
  /// Ends a group of which something has been waited for too long, and tells ranks that are there for whom they wait.
  /// To be called a few times a second.
  /// `refused`: connections with a wrong secret so far.
  void look(double now, int refused);

  bool started() const noexcept { return started_; }
  /// The message that has ended the group; none while it goes on.
  const std::optional<Message>& ended() const noexcept { return ended_; }

 private:
  struct Member {
    std::string from;
    bool entered = false;
    bool left = false;
    std::optional<std::vector<Fact>> facts;
  };
  struct Meeting {
    std::vector<std::optional<std::vector<std::string>>> calls;  ///< name and value, by rank
    std::size_t arrived = 0;
    double since = 0.0;           ///< when somebody came last
    std::optional<int> receiver;  ///< who alone gets the values, as rank 0 has said
  };

  int count() const noexcept { return static_cast<int>(members_.size()); }
  Member& member(int rank) { return members_[static_cast<std::size_t>(rank)]; }
  void take_facts(int rank, const Message& message);
  void take_call(int rank, const Message& message, double now, std::optional<int> receiver);
  void complete(Meeting& meeting, std::uint32_t number);
  void look_for_ranks(double now, int refused);
  void end(Ending ending, const std::string& reason);
  void tell_all(const Message& message);
  void tell(int rank, const Message& message);

  const AssemblyLimits limits_;
  const double began_;
  const Send send_;
  Reminder reminder_;
  std::vector<Member> members_;
  std::vector<Meeting> meetings_;
  bool started_ = false;
  std::optional<Message> ended_;
};

}  // namespace tandem
