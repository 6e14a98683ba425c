#include "core/host/cpu_time.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <string>
#include <utility>

namespace tandem {
namespace {

double seconds_of(::clockid_t clock) {
  std::timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds_of(const ::timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double children_seconds() {
  ::rusage usage{};
  ::getrusage(RUSAGE_CHILDREN, &usage);
  return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

/// First line of proc(5)'s stat: ticks of all cores since boot. Guests' are in user's already. What a hypervisor took
/// (steal) this machine could not use either.
std::optional<double> busy_seconds(const std::filesystem::path& stat) {
  std::ifstream in(stat);
  std::string name;
  double user = 0.0, nice = 0.0, system = 0.0, idle = 0.0, iowait = 0.0, irq = 0.0, softirq = 0.0, steal = 0.0;
  if (!(in >> name >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal) || name != "cpu") {
    return std::nullopt;
  }
  return (user + nice + system + irq + softirq + steal) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

}  // namespace

double thread_cpu_seconds() { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }
double process_cpu_seconds() { return seconds_of(CLOCK_PROCESS_CPUTIME_ID); }

OthersAtWork::OthersAtWork(std::filesystem::path stat) : stat_(std::move(stat)), begin_(now()) {}

OthersAtWork::Moment OthersAtWork::now() const {
  return {seconds_of(CLOCK_MONOTONIC), process_cpu_seconds() + children_seconds(), busy_seconds(stat_)};
}

std::optional<double> OthersAtWork::cores() const {
  const Moment end = now();
  if (!begin_.machine || !end.machine) return std::nullopt;
  const double others = (*end.machine - *begin_.machine) - (end.own - begin_.own);
  return std::max(0.0, others / std::max(1e-9, end.wall - begin_.wall));
}

}  // namespace tandem
