#include "core/base/trace.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"

namespace tandem {
namespace {

struct Span {
  std::uint32_t lane = 0;
  std::uint32_t name = 0;    ///< without the number
  std::int64_t number = -1;  ///< at its end; none below 0
  double begin = 0;
  double end = 0;
  std::uint64_t bytes = 0;
};

/// "step 17" as "step" and 17: as many names as there are steps would be kept otherwise.
std::pair<std::string_view, std::int64_t> split(std::string_view name) {
  const std::size_t space = name.rfind(' ');
  if (space == std::string_view::npos || space + 1 == name.size()) return {name, -1};
  const std::string_view digits = name.substr(space + 1);
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool plain = error == std::errc() && end == digits.data() + digits.size() && number >= 0 &&
                     (digits.size() == 1 || digits.front() != '0');
  return plain ? std::pair(name.substr(0, space), number) : std::pair(name, std::int64_t{-1});
}

/// Numbers texts in order of first use.
class Texts {
 public:
  std::uint32_t operator()(std::string_view text) {
    const auto found = numbers_.find(text);
    if (found != numbers_.end()) return found->second;
    return numbers_.emplace(text, static_cast<std::uint32_t>(numbers_.size())).first->second;
  }
  std::vector<std::string_view> in_order() const {
    std::vector<std::string_view> texts(numbers_.size());
    for (const auto& [text, number] : numbers_) texts[number] = text;
    return texts;
  }

 private:
  std::map<std::string, std::uint32_t, std::less<>> numbers_;
};

/// A file that has no name, and so ends with the process.
class NamelessFile {
 public:
  explicit NamelessFile(const std::filesystem::path& folder) {
    std::string name = (folder / ".tandem-trace-XXXXXX").string();
    fd_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd_ < 0) throw WriteError(folder.string(), std::generic_category().message(errno));
    ::unlink(name.c_str());
  }
  ~NamelessFile() { ::close(fd_); }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;

  /// False, for good, once it took less than it was given.
  bool append(std::span<const Span> spans) {
    const auto bytes = std::as_bytes(spans);
    for (std::size_t done = 0; good_ && done < bytes.size();) {
      const ::ssize_t n = ::write(fd_, bytes.data() + done, bytes.size() - done);
      if (n <= 0 && errno != EINTR) good_ = false;
      if (n > 0) done += static_cast<std::size_t>(n);
    }
    if (good_) count_ += spans.size();
    return good_;
  }
  bool good() const noexcept { return good_; }
  std::size_t count() const noexcept { return count_; }
  /// Reads spans from `first` on: as many as there are, at most all of `spans`.
  std::span<const Span> read(std::size_t first, std::span<Span> spans) {
    const std::size_t wanted = std::min(spans.size(), count_ - first) * sizeof(Span);
    for (std::size_t done = 0; done < wanted;) {
      const ::ssize_t n = ::pread(fd_, reinterpret_cast<char*>(spans.data()) + done, wanted - done,
                                  static_cast<::off_t>(first * sizeof(Span) + done));
      if (n == 0 || (n < 0 && errno != EINTR)) throw WriteError("a trace so far cannot be read back");
      if (n > 0) done += static_cast<std::size_t>(n);
    }
    return spans.first(wanted / sizeof(Span));
  }

 private:
  int fd_ = -1;
  bool good_ = true;
  std::size_t count_ = 0;
};

std::string event_of(const Span& span, std::string_view text, double origin) {
  constexpr double microseconds = 1e6;
  const std::string name = span.number < 0 ? std::string(text) : fmt::format("{} {}", text, span.number);
  nlohmann::json event{{"ph", "X"},
                       {"pid", 1},
                       {"tid", span.lane + 1},
                       {"name", name},
                       {"ts", (span.begin - origin) * microseconds},
                       {"dur", (span.end - span.begin) * microseconds}};
  if (span.bytes > 0) event["args"] = {{"bytes", span.bytes}};
  return json_text(event);
}

std::string metadata(std::string_view kind, std::size_t tid, nlohmann::json args) {
  return json_text(nlohmann::json{{"ph", "M"}, {"pid", 1}, {"tid", tid}, {"name", kind}, {"args", std::move(args)}});
}

}  // namespace

