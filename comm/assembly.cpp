#include "comm/assembly.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

namespace tandem {
namespace {

/// "rank 1, rank 3": the ranks for which `chosen` is true.
template <class Chosen>
std::string ranks_where(int count, const Chosen& chosen) {
  std::string text;
  for (int rank = 0; rank < count; ++rank) {
    if (chosen(static_cast<std::size_t>(rank))) text += fmt::format("{}rank {}", text.empty() ? "" : ", ", rank);
  }
  return text;
}

/// " (3 connections had another secret, and were refused)"; empty where there were none.
std::string text_of_refused(int connections) {
  if (connections == 0) return "";
  return fmt::format(" ({} connection{} had another secret, and {} refused)", connections, connections == 1 ? "" : "s",
                     connections == 1 ? "was" : "were");
}

}  // namespace

std::string difference_of(const std::vector<std::vector<Fact>>& facts) {
  const int count = static_cast<int>(facts.size());
  std::vector<std::string> names;
  for (const std::vector<Fact>& each : facts) {
    for (const Fact& fact : each) {
      if (std::ranges::find(names, fact.name) == names.end()) names.push_back(fact.name);
    }
  }
  for (const std::string& name : names) {
    std::vector<std::string> values;
    for (const std::vector<Fact>& each : facts) {
      const auto found = std::ranges::find(each, name, &Fact::name);
      values.push_back(found == each.end() ? "" : found->value);
    }
    if (std::ranges::count(values, values[0]) == count) continue;
    std::string text;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (std::ranges::find(values, values[i]) != values.begin() + static_cast<std::ptrdiff_t>(i)) continue;
      const std::string value = values[i].empty() ? "not given" : fmt::format("'{}'", shown(values[i]));
      text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", value,
                          ranks_where(count, [&](std::size_t rank) { return values[rank] == values[i]; }));
    }
    return fmt::format("ranks differ in {}: {}; start all ranks with the same program, options and kind of device",
                       shown(name), text);
  }
  return "";
}

Assembly::Assembly(int count, std::size_t meetings, const AssemblyLimits& limits, double now, Send send)
    : limits_(limits),
      began_(now),
      send_(std::move(send)),
      reminder_(now, limits.silent_seconds),
      members_(static_cast<std::size_t>(count)) {
  meetings_.resize(meetings);
  for (Meeting& meeting : meetings_) meeting.calls.resize(members_.size());
}

bool Assembly::enter(int rank, int count, const std::string& from) {
  if (ended_) return false;
  if (count != this->count()) {
    end(Ending::usage, fmt::format("ranks differ in their number: {} says that there are {}, and rank 0 that there are "
                                   "{}; start all with one WORLD_SIZE",
                                   from, count, this->count()));
  } else if (rank < 0 || rank >= count) {
    end(Ending::usage, fmt::format("there is no rank {} of {}: {} says that it is; give each process a RANK below the "
                                   "number of ranks",
                                   rank, count, from));
  } else if (member(rank).entered) {
    end(Ending::usage, fmt::format("two processes are rank {}: {} and {}; give each process a RANK of its own", rank,
                                   member(rank).from, from));
  } else {
    member(rank).from = from;
    member(rank).entered = true;
    return true;
  }
  return false;
}

void Assembly::take(int rank, const Message& message, double now, std::optional<int> receiver) {
  switch (message.kind) {
    case MessageKind::facts:
      return take_facts(rank, message);
    case MessageKind::call:
      return take_call(rank, message, now, receiver);
    case MessageKind::ping:
      return;
    case MessageKind::failed:
      return end(Ending::peer,
                 fmt::format("rank {} failed: {}", rank, message.fields.empty() ? "" : message.fields[0]));
    case MessageKind::leave:
      member(rank).left = true;
      return end(Ending::left, fmt::format("rank {} has left", rank));
    default:
      return lose(rank, "it sent a message that is not a rank's");
  }
}

void Assembly::take_facts(int rank, const Message& message) {
  if (ended_) return;
  if (member(rank).facts || message.fields.size() % 2 != 0) return lose(rank, "it sent a message that is out of place");
  std::vector<Fact> facts;
  for (std::size_t i = 0; i < message.fields.size(); i += 2)
    facts.push_back({message.fields[i], message.fields[i + 1]});
  member(rank).facts = std::move(facts);
  if (!std::ranges::all_of(members_, [](const Member& each) { return each.facts.has_value(); })) return;
  std::vector<std::vector<Fact>> all;
  for (const Member& each : members_) all.push_back(*each.facts);
  if (const std::string text = difference_of(all); !text.empty()) return end(Ending::usage, text);
  started_ = true;
  tell_all({.kind = MessageKind::start});
}

