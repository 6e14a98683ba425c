#pragma once
// Threads of ours: named, and refused like other resources where the system has none left.
#include <functional>
#include <string_view>
#include <thread>

namespace tandem {

/// Runs `body`, which must not throw, on a thread that debuggers and `top` show under the first 15 characters of
/// `name`. The caller joins it. Throws DeviceError.
std::thread start_thread(std::string_view name, std::function<void()> body);

/// Of the calling thread, which mostly sleeps: woken, it is to run at once, also where each core has a thread that
/// computes. Linux 6.12 and later give way to it for that, as it asks for short slices of time; where it is an older one,
/// or refuses, nothing changes. Threads that it starts are as others.
void wake_promptly() noexcept;

}  // namespace tandem
