#include "cpu_ops/update/update_kernels.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/vectorised.hpp"
#include "core/numerics/fp8_scale.hpp"
#include "core/numerics/norm_block.hpp"
#include "core/ops/op_checks.hpp"
#include "cpu_ops/update/adam_kernels.hpp"
#include "cpu_ops/update/speculation.hpp"

namespace tandem {

void kernels::adamw_dispatched(Isa isa, const AdamPiece& piece, const AdamCoefficients& c) {
  switch (isa) {
    case Isa::avx512:
      return adamw_avx512(piece, c);
    case Isa::avx2:
      return adamw_avx2(piece, c);
    case Isa::scalar:
      return adamw_scalar(piece, c);
  }
}

namespace {
using kernels::adamw_dispatched;

/// Elements that a thread takes at once: a multiple of the layout quantum, so that threads share no
/// cache line; large enough that the hardware's prefetching starts rarely, small enough to balance.
constexpr std::int64_t elements_at_once = 64 * layout_quantum;

std::int64_t pieces_of(std::int64_t count) { return (count + elements_at_once - 1) / elements_at_once; }

void require_supported(Isa isa) {
  const auto& isas = supported_isas();
  if (std::find(isas.begin(), isas.end(), isa) == isas.end()) {
    throw MisuseError("update kernel for an instruction set that this processor lacks", name_of(isa));
  }
}

double norm_block_dispatched(Isa isa, const bf16* gradient, std::int64_t count) {
  switch (isa) {
    case Isa::avx512:
      return kernels::norm_block_avx512(gradient, count);
    case Isa::avx2:
      return kernels::norm_block_avx2(gradient, count);
    case Isa::scalar:
      break;
  }
  return numerics::norm_block(gradient, count);
}

/// fp32 gradients are those of few parameters: one text for all instruction sets.
double norm_block_dispatched(Isa, const float* gradient, std::int64_t count) {
  return numerics::norm_block(gradient, count);
}

template <class T>
void norm_blocks_dispatched(Isa isa, const T* gradient, std::int64_t count, double* partial) {
  for (std::int64_t begin = 0; begin < count; begin += layout_quantum) {
    partial[begin / layout_quantum] =
        norm_block_dispatched(isa, gradient + begin, std::min(layout_quantum, count - begin));
  }
}

void weights_dispatched(Isa isa, const float* master, bf16* weight, std::int64_t count) {
  vectorised(
      [=] {
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) weight[i] = numerics::weight_of_master(master[i]);
      },
      isa);
}

template <class T>
void accumulate_dispatched(Isa isa, float* sum, const T* gradient, bool first, std::int64_t count) {
  vectorised(
      [=] {
        if (first) {
#pragma GCC ivdep
          for (std::int64_t i = 0; i < count; ++i) sum[i] = numerics::widened(gradient[i]);
        } else {
#pragma GCC ivdep
          for (std::int64_t i = 0; i < count; ++i) sum[i] = sum[i] + numerics::widened(gradient[i]);
        }
      },
      isa);
}

void round_dispatched(Isa isa, const float* sum, bf16* gradient, std::int64_t count) {
  vectorised(
      [=] {
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) gradient[i] = numerics::round_to_bf16(sum[i]);
      },
      isa);
}

/// Codes of weights in e4m3 under the scale 2^exponent; returns their largest magnitude (numerics::fp8_magnitude).
std::uint32_t encode_dispatched(Isa isa, const bf16* weight, int exponent, std::uint8_t* codes, std::int64_t count) {
  std::uint32_t largest = 0;
  vectorised(
      [=, to = &largest] {
        // Bytes that are written may be those of what is captured, for all that the compiler knows, but not of these.
        const bf16* const from = weight;
        std::uint8_t* const out = codes;
        const std::int64_t n = count;
        const int e = exponent;
        std::uint32_t seen = 0;
#pragma GCC ivdep
        for (std::int64_t i = 0; i < n; ++i) {
          out[i] = numerics::to_scaled_fp8<numerics::E4m3>(numerics::bf16_to_float(from[i]), e);
          seen = std::max(seen, numerics::fp8_magnitude(from[i]));
        }
        *to = seen;
      },
      isa);
  return largest;
}

/// Runs of its record that a piece has blocks of.
std::int64_t runs_of(const AdamPiece& p, const UndoPiece& undo) {
  return p.count == 0 ? 0 : (undo.begin + p.count - 1) / undo_run + 1 - undo.begin / undo_run;
}