void Assembly::take_call(int rank, const Message& message, double now, std::optional<int> receiver) {
  if (ended_) return;
  if (message.number >= meetings_.size() || message.fields.size() != 2 || message.fields[1].size() > value_limit) {
    return lose(rank, "it sent a message that is out of place");
  }
  Meeting& meeting = meetings_[message.number];
  auto& call = meeting.calls[static_cast<std::size_t>(rank)];
  if (call || !started_) return lose(rank, "it sent a message that is out of place");
  call = message.fields;
  meeting.since = now;
  if (rank == 0) meeting.receiver = receiver;
  if (++meeting.arrived == members_.size()) complete(meeting, message.number);
}

void Assembly::complete(Meeting& meeting, std::uint32_t number) {
  std::string differing;
  Message met{.kind = MessageKind::met, .number = number};
  const std::string first = (*meeting.calls[0])[0];
  for (std::size_t rank = 0; rank < meeting.calls.size(); ++rank) {
    std::vector<std::string>& call = *meeting.calls[rank];
    if (call[0] != first) differing += fmt::format(", rank {} calls {}", rank, call[0]);
    met.fields.push_back(std::move(call[1]));
    meeting.calls[rank].reset();
  }
  meeting.arrived = 0;
  if (!differing.empty()) {
    return end(Ending::misuse,
               fmt::format("ranks of a group differ in what they call: rank 0 calls {}{}", first, differing));
  }
  if (!meeting.receiver) return tell_all(met);
  tell(*meeting.receiver, met);
  met.fields.assign(met.fields.size(), "");
  for (int rank = 0; rank < count(); ++rank) {
    if (rank != *meeting.receiver) tell(rank, met);
  }
}

void Assembly::lose(int rank, const std::string& why) {
  if (member(rank).left) return;
  member(rank).left = true;
  end(Ending::peer, fmt::format("rank {} at {} is lost: {}", rank, member(rank).from, why));
}

void Assembly::look(double now, int refused) {
  if (ended_) return;
  if (!started_) return look_for_ranks(now, refused);
  for (const Meeting& meeting : meetings_) {
    if (meeting.arrived == 0 || now - meeting.since <= limits_.stall_seconds) continue;
    const auto here = std::ranges::find_if(meeting.calls, [](const auto& call) { return call.has_value(); });
    const std::string name = (**here)[0].substr(0, (**here)[0].find(' '));
    return end(
        Ending::stalled,
        fmt::format("waiting for {} of the group made no progress for {:.0f} s: {} does no more", name,
                    now - meeting.since, ranks_where(count(), [&](std::size_t rank) { return !meeting.calls[rank]; })));
  }
}

void Assembly::look_for_ranks(double now, int refused) {
  const std::string missing = ranks_where(count(), [&](std::size_t rank) { return !members_[rank].facts; });
  const double left = began_ + limits_.join_seconds - now;
  if (left < 0.0) {
    return end(Ending::device, fmt::format("{} did not come within {:.0f} s{}; start one process for each rank, with "
                                           "one address and secret",
                                           missing, limits_.join_seconds, text_of_refused(refused)));
  }
  if (!reminder_.due(now)) return;
  const Message waiting{.kind = MessageKind::waiting,
                        .fields = {fmt::format("waiting for {} of {} at {}, for another {:.0f} s{}", missing, count(),
                                               members_[0].from, left, text_of_refused(refused))}};
  for (int rank = 0; rank < count(); ++rank) {
    if (member(rank).entered) send_(rank, waiting);
  }
}

// A group that one rank has left may still move bytes for calls to which all had come: whoever waits for these is to
// know of a failure.
void Assembly::end(Ending ending, const std::string& reason) {
  const bool only_left = ended_ && static_cast<Ending>(ended_->number) == Ending::left;
  if (ended_ && (!only_left || ending == Ending::left)) return;
  ended_ = Message{.kind = MessageKind::ended, .number = static_cast<std::uint32_t>(ending), .fields = {reason}};
  tell_all(*ended_);
}

void Assembly::tell_all(const Message& message) {
  for (int rank = 0; rank < count(); ++rank) tell(rank, message);
}

void Assembly::tell(int rank, const Message& message) {
  if (!member(rank).left) send_(rank, message);
}

}  // namespace tandem
