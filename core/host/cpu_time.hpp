#pragma once
// Processor time: of a thread, of this process, and of all that runs on the machine.
#include <filesystem>
#include <optional>

namespace tandem {

double thread_cpu_seconds();   ///< CPU time of the calling thread
double process_cpu_seconds();  ///< CPU time of all threads of this process

/// Says how many cores other programs keep busy from its construction on: what the machine's cores worked, less what
/// this process and its children that have ended did. What the kernel does by itself is others' work too.
class OthersAtWork {
 public:
  /// `stat` is the kernel's table of CPU time, another in tests.
  explicit OthersAtWork(std::filesystem::path stat = "/proc/stat");
  /// The mean of cores so far; nothing where the kernel does not tell. Its clock ticks every 10 ms.
  std::optional<double> cores() const;

 private:
  struct Moment {
    double wall, own;               ///< seconds
    std::optional<double> machine;  ///< seconds, of all cores
  };
  Moment now() const;

  std::filesystem::path stat_;
  Moment begin_;
};

}  // namespace tandem
