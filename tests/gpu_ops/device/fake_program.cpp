// The program on a machine that does not exist. TANDEM_FAKE_CUDA says what is to go wrong: "launch 500" loses the
// device at the 500th kernel, "pin 0" pins no byte, "none" nothing; "driver 12020" is an older driver.
#include <cstdlib>
#include <sstream>
#include <string>

#include "cli/program.hpp"
#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace fake = tandem::fake_cuda;

int main(int argc, char** argv) {
  const char* plan = std::getenv("TANDEM_FAKE_CUDA");
  std::istringstream words(plan == nullptr ? "none" : plan);
  std::string word;
  int number = 0;
  words >> word >> number;
  fake::Machine machine{.longest_delay_us = 20};
  if (word == "driver") machine.driver_version = number;
  if (word == "pin") machine.pinnable = static_cast<std::size_t>(number);
  fake::install(machine);
  if (word == "launch") fake::fail_call("launch", number, cudaErrorLaunchFailure);
  const int code = tandem::run_program(argc, argv);
  return fake::tell_complaints() ? fake::undefined_use : code;
}
