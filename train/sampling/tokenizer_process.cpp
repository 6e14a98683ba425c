#include "train/sampling/tokenizer_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>

#include "core/base/error.hpp"
#include "train/config/units.hpp"

namespace tandem {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr std::string_view script_name = "tokenizer_process.py";
constexpr const char* patience_name = "TANDEM_TOKENIZER_SECONDS";
constexpr const char* advice =
    "install it, name a Python that has it in TANDEM_PYTHON, or give token ids with --prompt-ids";

/// The script, of an installed program or of the source tree that a program was built in.
fs::path script_path() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  fs::path folder = program.parent_path();
  for (int level = 0; level < 4 && !folder.empty(); ++level, folder = folder.parent_path()) {
    for (const char* tools : {"share/tandem/tools", "tools"}) {
      fs::path script = folder / tools / script_name;
      if (fs::is_regular_file(script, error)) return script;
    }
  }
  throw UsageError(fmt::format("the tokenizer needs {}, which lies nowhere near {}", script_name, program.string()),
                   "the installation is not whole", "install tandem again, or give token ids with --prompt-ids");
}

std::string python_name() {
  const char* const named = std::getenv("TANDEM_PYTHON");
  return named != nullptr && *named != '\0' ? named : "python3";
}

/// Time in which an answer must come: a large tokenizer takes seconds to load, from a slow disk more.
std::chrono::seconds patience() {
  constexpr std::int64_t usual = 120, most = 86400;
  const char* const named = std::getenv(patience_name);
  if (named == nullptr || *named == '\0') return std::chrono::seconds(usual);
  std::int64_t seconds = 0;
  try {
    seconds = parse_integer(named);
  } catch (const UsageError&) {
    seconds = 0;  // refused below
  }
  if (seconds >= 1 && seconds <= most) return std::chrono::seconds(seconds);
  throw UsageError(fmt::format("{}={}", patience_name, named), "not a number of seconds",
                   fmt::format("give 1 to {}, or unset it", most));
}

/// The last line of a file that is open for reading.
std::string last_line_of(int file) {
  std::string text;
  std::array<char, 4096> piece{};
  off_t at = 0;
  for (ssize_t got = 0; (got = ::pread(file, piece.data(), piece.size(), at)) > 0; at += got) {
    text.append(piece.data(), static_cast<std::size_t>(got));
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const std::size_t line = text.rfind('\n');
  return line == std::string::npos ? text : text.substr(line + 1);
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
    read = ends[0];
    write = ends[1];
  }
};

/// Runs in the child alone, and calls nothing that another thread's locks may hold up.
[[noreturn]] void become(const char* const* arguments, int in, int out, int errors, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGPIPE, SIG_DFL);
  if (::getppid() == parent && ::dup2(in, STDIN_FILENO) >= 0 && ::dup2(out, STDOUT_FILENO) >= 0 &&
      ::dup2(errors, STDERR_FILENO) >= 0) {
    ::execvp(arguments[0], const_cast<char* const*>(arguments));
  }
  ::_exit(127);
}

/// A field of an answer.
template <class T>
T field_of(const std::string& answer, const char* name) {
  try {
    return Json::parse(answer).at(name).get<T>();
  } catch (const Json::exception&) {
    throw UsageError("the tokenizer's process", fmt::format("answers without \"{}\": {}", name, answer), advice);
  }
}

std::string text_of_status(int status) {
  return WIFSIGNALED(status) ? fmt::format("by signal {}", WTERMSIG(status))
                             : fmt::format("with exit code {}", WEXITSTATUS(status));
}

}  // namespace

fs::path tokenizer_folder(const ModelSource& source) {
  const auto found = std::ranges::find(source.beside, "tokenizer.json", &FileBeside::name);
  return found == source.beside.end() ? fs::path() : found->from.parent_path();
}

class TokenizerProcess::Stream final : public TextStream {
 public:
  Stream(TokenizerProcess& process, std::int64_t number) : process_(process), number_(number) {}
  std::string next(std::int32_t token) override {
    return text(process_.ask(Json{{"stream", number_}, {"next", token}}.dump()));
  }
  std::string end() override { return text(process_.ask(Json{{"stream", number_}, {"end", true}}.dump())); }

 private:
  static std::string text(const std::string& answer) { return field_of<std::string>(answer, "text"); }
  TokenizerProcess& process_;
  std::int64_t number_;
};

TokenizerProcess::TokenizerProcess(const fs::path& folder, std::int64_t vocabulary)
    : python_(python_name()), patience_(patience()), vocabulary_(vocabulary) {
  start(script_path(), folder);
  try {
    has_template_ = field_of<bool>(ask("{}"), "template");
  } catch (...) {
    end();
    throw;
  }
}

TokenizerProcess::~TokenizerProcess() { end(); }

