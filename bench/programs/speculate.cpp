// Updates of AdamW that may be taken back, for `scripts/bench speculate`.
//
//   bench_speculate time COUNT THREADS PAIRS fp32|split|bf16-moments|8bit-moments
//
// prints, for each pair, the seconds of a plain update, of one that may be taken back, and of taking it back and
// updating otherwise: COUNT parameters in host memory, new random gradients for each.
//
//   bench_speculate bytes FIRST
//
// reads a training as bench/peers/torch_gradients.py writes it, and prints for each format the bytes of records per
// parameter and the share of parameters that have one: means over steps from FIRST on, counted from 1.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iomanip>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <tandem/tandem.hpp>
#include <vector>

#include "core/ops/undo_record.hpp"
#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"

namespace {

using tandem::bf16;
using tandem::layout_quantum;
using tandem::StateFormat;

constexpr tandem::AdamW hyperparameters{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
/// Gradients are updated with before the norm is known.
constexpr double unclipped = 1.0;

tandem::AdamCoefficients coefficients(std::int64_t step, double rate, double factor) {
  return tandem::numerics::adam_coefficients(hyperparameters, step, rate, factor, true, 1);
}

/// State of whole blocks with the record of an update, aligned as the engine's.
class State {
 public:
  State(tandem::Device& device, StateFormat format, std::int64_t count)
      : device_(device),
        kernels_(device.host_kernels()),
        record_(block(tandem::undo_bytes(format, count))),
        norms_(static_cast<std::size_t>(count / layout_quantum)) {
    for (const std::size_t bytes :
         {tandem::master_bytes(format, count), tandem::m_bytes(format, count), tandem::v_bytes(format, count),
          tandem::weight_bytes(format, count), tandem::gradient_bytes(format, count)}) {
      arrays_.push_back(block(bytes));
    }
    gradient_ = static_cast<bf16*>(arrays_[4].data());
    piece_ = {.state = {arrays_[0].data(), arrays_[1].data(), arrays_[2].data()},
              .gradient = gradient_,
              .weight = static_cast<bf16*>(arrays_[3].data()),
              .count = count,
              .format = format};
  }

  void set_master(std::int64_t i, float master) {
    piece_.weight[i] = tandem::numerics::weight_of_master(master);
    if (piece_.format == StateFormat::fp32) {
      static_cast<float*>(piece_.state.master)[i] = master;
    } else {
      static_cast<std::uint16_t*>(piece_.state.master)[i] = tandem::numerics::master_residual(master);
    }
  }
  /// No moments yet.
  void set_moments() {
    std::memset(piece_.state.m, 0, arrays_[1].bytes());
    std::memset(piece_.state.v, 0, arrays_[2].bytes());
    if (piece_.format != StateFormat::byte_moments) return;
    for (std::int64_t i = 0; i < piece_.count; i += tandem::coded_block) {
      *tandem::coded_block_at(piece_.state.m, i).exponent = tandem::numerics::least_m_exponent;
      *tandem::coded_block_at(piece_.state.v, i).exponent = tandem::numerics::least_v_exponent;
    }
  }
  bf16* gradient() noexcept { return gradient_; }
  void gradient_is_set() { kernels_.norm_blocks(gradient_, piece_.count, norms_.data()); }

  void update(const tandem::AdamCoefficients& c) { kernels_.adamw(piece_, c); }
  std::int64_t speculate(const tandem::AdamCoefficients& c) { return kernels_.speculate(piece_, c, undo()); }
  void redo(const tandem::AdamCoefficients& speculated, const tandem::AdamCoefficients& actual) {
    kernels_.settle(piece_, speculated, actual, tandem::Settling::redo, undo());
  }
  /// Codes, exponents and counts of all blocks, and what is used of the pools.
  std::size_t record_bytes() {
    std::size_t bytes = 0;
    for (std::int64_t run = 0; run * tandem::undo_run < piece_.count; ++run) {
      const tandem::UndoRun record(undo().memory, piece_.format, piece_.count, run);
      const std::size_t blocks = static_cast<std::size_t>(record.blocks());
      bytes += blocks * (tandem::undo_block_bytes(piece_.format) - tandem::undo_pool_bytes(piece_.format)) +
               record.pool_offset(record.blocks());
    }
    return bytes;
  }
  std::int64_t count() const noexcept { return piece_.count; }

 private:
  tandem::MemoryBlock block(std::size_t bytes) { return device_.allocate_pinned(bytes, "an array of the benchmark"); }
  tandem::UndoPiece undo() { return {static_cast<std::byte*>(record_.data()), piece_.count, 0, norms_.data()}; }

  tandem::Device& device_;
  tandem::UpdateKernels& kernels_;
  tandem::MemoryBlock record_;
  std::vector<double> norms_;
  std::vector<tandem::MemoryBlock> arrays_;
  bf16* gradient_ = nullptr;
  tandem::AdamPiece piece_;
};

/// Nearly normal, of deviation 1, for an element in a step.
float random_value(std::int64_t i, std::uint64_t step) {
  std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u + step * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 31) * 0x94d049bb133111ebu;
  x ^= x >> 29;
  float sum = 0.0F;
  for (int j = 0; j < 3; ++j, x >>= 20) sum += static_cast<float>(x & 0xfffffu) * 0x1p-19F - 1.0F;
  return sum;
}

template <class Body>
double seconds_of(const Body& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void time_updates(tandem::Device& device, std::int64_t count, int threads, int pairs, StateFormat format) {
  const auto parallel = tandem::make_parallel(threads);
  State state(device, format, count / layout_quantum * layout_quantum);
  const auto for_all = [&](const auto& body) {
    parallel->run(state.count() / layout_quantum, [&](std::int64_t block) {
      for (std::int64_t i = block * layout_quantum; i < (block + 1) * layout_quantum; ++i) body(i);
    });
  };
  std::uint64_t drawn = 0;
  const auto draw_gradient = [&] {
    ++drawn;
    for_all(
        [&](std::int64_t i) { state.gradient()[i] = tandem::numerics::round_to_bf16(1e-3F * random_value(i, drawn)); });
    state.gradient_is_set();
  };
  for_all([&](std::int64_t i) { state.set_master(i, 0.02F * random_value(i, 0)); });
  state.set_moments();
  std::int64_t step = 0;
  const auto next = [&](double factor) { return coefficients(step, 1e-3, factor); };
  constexpr int warm_up = 4;
  for (int pair = -warm_up; pair < pairs; ++pair) {
    draw_gradient();
    ++step;
    const double plain = seconds_of([&] { state.update(next(unclipped)); });
    draw_gradient();
    ++step;
    const double speculative = seconds_of([&] { state.speculate(next(unclipped)); });
    const double redone = seconds_of([&] { state.redo(next(unclipped), next(0.9)); });
    if (pair >= 0) std::cout << plain << ' ' << speculative << ' ' << redone << std::endl;
  }
}

template <class T>
void read(T* values, std::int64_t count) {
  std::cin.read(reinterpret_cast<char*>(values), count * static_cast<std::int64_t>(sizeof(T)));
  if (!std::cin) throw std::runtime_error("the training ends too early");
}
template <class T>
T read() {
  T value;
  read(&value, 1);
  return value;
}

/// Sums over steps of what is printed, per parameter.
struct Tally {
  std::unique_ptr<State> state;
  StateFormat format;
  double bytes = 0.0;
  double recorded = 0.0;
};

void count_bytes(tandem::Device& device, std::int64_t first) {
  const auto count = read<std::int64_t>(), steps = read<std::int64_t>();
  std::vector<float> weights(static_cast<std::size_t>(count));
  read(weights.data(), count);
  const std::int64_t whole = count / layout_quantum * layout_quantum;
  std::vector<Tally> tallies;
  for (const StateFormat format : tandem::adamw_formats) {
    Tally& tally = tallies.emplace_back(Tally{std::make_unique<State>(device, format, whole), format});
    for (std::int64_t i = 0; i < whole; ++i) tally.state->set_master(i, weights[static_cast<std::size_t>(i)]);
    tally.state->set_moments();
  }
  std::vector<bf16> gradient(weights.size());
  for (std::int64_t step = 1; step <= steps; ++step) {
    const auto rate = read<double>(), factor = read<double>();
    read(gradient.data(), count);
    const tandem::AdamCoefficients speculated = coefficients(step, rate, unclipped);
    for (Tally& tally : tallies) {
      std::copy_n(gradient.data(), whole, tally.state->gradient());
      tally.state->gradient_is_set();
      const std::int64_t recorded = tally.state->speculate(speculated);
      if (step >= first) {
        tally.bytes += static_cast<double>(tally.state->record_bytes()) / static_cast<double>(whole);
        tally.recorded += static_cast<double>(recorded) / static_cast<double>(whole);
      }
      tally.state->redo(speculated, coefficients(step, rate, factor));
    }
  }
  const double counted = static_cast<double>(std::max<std::int64_t>(steps - first + 1, 1));
  for (const Tally& tally : tallies) {
    std::cout << tandem::name_of(tally.format) << ' ' << tally.bytes / counted << ' ' << tally.recorded / counted
              << '\n';
  }
}

StateFormat format_named(const std::string& name) {
  for (const StateFormat format : tandem::adamw_formats) {
    if (name == tandem::name_of(format)) return format;
  }
  throw tandem::UsageError(name, "no such format");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string what = argc > 1 ? argv[1] : "";
    std::cout << std::setprecision(9);
    const auto open = [](int threads) {
      return tandem::open_device("host",
                                 {.memory = std::size_t{1} << 20, .threads = threads, .update_threads = threads});
    };
    if (what == "time" && argc == 6) {
      const int threads = std::stoi(argv[3]);
      time_updates(*open(threads), std::stoll(argv[2]), threads, std::stoi(argv[4]), format_named(argv[5]));
      return 0;
    }
    if (what == "bytes" && argc == 3) {
      count_bytes(*open(1), std::stoll(argv[2]));
      return 0;
    }
    std::cerr << "usage: bench_speculate time COUNT THREADS PAIRS FORMAT, or bench_speculate bytes FIRST\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "bench_speculate: " << error.what() << '\n';
    return 1;
  }
}
