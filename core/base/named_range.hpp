#pragma once
// The spans of the trace as they happen, for a profiler that is attached to the program: a device that knows one
// offers a sink (Device::ranges). Where nobody listens, a range costs a pointer test.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tandem {

/// Takes ranges. Thread-safe; ranges may overlap in any way.
class RangeSink {
 public:
  using Id = std::uint64_t;
  virtual ~RangeSink() = default;
  /// Begins a range of the row `lane`, as Trace::span names both. `bytes` 0 is left out.
  virtual Id begin(std::string_view lane, const std::string& name, std::size_t bytes) = 0;
  /// Ends one that was begun and not ended, on any thread.
  virtual void end(Id range) noexcept = 0;
};

/// A range that ends when this goes, or takes another's place. The sink must outlive it.
class NamedRange {
 public:
  NamedRange() = default;
  NamedRange(RangeSink& sink, std::string_view lane, const std::string& name, std::size_t bytes = 0)
      : sink_(&sink), id_(sink.begin(lane, name, bytes)) {}
  NamedRange(NamedRange&& other) noexcept : sink_(std::exchange(other.sink_, nullptr)), id_(other.id_) {}
  NamedRange& operator=(NamedRange&& other) noexcept {
    std::swap(sink_, other.sink_);
    std::swap(id_, other.id_);
    other.end();
    return *this;
  }
  ~NamedRange() { end(); }

  void end() noexcept {
    if (sink_ != nullptr) std::exchange(sink_, nullptr)->end(id_);
  }
  /// Whether it has begun and not ended.
  explicit operator bool() const noexcept { return sink_ != nullptr; }

 private:
  RangeSink* sink_ = nullptr;
  RangeSink::Id id_ = 0;
};

}  // namespace tandem