/// Calls body(RunPiece) for the part of a piece in run `index` of its record.
template <class Body>
void with_run(const AdamPiece& p, const UndoPiece& undo, std::int64_t index, const Body& body) {
  const std::int64_t start = index * undo_run;
  const std::int64_t begin = std::max(undo.begin, start), end = std::min(undo.begin + p.count, start + undo_run);
  AdamPiece part = p.from(begin - undo.begin);
  part.count = end - begin;
  const UndoRun record(undo.memory, p.format, undo.range, index);
  body(kernels::RunPiece{part, record, (begin - start) / layout_quantum, undo.block_norms + start / layout_quantum});
}

class HostUpdateKernels final : public UpdateKernels {
 public:
  explicit HostUpdateKernels(std::shared_ptr<Parallel> parallel) : parallel_(std::move(parallel)) {}

  void adamw(const AdamPiece& p, const AdamCoefficients& c, int most_threads) override {
    checks::adamw(p);
    const auto update = [&](std::int64_t at, std::int64_t count) {
      AdamPiece part = p.from(at);
      part.count = count;
      adamw_dispatched(isa_, part, c);
    };
    const std::int64_t pieces = pieces_of(p.count);
    run(pieces, most_threads, [&](std::int64_t i) { with_piece(p.count, i, update); });
  }
  std::int64_t speculate(const AdamPiece& p, const AdamCoefficients& c, const UndoPiece& undo,
                         int most_threads) override {
    checks::speculation(p, c, undo);
    std::atomic<std::int64_t> updated = 0;
    for_runs(p, undo, most_threads, [&](const kernels::RunPiece& run) { updated += kernels::speculate(isa_, run, c); });
    return updated;
  }
  void settle(const AdamPiece& p, const AdamCoefficients& speculated, const AdamCoefficients& actual, Settling settling,
              const UndoPiece& undo, int most_threads) override {
    checks::speculation(p, speculated, undo);
    for_runs(p, undo, most_threads,
             [&](const kernels::RunPiece& run) { kernels::settle(isa_, run, speculated, actual, settling); });
  }
  void weights_of_master(const float* master, bf16* weight, std::int64_t count) override {
    for_pieces(count, [&](std::int64_t at, std::int64_t n) { weights_dispatched(isa_, master + at, weight + at, n); });
  }
  void accumulate(float* sum, const bf16* gradient, bool first, std::int64_t count) override {
    accumulate_pieces(sum, gradient, first, count);
  }
  void accumulate(float* sum, const float* gradient, bool first, std::int64_t count) override {
    accumulate_pieces(sum, gradient, first, count);
  }
  void round(const float* sum, bf16* gradient, std::int64_t count) override {
    for_pieces(count, [&](std::int64_t at, std::int64_t n) { round_dispatched(isa_, sum + at, gradient + at, n); });
  }
  void norm_blocks(const bf16* gradient, std::int64_t count, double* partial) override {
    norms_of_pieces(gradient, count, partial);
  }
  void norm_blocks(const float* gradient, std::int64_t count, double* partial) override {
    norms_of_pieces(gradient, count, partial);
  }
  int fp8_codes(const bf16* weight, std::int64_t count, int exponent, std::uint8_t* codes, int most_threads) override {
    const std::uint32_t largest = encode(weight, count, exponent, codes, most_threads);
    if (largest >= numerics::fp8_not_finite) {
      std::fill_n(codes, count, numerics::fp8_nan_code<numerics::E4m3>());
      return 0;
    }
    const int right = numerics::fp8_exponent<numerics::E4m3>(largest);
    if (right != exponent) encode(weight, count, right, codes, most_threads);
    return right;
  }
  Parallel& parallel() noexcept override { return *parallel_; }

