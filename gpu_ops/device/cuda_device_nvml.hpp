#pragma once
// Memory in use as the driver's management library (NVML) reports it, where it is installed. Internal to gpu_ops.
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

namespace tandem {

/// A device as NVML sees it: all processes, not this one alone. Thread-safe. Nothing throws.
class Nvml {
 public:
  /// Null where the library, or the device on this PCI bus ("0000:65:00.0"), is not found.
  static std::unique_ptr<Nvml> open(const std::string& pci_bus);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  /// Bytes in use by anybody; empty where it does not say.
  std::optional<std::size_t> used_bytes() const noexcept;
  /// Bytes that this process holds; empty where it holds none or NVML does not say, as in a container or below Windows.
  std::optional<std::size_t> own_bytes() const;
  /// "process 4242 (python3) holds 10.00 GiB, ..." of others than this process; empty where it does not say,
  /// as in a container.
  std::string other_holders() const;

 private:
  struct Functions;
  Nvml();
  std::unique_ptr<Functions> functions_;
};

}  // namespace tandem
