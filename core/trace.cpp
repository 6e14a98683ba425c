#include "core/trace.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.hpp"

namespace tandem {
namespace {

struct Span {
  std::size_t lane = 0;
  std::string name;
  double begin = 0;
  double end = 0;
  std::size_t bytes = 0;
};

// Names are data from elsewhere: bytes that are no UTF-8 are replaced, never thrown over.
std::string text_of(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string event_of(const Span& span, double origin) {
  constexpr double microseconds = 1e6;
  nlohmann::json event{{"ph", "X"},
                       {"pid", 1},
                       {"tid", span.lane + 1},
                       {"name", span.name},
                       {"ts", (span.begin - origin) * microseconds},
                       {"dur", (span.end - span.begin) * microseconds}};
  if (span.bytes > 0) event["args"] = {{"bytes", span.bytes}};
  return text_of(event);
}

std::string metadata(std::string_view kind, std::size_t tid, nlohmann::json args) {
  return text_of({{"ph", "M"}, {"pid", 1}, {"tid", tid}, {"name", kind}, {"args", std::move(args)}});
}

}  // namespace

double trace_now() noexcept {
  using Clock = std::chrono::steady_clock;
  static const Clock::time_point origin = Clock::now();
  return std::chrono::duration<double>(Clock::now() - origin).count();
}

struct Trace::Impl {
  mutable std::mutex mutex;
  std::vector<std::string> lanes;  ///< in order of first use, which is the order of rows
  std::vector<Span> spans;

  std::size_t lane(std::string_view name) {
    const auto found = std::find(lanes.begin(), lanes.end(), name);
    if (found != lanes.end()) return static_cast<std::size_t>(found - lanes.begin());
    lanes.emplace_back(name);
    return lanes.size() - 1;
  }

  void write_events(std::ostream& out) const {
    double origin = spans.empty() ? 0 : spans.front().begin;
    for (const Span& span : spans) origin = std::min(origin, span.begin);
    out << R"({"displayTimeUnit":"ms","traceEvents":[)" << '\n' << metadata("process_name", 0, {{"name", "tandem"}});
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      out << ",\n" << metadata("thread_name", i + 1, {{"name", lanes[i]}});
      out << ",\n" << metadata("thread_sort_index", i + 1, {{"sort_index", i}});
    }
    for (const Span& span : spans) out << ",\n" << event_of(span, origin);
    out << "\n]}\n";
  }
};

Trace::Trace() : impl_(std::make_unique<Impl>()) {}
Trace::~Trace() = default;

void Trace::span(std::string_view lane, std::string_view name, double begin, double end, std::size_t bytes) {
  if (!std::isfinite(begin) || !std::isfinite(end) || end < begin) {
    throw MisuseError(fmt::format("trace span '{}' ends before it begins", name));
  }
  const std::lock_guard lock(impl_->mutex);
  impl_->spans.push_back({impl_->lane(lane), std::string(name), begin, end, bytes});
}

void Trace::write(const std::filesystem::path& file) const {
  // Written beside its place and renamed, so that nobody ever reads half a trace.
  std::filesystem::path beside = file;
  beside += fmt::format(".{}.part", ::getpid());
  std::error_code error;
  {
    std::ofstream out(beside, std::ios::trunc);
    const std::lock_guard lock(impl_->mutex);
    if (out) impl_->write_events(out);
    out.close();
    if (!out) {
      std::filesystem::remove(beside, error);
      throw WriteError(fmt::format("cannot write trace {}", file.string()),
                       "its folder is missing, full or not writable", "name another file with --trace");
    }
  }
  std::filesystem::rename(beside, file, error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(beside, ignored);
    throw WriteError(fmt::format("cannot write trace {}", file.string()), error.message(),
                     "name another file with --trace");
  }
}

std::size_t Trace::size() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->spans.size();
}

}  // namespace tandem
