#pragma once
// Every error that reaches a user carries what happened, why, and what to try, and the exit code of
// the program. Mistakes in programs that use tandem are `MisuseError`.
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tandem {

enum class ExitCode : int {
  ok = 0,
  internal = 1,
  usage = 2,
  does_not_fit = 3,
  bad_input = 4,
  device = 5,
  cannot_continue = 6,
  cannot_write = 7,
};

/// Base of all errors thrown by tandem. `what()` reads "WHAT: WHY; TRY" (parts that are empty are
/// left out), always one line.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, std::string_view what, std::string_view why = {}, std::string_view advice = {});
  ExitCode exit_code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// Bad flag, configuration or model description (exit 2).
struct UsageError : Error {
  UsageError(std::string_view what, std::string_view why = {}, std::string_view advice = {})
      : Error(ExitCode::usage, what, why, advice) {}
};

struct MemoryPlan;

/// The memory plan does not fit (exit 3). `table()` is the plan, for people; `needs()` its rows, null where there are
/// none.
class PlanError : public Error {
 public:
  PlanError(std::string_view what, std::string_view why, std::string_view advice, std::string table = {},
            std::shared_ptr<const MemoryPlan> needs = {})
      : Error(ExitCode::does_not_fit, what, why, advice), table_(std::move(table)), needs_(std::move(needs)) {}
  const std::string& table() const noexcept { return table_; }
  const MemoryPlan* needs() const noexcept { return needs_.get(); }

 private:
  std::string table_;
  std::shared_ptr<const MemoryPlan> needs_;
};

/// Unreadable, corrupt or mismatched tensors, data or checkpoint (exit 4).
struct InputError : Error {
  InputError(std::string_view what, std::string_view why = {}, std::string_view advice = {})
      : Error(ExitCode::bad_input, what, why, advice) {}
};

/// Device or communication failure (exit 5).
struct DeviceError : Error {
  DeviceError(std::string_view what, std::string_view why = {}, std::string_view advice = {})
      : Error(ExitCode::device, what, why, advice) {}
};

/// Failure of another rank of a group, and with it of the group (exit 5). Names the rank; that rank itself throws the
/// cause.
struct PeerError : DeviceError {
  using DeviceError::DeviceError;
};

/// Training cannot go on (exit 6).
struct TrainingError : Error {
  TrainingError(std::string_view what, std::string_view why = {}, std::string_view advice = {})
      : Error(ExitCode::cannot_continue, what, why, advice) {}
};

/// A file or directory cannot be written (exit 7).
struct WriteError : Error {
  WriteError(std::string_view what, std::string_view why = {}, std::string_view advice = {})
      : Error(ExitCode::cannot_write, what, why, advice) {}
};

/// A program used tandem against its contract: a programming mistake (exit 1).
struct MisuseError : Error {
  explicit MisuseError(std::string_view what, std::string_view why = {}, std::string_view advice = {})
      : Error(ExitCode::internal, what, why, advice) {}
};

/// A wait made no progress for longer than the watchdog allows; names who waits for what (exit 5).
struct StalledError : Error {
  explicit StalledError(std::string_view what, std::string_view why = {}) : Error(ExitCode::device, what, why) {}
};

}  // namespace tandem
