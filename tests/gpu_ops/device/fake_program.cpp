// The program on a machine that does not exist. TANDEM_FAKE_CUDA says what is to go wrong: "launch 500" loses the
// device at the 500th kernel, "pin 0" pins no byte, "none" nothing; "driver 12020" is an older driver. Before that:
// "cards 2" are two GPUs, "older 1" beside them is one of another kind, "apart 1" GPUs that do not reach each other.
#include <cstdlib>
#include <sstream>
#include <string>

#include "cli/program/program.hpp"
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace fake = tandem::fake_cuda;

int main(int argc, char** argv) {
  const char* plan = std::getenv("TANDEM_FAKE_CUDA");
  std::istringstream words(plan == nullptr ? "none" : plan);
  std::string word;
  int number = 0;
  int lost_at = -1;
  fake::Machine machine{.longest_delay_us = 20};
  while (words >> word >> number) {
    if (word == "cards") machine.cards.resize(static_cast<std::size_t>(number));
    if (word == "older") machine.cards.push_back({.name = "Older GPU", .major = 8});
    if (word == "apart") machine.peers = false;
    if (word == "driver") machine.driver_version = number;
    if (word == "pin") machine.pinnable = static_cast<std::size_t>(number);
    if (word == "launch") lost_at = number;
  }
  fake::install(machine);
  if (lost_at >= 0) fake::fail_call("launch", lost_at, cudaErrorLaunchFailure);
  const int code = tandem::run_program(argc, argv);
  return fake::tell_complaints() ? fake::undefined_use : code;
}
