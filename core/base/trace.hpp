#pragma once
// A recorder of what ran where and when, written as Chrome/Perfetto JSON. Recording costs two clock
// reads and a short lock a span; a null recorder costs a pointer test.
#include <cstddef>
#include <cstdint>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Seconds on the clock that all spans share; zero is arbitrary.
double trace_now() noexcept;

class Trace {
 public:
  /// Keeps what it is told in memory, which grows.
  Trace();
  /// Keeps it in a file without a name in this folder, and of memory takes `bytes_of_memory` and the names (less a
  /// number at their end), however long the run. Throws WriteError.
  explicit Trace(const std::filesystem::path& folder);
  static constexpr std::size_t bytes_of_memory = std::size_t{64} << 10;
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// Adds [begin, end) seconds to the row `lane` ("h2d", "cpu", "compute"). `bytes` 0 is left out.
  /// Thread-safe.
  void span(std::string_view lane, std::string_view name, double begin, double end, std::size_t bytes = 0);
  /// Writes {"traceEvents": [...]}; one thread row per lane. Throws WriteError, also where the file without a name took
  /// no more.
  void write(const std::filesystem::path& file) const;
  std::size_t size() const;

  /// Spans of one lane whose names have the same first word, as those of a kind of task have.
  struct Total {
    std::string lane, word;
    double seconds = 0.0;  ///< sum of their lengths
    std::uint64_t bytes = 0;
    std::int64_t spans = 0;
  };
  /// Totals of the spans that began at `since` or later, in order of first use. Throws WriteError as `write` does.
  std::vector<Total> totals(double since) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
