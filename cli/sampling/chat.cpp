#include "cli/sampling/chat.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <optional>
#include <string_view>

#include "cli/common/commands.hpp"
#include "core/base/error.hpp"
#include "core/base/utf8.hpp"

namespace tandem {
namespace {

volatile std::sig_atomic_t interrupts = 0;  // a handler can reach nothing else

void count_interrupt(int) { interrupts = interrupts + 1; }

/// Counts SIGINT while it lives, which then interrupts reading.
class Interrupts {
 public:
  Interrupts() {
    struct sigaction counted {};
    counted.sa_handler = count_interrupt;
    ::sigaction(SIGINT, &counted, &before_);
  }
  ~Interrupts() { ::sigaction(SIGINT, &before_, nullptr); }
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  /// Whether one has come since the last call.
  static bool take() {
    const bool any = interrupts != 0;
    interrupts = 0;
    return any;
  }

 private:
  struct sigaction before_ {};
};

constexpr const char* commands = "(/reset begins anew, /exit or Ctrl-D ends the conversation, Ctrl-C an answer)\n";

/// Lines of standard input.
class Lines {
 public:
  explicit Lines(bool terminal) : terminal_(terminal) {}
  /// Whether an interrupt has ended the input.
  bool interrupted() const noexcept { return interrupted_; }

  /// The next line, without its end; nothing where the input has ended. An interrupt empties a line that was begun at a
  /// terminal, and ends other input.
  std::optional<std::string> next() {
    for (;;) {
      if (const std::size_t end = held_.find('\n'); end != std::string::npos) {
        std::string line = held_.substr(0, end);
        held_.erase(0, end + 1);
        return line;
      }
      std::array<char, 4096> piece{};
      const ssize_t got = ::read(STDIN_FILENO, piece.data(), piece.size());
      if (got < 0 && errno == EINTR) {
        held_.clear();
        const bool interrupted = Interrupts::take();
        if (interrupted && !terminal_) {
          interrupted_ = true;
          return std::nullopt;
        }
        if (interrupted) print_output(fmt::format("\n{}> ", commands));
        continue;
      }
      if (got <= 0) return held_.empty() ? std::nullopt : std::optional(std::exchange(held_, {}));
      held_.append(piece.data(), static_cast<std::size_t>(got));
    }
  }

 private:
  const bool terminal_;
  bool interrupted_ = false;
  std::string held_;
};

class Conversation {
 public:
  Conversation(Generator& generator, TokenizerProcess& tokenizer, const ChatSettings& settings)
      : generator_(generator), tokenizer_(tokenizer), settings_(settings) {
    reset();
  }
  void reset() {
    messages_.clear();
    if (!settings_.system.empty()) messages_.push_back({"system", settings_.system});
  }
  /// Answers a line. One that the template or the cache does not take is told of, and forgotten; returns whether it was
  /// taken.
  bool answer(const std::string& line) {
    messages_.push_back({"user", line});
    std::vector<std::int32_t> tokens;
    try {
      tokens = tokenizer_.tokens_of_chat(messages_);
    } catch (const UsageError& error) {
      if (!tokenizer_.running()) throw;
      spdlog::error("{}", error.what());
    }
    if (std::ssize(tokens) > settings_.positions) {
      spdlog::warn(
          "the line is left out: with it the conversation has {} tokens, and there are {} positions; /reset begins "
          "anew{}",
          tokens.size(), settings_.positions, more_room());
    }
    if (tokens.empty() || std::ssize(tokens) > settings_.positions) {
      messages_.pop_back();
      return false;
    }
    messages_.push_back({"assistant", answer_to(tokens)});
    return true;
  }

 private:
  std::string answer_to(const std::vector<std::int32_t>& tokens) {
    const auto stream = tokenizer_.stream(tokens);
    StopFilter filter(settings_.stops);
    std::string answer;
    const auto show = [&](const std::string& text) {
      print_output(printable(text));
      answer += text;
    };
    static_cast<void>(Interrupts::take());
    const Continuation made =
        generator_.go_on(tokens, settings_.options, rounds_++, [&](std::size_t, std::int32_t token) {
          show(filter.pass(stream->next(token)));
          return !filter.stopped() && interrupts == 0;
        });
    show(filter.pass(stream->end()));
    show(filter.rest());
    print_output("\n");
    if (made.finish == Finish::positions) {
      spdlog::warn("all {} positions are full; /reset begins anew{}", settings_.positions, more_room());
    }
    return answer;
  }
  std::string_view more_room() const { return settings_.may_grow ? ", --context N makes room" : ""; }

  Generator& generator_;
  TokenizerProcess& tokenizer_;
  const ChatSettings& settings_;
  std::vector<ChatMessage> messages_;
  std::uint64_t rounds_ = 0;
};

}  // namespace

ChatEnd chat(Generator& generator, TokenizerProcess& tokenizer, const ChatSettings& settings) {
  const Interrupts counted;
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  Conversation conversation(generator, tokenizer, settings);
  Lines lines(terminal);
  bool refused = false;
  if (terminal) print_output(commands);
  for (;;) {
    if (terminal) print_output("> ");
    const std::optional<std::string> line = lines.next();
    if (!line || *line == "/exit") break;
    if (line->empty()) continue;
    if (*line == "/reset") {
      conversation.reset();
    } else if (line->starts_with('/') && line->find(' ') == std::string::npos) {
      spdlog::error("{} is no command: there are /reset and /exit", *line);
      refused = true;
    } else if (!is_utf8(*line)) {
      spdlog::error("the line holds bytes that are no UTF-8: it is left out");
      refused = true;
    } else {
      refused = !conversation.answer(*line) || refused;
      static_cast<void>(Interrupts::take());  // it has ended the answer
    }
  }
  if (terminal) print_output("\n");
  if (lines.interrupted()) return ChatEnd::interrupted;
  return refused && !terminal ? ChatEnd::refused_lines : ChatEnd::done;
}

}  // namespace tandem