void TokenizerProcess::start(const fs::path& script, const fs::path& folder) {
  const Pipe requests, answers;
  errors_ = ::memfd_create("tokenizer errors", MFD_CLOEXEC);
  // No compiled modules are left beside the script.
  const std::array<const char*, 5> arguments{python_.c_str(), "-B", script.c_str(), folder.c_str(), nullptr};
  const pid_t own = ::getpid();
  process_ = ::fork();
  if (process_ == 0) become(arguments.data(), requests.read, answers.write, errors_, own);
  ::close(requests.read);
  ::close(answers.write);
  to_ = requests.write;
  from_ = answers.read;
  ::fcntl(to_, F_SETFL, O_NONBLOCK);  // a process that does not read must not hold this one up
  if (process_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
}

void TokenizerProcess::end() noexcept {
  for (int* file : {&to_, &from_, &errors_}) {
    if (*file >= 0) ::close(*file);
    *file = -1;
  }
  if (process_ <= 0) return;
  ::kill(process_, SIGKILL);
  while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) continue;
  process_ = -1;
}

void TokenizerProcess::refuse_ended() {
  if (!running()) throw UsageError("the tokenizer's process", "it has ended before", advice);
  int status = 0;
  // It has closed its end of a pipe, and mostly has ended; one that goes on without it is of no use.
  for (int waited = 0; ::waitpid(process_, &status, WNOHANG) == 0; ++waited) {
    if (waited == 100) ::kill(process_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  process_ = -1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    throw UsageError(fmt::format("the tokenizer needs Python, and {} cannot be started", python_),
                     "it is not installed or not found", advice);
  }
  const std::string why = last_line_of(errors_);
  throw UsageError(fmt::format("the tokenizer's process, of {}, has ended", python_),
                   why.empty() ? text_of_status(status) : why, advice);
}

void TokenizerProcess::await(int file, short events, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    pollfd waited{file, events, 0};
    const int ready = left.count() > 0 ? ::poll(&waited, 1, static_cast<int>(left.count())) : 0;
    if (ready > 0) return;
    if (ready < 0 && errno == EINTR) continue;
    end();
    throw DeviceError(
        fmt::format("the tokenizer's process, of {}, does not answer", python_),
        fmt::format("waited {} s for it", patience_.count()),
        fmt::format("try again, give it more seconds in {}, or give token ids with --prompt-ids", patience_name));
  }
}

void TokenizerProcess::send(std::string_view text, Clock::time_point until) {
  while (!text.empty()) {
    await(to_, POLLOUT, until);
    const ssize_t done = ::write(to_, text.data(), text.size());
    if (done < 0 && errno != EINTR && errno != EAGAIN) return;  // the answer that then does not come tells why
    if (done > 0) text.remove_prefix(static_cast<std::size_t>(done));
  }
}

std::string TokenizerProcess::next_line(Clock::time_point until) {
  std::array<char, 65536> piece{};
  std::size_t line = std::string::npos;
  while ((line = ahead_.find('\n')) == std::string::npos) {
    await(from_, POLLIN, until);
    const ssize_t got = ::read(from_, piece.data(), piece.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) refuse_ended();
    ahead_.append(piece.data(), static_cast<std::size_t>(got));
  }
  std::string answer = ahead_.substr(0, line);
  ahead_.erase(0, line + 1);
  return answer;
}

std::string TokenizerProcess::ask(const std::string& request) {
  if (!running()) refuse_ended();
  const auto until = Clock::now() + patience_;
  send(request + "\n", until);
  const std::string answer = next_line(until);
  const Json read = Json::parse(answer, nullptr, /*allow_exceptions=*/false);
  if (!read.is_object()) throw UsageError("the tokenizer's process", "answers what is no JSON: " + answer, advice);
  if (read.contains("error")) throw UsageError("the tokenizer", read["error"].get<std::string>());
  return answer;
}

std::vector<std::int32_t> TokenizerProcess::ids_of(const std::string& answer) const {
  std::vector<std::int32_t> ids;
  for (const std::int64_t id : field_of<std::vector<std::int64_t>>(answer, "ids")) {
    if (id < 0 || id >= vocabulary_) {
      throw UsageError(fmt::format("token {} of the tokenizer", id),
                       fmt::format("the model's vocabulary has {}", vocabulary_),
                       "the tokenizer beside the weights is another model's");
    }
    ids.push_back(static_cast<std::int32_t>(id));
  }
  return ids;
}

std::vector<std::int32_t> TokenizerProcess::tokens_of(const std::string& text) {
  return ids_of(ask(Json{{"encode", text}}.dump()));
}

std::unique_ptr<TextStream> TokenizerProcess::stream(std::span<const std::int32_t> before) {
  const std::vector<std::int32_t> ids(before.begin(), before.end());
  static_cast<void>(ask(Json{{"stream", streams_}, {"begin", ids}}.dump()));
  return std::make_unique<Stream>(*this, streams_++);
}

std::vector<std::int32_t> TokenizerProcess::tokens_of_chat(const std::vector<ChatMessage>& messages) {
  Json chat = Json::array();
  for (const ChatMessage& message : messages) chat.push_back({{"role", message.role}, {"content", message.content}});
  return ids_of(ask(Json{{"chat", chat}}.dump()));
}

}  // namespace tandem
