#pragma once
// The part of host memory that is nearest to a device. Internal to gpu_ops.
#include <cstddef>
#include <memory>
#include <string>

namespace tandem {

/// The NUMA node that a PCI device hangs on. Nothing throws: where the system does not know, memory lies
/// where it would have lain.
class NumaNode {
 public:
  /// Null where the machine has one node only, or does not know the device ("0000:65:00.0").
  static std::shared_ptr<const NumaNode> of_pci(const std::string& bus);
  ~NumaNode();
  NumaNode(const NumaNode&) = delete;
  NumaNode& operator=(const NumaNode&) = delete;

  /// Pages of [data, data + bytes) that do not exist yet will come from this node while it has any.
  void place(void* data, std::size_t bytes) const noexcept;

 private:
  struct Impl;
  explicit NumaNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
