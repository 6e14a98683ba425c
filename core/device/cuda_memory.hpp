#pragma once
// Memory that CUDA takes of a card beside what a program asks for. In core, since a plan for a card elsewhere counts it
// too.
#include <algorithm>
#include <cstddef>

namespace tandem {

/// Bytes that context and libraries are taken to need where they cannot be measured: a little more than the 400 to 600
/// MiB of cards of compute capability 8 and 9.
constexpr std::size_t assumed_cuda_context = std::size_t{640} << 20;

/// One byte of page tables on the card maps so many bytes of pinned memory. The driver maps it in pages of 4 KiB,
/// however large those of the system are, with an entry of 8 bytes for each: 2 MiB on the card for a gibibyte pinned.
constexpr std::size_t pinned_per_cuda_page_table = 4096 / 8;

/// Bytes that NCCL is taken to need on each card, where ranks in several processes train together: buffers of its
/// channels to the others.
constexpr std::size_t assumed_nccl_bytes = std::size_t{384} << 20;

/// The ceiling in bytes of all that a process takes on a card, where the user names none: what is available, less a
/// margin for what other programs come to need.
constexpr std::size_t default_cuda_ceiling(std::size_t available) {
  constexpr std::size_t least_margin = std::size_t{256} << 20;
  return available - std::min(available, std::max(least_margin, available / 20));
}

/// The default ceiling in bytes below Windows (WSL2), whose desktop and programs share the card: memory that they come
/// to need is taken from whoever holds it, and what was taken is then reached at the speed of the link, without an
/// error.
constexpr std::size_t default_cuda_ceiling_under_windows(std::size_t available) {
  constexpr std::size_t least_margin = std::size_t{768} << 20;
  return available - std::min(available, std::max(least_margin, available / 10));
}

}  // namespace tandem
