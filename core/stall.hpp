#pragma once
// What becomes of a process in which something has stalled for good. StalledError tells whoever waited, but what has
// stalled still holds its thread, and destroying it waits for that thread.
#include "core/error.hpp"

namespace tandem {

/// Called once, by the first thread that gives up waiting and before StalledError reaches anybody. It must return.
using StallHandler = void (*)(const StalledError& error);

/// For a program that must come to an end: its handler, or null for none, which is how a process starts. Of the
/// process, like std::set_terminate. Thread-safe.
void set_stall_handler(StallHandler handler) noexcept;
/// For those that wait. Calls the handler the first time, and does nothing from then on.
void report_stall(const StalledError& error) noexcept;

}  // namespace tandem
