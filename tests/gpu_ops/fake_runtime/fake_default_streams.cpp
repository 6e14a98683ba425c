#include "tests/gpu_ops/fake_runtime/fake_default_streams.hpp"

#include <utility>

namespace tandem::fake_cuda {
namespace {

class DefaultStreams {
 public:
  static DefaultStreams& get() {
    State::get();  // goes after this
    static DefaultStreams all;
    return all;
  }

  CUstream_st* legacy(int device) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<CUstream_st>& stream = legacy_[device];
    if (!stream) stream = std::make_unique<CUstream_st>(device, 0);
    return stream.get();
  }

  void issue(CUstream_st* stream, Work work) {
    const std::lock_guard lock(mutex_);
    const auto found = legacy_.find(stream->device());
    CUstream_st* const legacy = found == legacy_.end() ? nullptr : found->second.get();
    for (CUstream_st* blocking : blocking_) {
      if (stream == legacy && blocking->device() == legacy->device()) follow(*legacy, *blocking);
    }
    if (legacy != nullptr && blocking_.contains(stream)) follow(*stream, *legacy);
    stream->push(std::move(work));
  }

  void add(CUstream_st* stream) {
    const std::lock_guard lock(mutex_);
    blocking_.insert(stream);
  }

  void remove(CUstream_st* stream) {
    const std::lock_guard lock(mutex_);
    blocking_.erase(stream);
  }

  void forget_legacy() {
    std::map<int, std::unique_ptr<CUstream_st>> gone;
    const std::lock_guard lock(mutex_);
    gone.swap(legacy_);
  }

 private:
  /// Makes later work of `stream` wait for what `first` has now.
  static void follow(CUstream_st& stream, CUstream_st& first) {
    if (first.idle()) return;
    auto mark = std::make_shared<Mark>();
    first.push(pass_mark("record", mark, first.device()));
    stream.push(
        {.kind = "wait", .run = [mark, device = stream.device()] { mark->wait_in_stream(device); }, .always = true});
  }

  std::mutex mutex_;  ///< one call after another, as their order is the order of work
  std::map<int, std::unique_ptr<CUstream_st>> legacy_;
  std::set<CUstream_st*> blocking_;
};

/// A thread's own streams, by card. They block.
class OwnStreams {
 public:
  OwnStreams() { DefaultStreams::get(); }
  ~OwnStreams() {
    for (const auto& [device, stream] : streams_) remove_blocking(stream.get());
  }
  OwnStreams(const OwnStreams&) = delete;
  OwnStreams& operator=(const OwnStreams&) = delete;

  CUstream_st* on(int device) {
    std::unique_ptr<CUstream_st>& stream = streams_[device];
    if (!stream) {
      stream = std::make_unique<CUstream_st>(device, 0);
      add_blocking(stream.get());
    }
    return stream.get();
  }

 private:
  std::map<int, std::unique_ptr<CUstream_st>> streams_;
};

}  // namespace

CUstream_st* stream_of(CUstream_st* handle) {
  thread_local OwnStreams own;
  if (handle == nullptr || handle == cudaStreamLegacy) return DefaultStreams::get().legacy(current_device());
  return handle == cudaStreamPerThread ? own.on(current_device()) : handle;
}

void issue(CUstream_st* stream, Work work) { DefaultStreams::get().issue(stream, std::move(work)); }
void add_blocking(CUstream_st* stream) { DefaultStreams::get().add(stream); }
void remove_blocking(CUstream_st* stream) { DefaultStreams::get().remove(stream); }
void forget_legacy_streams() { DefaultStreams::get().forget_legacy(); }

Work pass_mark(std::string_view kind, std::shared_ptr<Mark> mark, int device) {
  const auto reach = [mark = std::move(mark), device] {
    const State& state = State::get();
    if (state.machine().lost_marks_stay && state.lost(device) != cudaSuccess) return mark->stay(device);
    mark->pass();
  };
  return {.kind = kind, .run = reach, .always = true};
}

}  // namespace tandem::fake_cuda
