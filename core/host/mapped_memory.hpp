#pragma once
// Anonymous memory straight from the system, for blocks that deserve large pages.
#include <cstddef>

namespace tandem {

class NumaNode;
class Parallel;

/// Anonymous memory of the system: whole pages, huge ones where the system has them. Throws
/// std::bad_alloc. The system rounds up to pages; what is counted is what was asked for.
class MappedMemory {
 public:
  static void* map(std::size_t bytes);
  static void unmap(void* data, std::size_t bytes) noexcept;
  /// Has the system provide the pages of fresh memory now, not when they are first written: that takes longer than
  /// writing them, and may find that there is no memory. By all threads, since one clears a few GB a second, and much
  /// less where a hypervisor has to find the pages too. Blocks. Throws std::bad_alloc where there are none.
  static void populate(void* data, std::size_t bytes, Parallel& threads);
  /// Mapped memory on `node` (null: anywhere), populated. Blocks.
  static void* provide(std::size_t bytes, const NumaNode* node, Parallel& threads);
};

}  // namespace tandem