/// Read at the beginning and the end of every task: without the standard library's clock, which doubles the work.
double trace_now() noexcept {
  const auto nanoseconds = [] {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  };
  static const std::int64_t origin = nanoseconds();
  return 1e-9 * static_cast<double>(nanoseconds() - origin);
}

struct Trace::Impl {
  mutable std::mutex mutex;
  Texts lanes;  ///< in order of first use, which is the order of rows
  Texts names;
  double origin = std::numeric_limits<double>::infinity();  ///< the first begin
  std::vector<Span> spans;                                  ///< all, or those that are not in the file yet
  std::unique_ptr<NamelessFile> file;
  static constexpr std::size_t buffered = bytes_of_memory / sizeof(Span);

  void add(const Span& span) {
    origin = std::min(origin, span.begin);
    spans.push_back(span);
    if (!file || spans.size() < buffered) return;
    file->append(spans);
    spans.clear();
  }

  void write_events(std::ostream& out) const {
    out << R"({"displayTimeUnit":"ms","traceEvents":[)" << '\n' << metadata("process_name", 0, {{"name", "tandem"}});
    std::size_t row = 0;
    for (const std::string_view lane : lanes.in_order()) {
      out << ",\n" << metadata("thread_name", row + 1, {{"name", lane}});
      out << ",\n" << metadata("thread_sort_index", row + 1, {{"sort_index", row}});
      ++row;
    }
    const auto texts = names.in_order();
    for_each([&](const Span& span) { out << ",\n" << event_of(span, texts[span.name], origin); });
    out << "\n]}\n";
  }

  template <class Function>
  void for_each(const Function& function) const {
    if (file) {
      std::vector<Span> read(buffered);
      for (std::size_t first = 0; first < file->count(); first += buffered) {
        std::ranges::for_each(file->read(first, read), function);
      }
    }
    std::ranges::for_each(spans, function);
  }
};

Trace::Trace() : impl_(std::make_unique<Impl>()) {}
Trace::Trace(const std::filesystem::path& folder) : Trace() {
  impl_->file = std::make_unique<NamelessFile>(folder.empty() ? "." : folder);
  impl_->spans.reserve(Impl::buffered);
}
Trace::~Trace() = default;

void Trace::span(std::string_view lane, std::string_view name, double begin, double end, std::size_t bytes) {
  if (!std::isfinite(begin) || !std::isfinite(end) || end < begin) {
    throw MisuseError(fmt::format("trace span '{}' ends before it begins", name));
  }
  const std::lock_guard lock(impl_->mutex);
  const auto [text, number] = split(name);
  impl_->add({impl_->lanes(lane), impl_->names(text), number, begin, end, bytes});
}

void Trace::write(const std::filesystem::path& file) const {
  // Written beside its place and renamed, so that nobody ever reads half a trace.
  std::filesystem::path beside = file;
  beside += fmt::format(".{}.part", ::getpid());
  std::error_code error;
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->file && !impl_->file->good()) {
      throw WriteError(fmt::format("cannot write trace {}", file.string()),
                       "its disk took no more of it during the run");
    }
    std::ofstream out(beside, std::ios::trunc);
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

std::vector<Trace::Total> Trace::totals(double since) const {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->file && !impl_->file->good()) throw WriteError("a trace", "its disk took no more of it");
  const auto lanes = impl_->lanes.in_order(), names = impl_->names.in_order();
  std::vector<Total> totals;
  impl_->for_each([&](const Span& span) {
    if (span.begin < since) return;
    const std::string_view lane = lanes[span.lane], name = names[span.name], word = name.substr(0, name.find(' '));
    auto found = std::ranges::find_if(totals, [&](const Total& t) { return t.lane == lane && t.word == word; });
    if (found == totals.end()) found = totals.insert(found, {.lane = std::string(lane), .word = std::string(word)});
    found->seconds += span.end - span.begin;
    found->bytes += span.bytes;
    ++found->spans;
  });
  return totals;
}

std::size_t Trace::size() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->spans.size() + (impl_->file ? impl_->file->count() : 0);
}

}  // namespace tandem
