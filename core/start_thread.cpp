#include "core/start_thread.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <string>
#include <system_error>
#include <utility>

#include "core/error.hpp"

namespace tandem {

std::thread start_thread(std::string_view name, std::function<void()> body) {
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& e) {
    throw DeviceError(fmt::format("cannot start thread '{}'", name), e.code().message(),
                      "raise the limit of threads (ulimit -u)");
  }
  pthread_setname_np(thread.native_handle(), std::string(name.substr(0, 15)).c_str());
  return thread;
}

}  // namespace tandem
