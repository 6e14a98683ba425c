#pragma once
// What CUDA takes of a card beside what a program asks for. Here, as a plan for a card elsewhere counts it too.
#include <algorithm>
#include <cstddef>

namespace tandem {

/// Bytes of context and libraries where they cannot be measured: 400 to 600 MiB on cards of compute capability 8 and 9.
constexpr std::size_t assumed_cuda_context = std::size_t{640} << 20;

/// Bytes of pinned memory for each of page tables on the card. The driver maps pinned memory in pages of 4 KiB, however
/// large those of the system are, with an entry of 8 bytes for each: 2 MiB for a gibibyte.
constexpr std::size_t pinned_per_cuda_page_table = 4096 / 8;

/// Ceiling in bytes of all that a process takes on a card, where none is asked for: of what is free, less a margin for
/// what other programs come to need.
constexpr std::size_t default_cuda_ceiling(std::size_t available) {
  constexpr std::size_t least_margin = std::size_t{256} << 20;
  return available - std::min(available, std::max(least_margin, available / 20));
}

}  // namespace tandem
