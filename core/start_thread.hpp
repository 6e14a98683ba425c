#pragma once
// Threads of ours: named, and refused like other resources where the system has none left.
#include <functional>
#include <string_view>
#include <thread>

namespace tandem {

/// Runs `body`, which must not throw, on a thread that debuggers and `top` show under the first 15 characters of
/// `name`. The caller joins it. Throws DeviceError.
std::thread start_thread(std::string_view name, std::function<void()> body);

}  // namespace tandem
