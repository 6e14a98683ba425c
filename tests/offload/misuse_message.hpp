#pragma once
// Words of a refusal.
#include <functional>
#include <string>

#include "core/base/error.hpp"

namespace tandem::testing {

/// Message of the MisuseError that a call throws; empty where it throws none.
inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const MisuseError& error) {
    return error.what();
  }
  return "";
}

}  // namespace tandem::testing
