#include "offload/execution/lane_streams.hpp"

#include <initializer_list>
#include <utility>

#include "core/device/watched_wait.hpp"

namespace tandem {
namespace {

/// Tasks of a lane of copies that follow each other on a stream: a millisecond of state.
constexpr int copies_in_a_row = 4;

}  // namespace

LaneStreams::LaneStreams(Device& device, const TaskGraph& graph, bool peers) : device_(device), graph_(graph) {
  of(Lane::host_to_device) = {device.make_stream("host to device"), device.make_stream("host to device")};
  of(Lane::device_to_host) = {device.make_stream("device to host"), device.make_stream("device to host")};
  of(Lane::device) = {device.make_stream("device update", StreamPriority::first), {}};
  if (peers) of(Lane::peers) = {device.make_stream("peers"), {}};
}

/// A card's copy engine goes on with a stream for as long as that has copies. Of a lane that is never idle nobody
/// else's would get their turn, and the caller's tokens wait for the end of all updates. Where a stream hands over to
/// the lane's other one, theirs can go in between; the lane's own order stays.
StreamView LaneStreams::stream_for(TaskId id, Lane lane) {
  OfLane& streams = of(lane);
  const TaskId before = std::exchange(streams.last, id);
  if (streams.take_turns() && streams.in_a_row == copies_in_a_row) {
    std::swap(streams.now, streams.other);
    streams.in_a_row = 0;
    if (!graph_.done(before)) device_.wait(streams.now, graph_.node(before).event);
  }
  ++streams.in_a_row;
  return streams.now;
}

void LaneStreams::wait_to_the_end(std::string_view what, double watchdog_seconds) noexcept {
  for (const Lane lane : device_lanes) {
    const OfLane& streams = of(lane);
    for (const StreamView stream : std::initializer_list<StreamView>{streams.now, streams.other}) {
      if (!stream) continue;
      try {
        tandem::wait_to_the_end(device_, stream, {what, watchdog_seconds});
      } catch (...) {  // the error that failed the stream, reported already
      }
    }
  }
}

}  // namespace tandem
