// One contestant of `scripts/bench adam`: AdamW over COUNT parameters in host memory, bf16 gradient in, bf16
// weight out, a step for each line "step" on standard input. Answers with seconds; "change" answers with the sum
// of |master - initial|, so that the driver can see that every contestant did the same work.
//
//   bench_adam_race COUNT THREADS
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iomanip>
#include <iostream>
#include <string>

#include <tandem/tandem.hpp>

namespace {

using tandem::bf16;

constexpr double lr = 1e-3;
constexpr tandem::AdamW hyperparameters{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

/// Evenly spread over [-1/2, 1/2), the same in bench/torch_adam.py.
float spread(std::int64_t i, std::uint64_t factor, std::uint64_t shift) {
  const std::uint64_t hash = (static_cast<std::uint64_t>(i) * factor + shift) & 0xffffffffu;
  return static_cast<float>(static_cast<double>(hash) / 4294967296.0 - 0.5);
}
float initial_master(std::int64_t i) { return spread(i, 2654435761u, 0); }
float initial_gradient(std::int64_t i) { return spread(i, 2246822519u, 12345); }

class Race {
 public:
  Race(tandem::Device& device, std::int64_t count)
      : kernels_(device.host_kernels()),
        count_(count),
        master_(block(device, sizeof(float), "master")),
        m_(block(device, sizeof(float), "m")),
        v_(block(device, sizeof(float), "v")),
        gradient_(block(device, sizeof(bf16), "gradient")),
        weight_(block(device, sizeof(bf16), "weight")) {
    piece_ = {.master = static_cast<float*>(master_.data()),
              .m = static_cast<float*>(m_.data()),
              .v = static_cast<float*>(v_.data()),
              .gradient = static_cast<bf16*>(gradient_.data()),
              .weight = static_cast<bf16*>(weight_.data()),
              .count = count};
    auto* gradient = static_cast<bf16*>(gradient_.data());
    for (std::int64_t i = 0; i < count; ++i) {
      piece_.master[i] = initial_master(i);
      piece_.m[i] = piece_.v[i] = 0.0F;
      piece_.weight[i] = bf16{};
      gradient[i] = tandem::numerics::round_to_bf16(initial_gradient(i));
    }
  }

  double step() {
    const auto begin = std::chrono::steady_clock::now();
    kernels_.adamw(piece_, tandem::numerics::adam_coefficients(hyperparameters, ++steps_, lr, 1.0, true));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  double change() const {
    double sum = 0.0;
    for (std::int64_t i = 0; i < count_; ++i) {
      sum += std::abs(static_cast<double>(piece_.master[i]) - static_cast<double>(initial_master(i)));
    }
    return sum;
  }

 private:
  tandem::MemoryBlock block(tandem::Device& device, std::size_t element, const char* name) const {
    return device.allocate_pinned(static_cast<std::size_t>(count_) * element, name);
  }

  tandem::UpdateKernels& kernels_;
  std::int64_t count_;
  tandem::MemoryBlock master_, m_, v_, gradient_, weight_;
  tandem::AdamPiece piece_;
  std::int64_t steps_ = 0;
};

int serve(std::int64_t count, int threads) {
  const auto device =
      tandem::open_device("host", {.memory = std::size_t{1} << 20, .threads = threads, .update_threads = threads});
  Race race(*device, count);
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "step") {
      std::cout << std::setprecision(9) << race.step() << std::endl;
    } else if (line == "change") {
      std::cout << std::setprecision(17) << race.change() << std::endl;
    } else {
      std::cerr << "bench_adam_race: unknown request " << line << '\n';
      return 2;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) {
      std::cerr << "usage: bench_adam_race COUNT THREADS\n";
      return 2;
    }
    return serve(std::stoll(argv[1]), std::stoi(argv[2]));
  } catch (const std::exception& error) {
    std::cerr << "bench_adam_race: " << error.what() << '\n';
    return 1;
  }
}
