#include "comm/nccl/nccl_network.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <mutex>

namespace tandem::nccl {
namespace {

/// An address in numbers; empty for one that is none of IP's.
std::string text_of(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* bytes = nullptr;
  if (address->sa_family == AF_INET) bytes = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  if (address->sa_family == AF_INET6) bytes = &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  if (bytes == nullptr || ::inet_ntop(address->sa_family, bytes, text.data(), text.size()) == nullptr) return "";
  return text.data();
}

}  // namespace

std::string interface_of(const std::string& address) {
  const std::string numbers = address.substr(0, address.find('%'));  // without the zone of an address of IPv6
  ifaddrs* all = nullptr;
  if (numbers.empty() || ::getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> kept(all, ::freeifaddrs);
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr != nullptr && text_of(each->ifa_addr) == numbers) return each->ifa_name;
  }
  // A machine listens at all of 127.0.0.0/8.
  return numbers.starts_with("127.") ? "lo" : "";
}

void use_interface_of(const std::string& address) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (std::getenv("NCCL_SOCKET_IFNAME") != nullptr) return;
  const std::string name = interface_of(address);
  if (!name.empty()) ::setenv("NCCL_SOCKET_IFNAME", ("=" + name).c_str(), 0);
}

}  // namespace tandem::nccl
