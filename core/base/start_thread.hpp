#pragma once
// Threads of ours: named, and refused like other resources where the system has none left.
#include <functional>
#include <string_view>
#include <thread>

namespace tandem {

/// Runs `body`, which must not throw, on a thread that debuggers and `top` show under the first 15 characters of
/// `name`. The caller joins it. Throws DeviceError.
std::thread start_thread(std::string_view name, std::function<void()> body);

/// Asks for short time slices for the calling thread, one that mostly sleeps: woken, it then runs at once even where
/// each core has a thread that computes. Linux 6.12 and later grant it; an older kernel, or one that refuses, changes
/// nothing. Threads that it starts have the usual slices.
void wake_promptly() noexcept;

}  // namespace tandem