 private:
  std::uint32_t encode(const bf16* weight, std::int64_t count, int exponent, std::uint8_t* codes, int most_threads) {
    std::atomic<std::uint32_t> largest = 0;
    run(pieces_of(count), most_threads, [&](std::int64_t i) {
      with_piece(count, i, [&](std::int64_t at, std::int64_t n) {
        const std::uint32_t of_piece = encode_dispatched(isa_, weight + at, exponent, codes + at, n);
        std::uint32_t known = largest.load();
        while (known < of_piece && !largest.compare_exchange_weak(known, of_piece)) {
        }
      });
    });
    return largest.load();
  }
  template <class T>
  void accumulate_pieces(float* sum, const T* gradient, bool first, std::int64_t count) {
    for_pieces(count, [&](std::int64_t at, std::int64_t n) {
      accumulate_dispatched(isa_, sum + at, gradient + at, first, n);
    });
  }
  template <class T>
  void norms_of_pieces(const T* gradient, std::int64_t count, double* partial) {
    for_pieces(count, [&](std::int64_t at, std::int64_t n) {
      norm_blocks_dispatched(isa_, gradient + at, n, partial + at / layout_quantum);
    });
  }
  /// Calls body(0) ... body(count - 1) on at most so many threads; 0: on all.
  template <class Body>
  void run(std::int64_t count, int most_threads, const Body& body) {
    if (most_threads <= 0 || most_threads >= threads()) return parallel_->run(count, body);
    std::atomic<std::int64_t> next = 0;
    parallel_->run(std::min<std::int64_t>(most_threads, count), [&](std::int64_t) {
      for (std::int64_t i = next++; i < count; i = next++) body(i);
    });
  }
  /// Calls body(RunPiece) for the part of a piece in each run of its record.
  template <class Body>
  void for_runs(const AdamPiece& p, const UndoPiece& undo, int most_threads, const Body& body) {
    const std::int64_t first = undo.begin / undo_run;
    run(runs_of(p, undo), most_threads, [&](std::int64_t i) { with_run(p, undo, first + i, body); });
  }
  template <class Body>
  void for_pieces(std::int64_t count, const Body& body) {
    parallel_->run(pieces_of(count), [&](std::int64_t i) { with_piece(count, i, body); });
  }
  template <class Body>
  static void with_piece(std::int64_t count, std::int64_t i, const Body& body) {
    const std::int64_t at = i * elements_at_once;
    body(at, std::min(elements_at_once, count - at));
  }

  std::shared_ptr<Parallel> parallel_;
  Isa isa_ = best_isa();
};

}  // namespace

std::unique_ptr<UpdateKernels> make_host_update_kernels(std::shared_ptr<Parallel> parallel) {
  return std::make_unique<HostUpdateKernels>(std::move(parallel));
}

void adamw_with(Isa isa, const AdamPiece& piece, const AdamCoefficients& c) {
  require_supported(isa);
  checks::adamw(piece);
  adamw_dispatched(isa, piece, c);
}
std::int64_t speculate_with(Isa isa, const AdamPiece& piece, const AdamCoefficients& c, const UndoPiece& undo) {
  require_supported(isa);
  checks::speculation(piece, c, undo);
  std::int64_t updated = 0;
  for (std::int64_t i = 0; i < runs_of(piece, undo); ++i) {
    with_run(piece, undo, undo.begin / undo_run + i,
             [&](const kernels::RunPiece& run) { updated += kernels::speculate(isa, run, c); });
  }
  return updated;
}
void settle_with(Isa isa, const AdamPiece& piece, const AdamCoefficients& speculated, const AdamCoefficients& actual,
                 Settling settling, const UndoPiece& undo) {
  require_supported(isa);
  checks::speculation(piece, speculated, undo);
  for (std::int64_t i = 0; i < runs_of(piece, undo); ++i) {
    with_run(piece, undo, undo.begin / undo_run + i,
             [&](const kernels::RunPiece& run) { kernels::settle(isa, run, speculated, actual, settling); });
  }
}
void norm_blocks_with(Isa isa, const bf16* gradient, std::int64_t count, double* partial) {
  require_supported(isa);
  norm_blocks_dispatched(isa, gradient, count, partial);
}
void weights_of_master_with(Isa isa, const float* master, bf16* weight, std::int64_t count) {
  require_supported(isa);
  weights_dispatched(isa, master, weight, count);
}
void accumulate_with(Isa isa, float* sum, const bf16* gradient, bool first, std::int64_t count) {
  require_supported(isa);
  accumulate_dispatched(isa, sum, gradient, first, count);
}
std::uint32_t encode_with(Isa isa, const bf16* weight, int exponent, std::uint8_t* codes, std::int64_t count) {
  require_supported(isa);
  return encode_dispatched(isa, weight, exponent, codes, count);
}
void round_with(Isa isa, const float* sum, bf16* gradient, std::int64_t count) {
  require_supported(isa);
  round_dispatched(isa, sum, gradient, count);
}

}  // namespace tandem
