// One contestant of `scripts/bench adam`: AdamW over COUNT parameters in host memory, bf16 gradient in, bf16
// weight out, a step for each line "step" on standard input. Answers with seconds; "change" answers with the sum
// of |master - initial|, so that the driver can see that every contestant did the same work. WORK `copy` instead
// copies COUNT fp32 values in the fastest of three ways: what this machine's memory can do.
//
//   bench_adam_race COUNT THREADS fp32|split|bf16-moments|8bit-moments|copy
#include <emmintrin.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <tandem/tandem.hpp>

#include "cpu_ops/threads/parallel.hpp"

namespace {

using tandem::bf16;
using tandem::StateFormat;

constexpr double lr = 1e-3;
constexpr tandem::AdamW hyperparameters{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

/// Evenly spread over [-1/2, 1/2), the same in bench/peers/torch_adam.py.
float spread(std::int64_t i, std::uint64_t factor, std::uint64_t shift) {
  const std::uint64_t hash = (static_cast<std::uint64_t>(i) * factor + shift) & 0xffffffffu;
  return static_cast<float>(static_cast<double>(hash) / 4294967296.0 - 0.5);
}
float initial_master(std::int64_t i) { return spread(i, 2654435761u, 0); }
float initial_gradient(std::int64_t i) { return spread(i, 2246822519u, 12345); }

template <class Body>
double seconds_of(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual double step() = 0;
  virtual double change() const = 0;
};

class Update final : public Contestant {
 public:
  Update(tandem::Device& device, std::int64_t count, StateFormat format)
      : kernels_(device.host_kernels()),
        master_(block(device, tandem::master_bytes(format, count))),
        m_(block(device, tandem::m_bytes(format, count))),
        v_(block(device, tandem::v_bytes(format, count))),
        gradient_(block(device, static_cast<std::size_t>(count) * sizeof(bf16))),
        weight_(block(device, static_cast<std::size_t>(count) * sizeof(bf16))) {
    piece_ = {.state = {master_.data(), m_.data(), v_.data()},
              .gradient = static_cast<bf16*>(gradient_.data()),
              .weight = static_cast<bf16*>(weight_.data()),
              .count = count,
              .format = format};
    std::memset(m_.data(), 0, m_.bytes());
    std::memset(v_.data(), 0, v_.bytes());
    auto* gradient = static_cast<bf16*>(gradient_.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const float master = initial_master(i);
      gradient[i] = tandem::numerics::round_to_bf16(initial_gradient(i));
      piece_.weight[i] = tandem::numerics::weight_of_master(master);
      if (format == StateFormat::fp32) {
        static_cast<float*>(piece_.state.master)[i] = master;
      } else {
        static_cast<std::uint16_t*>(piece_.state.master)[i] = tandem::numerics::master_residual(master);
      }
    }
  }

  double step() override {
    return seconds_of([&] {
      kernels_.adamw(piece_, tandem::numerics::adam_coefficients(hyperparameters, ++steps_, lr, 1.0, true, 1));
    });
  }

  double change() const override {
    double sum = 0.0;
    for (std::int64_t i = 0; i < piece_.count; ++i) {
      sum += std::abs(static_cast<double>(master(i)) - static_cast<double>(initial_master(i)));
    }
    return sum;
  }

 private:
  static tandem::MemoryBlock block(tandem::Device& device, std::size_t bytes) {
    return device.allocate_pinned(bytes, "an array of the race");
  }
  float master(std::int64_t i) const {
    if (piece_.format == StateFormat::fp32) return static_cast<const float*>(piece_.state.master)[i];
    return tandem::numerics::join_master(piece_.weight[i], static_cast<const std::uint16_t*>(piece_.state.master)[i]);
  }

  tandem::UpdateKernels& kernels_;
  tandem::MemoryBlock master_, m_, v_, gradient_, weight_;
  tandem::AdamPiece piece_;
  std::int64_t steps_ = 0;
};

void copy_ordinary(float* to, const float* from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = from[i];
}
void copy_past_cache(float* to, const float* from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
  _mm_sfence();
}
void copy_library(float* to, const float* from, std::int64_t n) {
  std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

class Copy final : public Contestant {
 public:
  Copy(tandem::Device& device, std::int64_t count, int threads)
      : parallel_(tandem::make_parallel(threads)),
        count_(count / part * part),
        from_(device.allocate_pinned(static_cast<std::size_t>(count_) * sizeof(float), "source")),
        to_(device.allocate_pinned(static_cast<std::size_t>(count_) * sizeof(float), "target")) {
    std::memset(from_.data(), 1, from_.bytes());
    std::memset(to_.data(), 0, to_.bytes());
    double best = INFINITY;
    for (int turn = 0; turn < 3; ++turn) {
      for (const Way way : {&copy_ordinary, &copy_past_cache, &copy_library}) {
        const double seconds = run(way);
        if (seconds < best) {
          best = seconds;
          fastest_ = way;
        }
      }
    }
  }
  double step() override { return run(fastest_); }
  double change() const override { return 0.0; }

 private:
  using Way = void (*)(float*, const float*, std::int64_t);
  static constexpr std::int64_t part = 64 * 1024;

  double run(Way way) {
    return seconds_of([&] {
      parallel_->run(count_ / part, [&](std::int64_t i) {
        way(static_cast<float*>(to_.data()) + i * part, static_cast<const float*>(from_.data()) + i * part, part);
      });
    });
  }

  std::shared_ptr<tandem::Parallel> parallel_;
  std::int64_t count_;
  tandem::MemoryBlock from_, to_;
  Way fastest_ = &copy_library;
};

std::unique_ptr<Contestant> make(tandem::Device& device, std::int64_t count, int threads, const std::string& work) {
  if (work == "copy") return std::make_unique<Copy>(device, count, threads);
  for (const StateFormat format : tandem::adamw_formats) {
    if (work == tandem::name_of(format)) return std::make_unique<Update>(device, count, format);
  }
  throw tandem::UsageError(work, "no such work");
}

int serve(std::int64_t count, int threads, const std::string& work) {
  const auto device =
      tandem::open_device("host", {.memory = std::size_t{1} << 20, .threads = threads, .update_threads = threads});
  const auto contestant = make(*device, count, threads, work);
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "step") {
      std::cout << std::setprecision(9) << contestant->step() << std::endl;
    } else if (line == "change") {
      std::cout << std::setprecision(17) << contestant->change() << std::endl;
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
    if (argc != 4) {
      std::cerr << "usage: bench_adam_race COUNT THREADS fp32|split|bf16-moments|8bit-moments|copy\n";
      return 2;
    }
    return serve(std::stoll(argv[1]), std::stoi(argv[2]), argv[3]);
  } catch (const std::exception& error) {
    std::cerr << "bench_adam_race: " << error.what() << '\n';
    return 1;
  }
}
