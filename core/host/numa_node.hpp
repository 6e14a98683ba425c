#pragma once
// A part of host memory, and the processors next to it.
#include <cstddef>
#include <memory>
#include <string>

namespace tandem {

/// One NUMA node of this machine. Placing and binding never throw: where the system refuses, memory and threads lie
/// where they would have lain.
class NumaNode {
 public:
  /// The node that a PCI device ("0000:65:00.0") hangs on. Null where the machine has one node only, or does not know
  /// the device: there is nothing to choose.
  static std::shared_ptr<const NumaNode> of_pci(const std::string& bus);
  /// Node `index` as the system counts them. Throws UsageError where there is none, or where this process may use no
  /// processor of it.
  static std::shared_ptr<const NumaNode> at(int index);
  ~NumaNode();
  NumaNode(const NumaNode&) = delete;
  NumaNode& operator=(const NumaNode&) = delete;

  int index() const noexcept;
  /// Processors of it that this process may run on.
  int processors() const noexcept;
  /// Pages of [data, data + bytes) that do not exist yet will come from this node while it has any.
  void place(void* data, std::size_t bytes) const noexcept;

  /// Keeps the calling thread on the node's processors while it lives; then it may go where it might before.
  class Bound {
   public:
    /// `node` may be null: nothing happens. It must outlive this.
    explicit Bound(const NumaNode* node) noexcept;
    ~Bound();
    Bound(const Bound&) = delete;
    Bound& operator=(const Bound&) = delete;

   private:
    struct Before;
    std::unique_ptr<Before> before_;
  };

 private:
  struct Impl;
  explicit NumaNode(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
