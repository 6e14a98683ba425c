#include "core/host/mapped_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "core/host/numa_node.hpp"
#include "core/host/parallel.hpp"
#include "core/memory/memory.hpp"

namespace tandem {
namespace {

using namespace literals;
constexpr std::size_t huge_page = 2_MiB;

std::size_t page() {
  static const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void populate_part(std::byte* data, std::size_t bytes) {
  if (::madvise(data, align_up(bytes, page()), MADV_POPULATE_WRITE) == 0) return;
  if (errno == ENOMEM) throw std::bad_alloc();
  // A kernel before 5.14: written page by page.
  volatile std::byte* const first = data;
  for (std::size_t at = 0; at < bytes; at += page()) first[at] = std::byte{0};
}

}  // namespace

void* MappedMemory::map(std::size_t bytes) {
  if (bytes > SIZE_MAX - 2 * huge_page) throw std::bad_alloc();
  const std::size_t size = align_up(bytes, page());
  // A huge page needs an aligned start: map more, give the ends back.
  const std::size_t spare = size >= huge_page ? huge_page : 0;
  void* mapped = ::mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  if (spare == 0) return mapped;
  std::byte* begin = static_cast<std::byte*>(mapped);
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t head = align_up(address, huge_page) - address;
  if (head > 0) ::munmap(begin, head);
  if (spare > head) ::munmap(begin + head + size, spare - head);
  ::madvise(begin + head, size, MADV_HUGEPAGE);  // advice: a system without huge pages works too
  return begin + head;
}

void MappedMemory::populate(void* data, std::size_t bytes, Parallel& threads) {
  constexpr std::size_t part = 64_MiB;  // long enough to be worth a task, and whole huge pages
  auto* const begin = static_cast<std::byte*>(data);
  threads.run(static_cast<std::int64_t>((bytes + part - 1) / part), [&](std::int64_t i) {
    const std::size_t at = static_cast<std::size_t>(i) * part;
    populate_part(begin + at, std::min(part, bytes - at));
  });
}

void* MappedMemory::provide(std::size_t bytes, const NumaNode* node, Parallel& threads) {
  const auto give_back = [bytes](void* data) { unmap(data, bytes); };
  std::unique_ptr<void, decltype(give_back)> memory(map(bytes), give_back);
  // Placed before the pages exist, which then stay on that node.
  if (node != nullptr) node->place(memory.get(), bytes);
  populate(memory.get(), bytes, threads);
  return memory.release();
}

void MappedMemory::unmap(void* data, std::size_t bytes) noexcept { ::munmap(data, align_up(bytes, page())); }

}  // namespace tandem
