#include "comm/launch_facts.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <limits>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr int last_port = 65535;
constexpr std::string_view token_advice =
    "run export TANDEM_TOKEN=$(openssl rand -hex 16) before the launcher, and the same value on all machines";

/// Variables in which a launcher tells a process its place.
struct Launcher {
  std::string_view size;
  std::string_view rank;
  std::string_view local_rank;
  std::string_view local_size;  ///< empty: not told
  std::string_view machines;    ///< empty: not told
};

constexpr std::array<Launcher, 4> launchers = {{
    {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ""},
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""},
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES"},
}};

/// The environment, with numbers.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  /// Nothing where it is not set or empty.
  std::optional<std::string> text(std::string_view name) const {
    if (name.empty()) return std::nullopt;
    std::optional<std::string> value = environment_(name);
    if (value && value->empty()) value.reset();
    return value;
  }
  std::optional<int> number(std::string_view name, int least, int most) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    int parsed = 0;
    const char* const end = value->data() + value->size();
    const auto [read, error] = std::from_chars(value->data(), end, parsed);
    if (error != std::errc() || read != end || parsed < least || parsed > most) {
      throw UsageError(fmt::format("{} is '{}'", name, *value), fmt::format("not a number from {} to {}", least, most),
                       "let the launcher set it");
    }
    return parsed;
  }

 private:
  const Environment& environment_;
};

const Launcher* launcher_of(const Variables& variables) {
  for (const Launcher& each : launchers) {
    // Alone, the others' ranks are set for processes that are not of several too.
    if (variables.text(each.size) || (&each == launchers.data() && variables.text(each.rank))) return &each;
  }
  return nullptr;
}

int required(const Variables& variables, std::string_view name, std::string_view beside, int least, int most) {
  if (const std::optional<int> value = variables.number(name, least, most)) return *value;
  throw UsageError(fmt::format("{} is set without {}", beside, name), "",
                   fmt::format("let the launcher set both, or unset {} to train in one process", beside));
}

bool on_one_machine(const Variables& variables, const Launcher& launcher, int count) {
  constexpr int any = std::numeric_limits<int>::max();
  return variables.number(launcher.local_size, 1, any) == count || variables.number(launcher.machines, 1, any) == 1;
}

std::string host_of(const Variables& variables, bool one_machine) {
  if (const std::optional<std::string> given = variables.text("MASTER_ADDR")) {
    if (*given != "0.0.0.0" && *given != "::") return *given;
    throw UsageError(fmt::format("MASTER_ADDR is '{}'", *given), "that is no address by which others find rank 0",
                     "set it to an address of rank 0's machine, 127.0.0.1 where all ranks are on one");
  }
  if (one_machine) return "127.0.0.1";
  const bool slurm = variables.text("SLURM_JOB_NODELIST").has_value();
  throw UsageError("MASTER_ADDR is not set", "ranks on several machines need the address of rank 0",
                   slurm
                       ? "run export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) before srun"
                       : "run export MASTER_ADDR=ADDRESS, that of rank 0's machine, before the launcher");
}

int port_of(const Variables& variables) {
  const int port = variables.number("MASTER_PORT", 1, last_port).value_or(default_launch_port);
  if (variables.text("TORCHELASTIC_USE_AGENT_STORE") != "True") return port;
  return port == last_port ? port - 1 : port + 1;
}

}  // namespace

std::optional<LaunchFacts> launch_facts(const Environment& environment) {
  const Variables variables(environment);
  const Launcher* const launcher = launcher_of(variables);
  if (launcher == nullptr) return std::nullopt;
  constexpr int most = 1 << 20;
  LaunchFacts facts;
  facts.rank.count = required(variables, launcher->size, launcher->rank, 1, most);
  facts.rank.index = required(variables, launcher->rank, launcher->size, 0, facts.rank.count - 1);
  if (facts.rank.count == 1) return std::nullopt;
  const bool one_machine = on_one_machine(variables, *launcher, facts.rank.count);
  const std::optional<int> local = variables.number(launcher->local_rank, 0, facts.rank.index);
  facts.local_rank = local || one_machine ? local.value_or(facts.rank.index)
                                          : required(variables, launcher->local_rank, launcher->rank, 0, most);
  facts.host = host_of(variables, one_machine);
  facts.port = port_of(variables);
  const std::optional<std::string> secret = variables.text("TANDEM_TOKEN");
  if (!secret)
    throw UsageError("TANDEM_TOKEN is not set", "ranks prove to each other that they are of one launch", token_advice);
  facts.secret = *secret;
  return facts;
}

}  // namespace tandem
