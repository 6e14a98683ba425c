#include "cpu_ops/elements.hpp"
#include "cpu_ops/kernels.hpp"

namespace tandem::fast {
namespace {

void check_tokens(const std::int32_t* tokens, std::int64_t n, std::int64_t vocabulary) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocabulary) {
      throw MisuseError("embedding: token outside the vocabulary", std::to_string(tokens[i]));
    }
  }
}

/// sum (row_of(i), C) += dout (i, C), rows in order. Threads share the columns: whole cache lines each.
template <class T, class RowOf>
void scatter_add(Parallel& parallel, const T* dout, std::int64_t n, std::int64_t channels, float* sum,
                 const RowOf& row_of) {
  constexpr std::int64_t columns = 64;
  for_ranges(parallel, channels, columns, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      for (std::int64_t i = 0; i < n; ++i) {
        const T* const source = dout + i * channels + begin;
        float* const target = sum + row_of(i) * channels + begin;
#pragma GCC ivdep
        for (std::int64_t c = 0; c < length; ++c) target[c] = target[c] + to_float(source[c]);
      }
    });
  });
}

}  // namespace

void embedding(Parallel& parallel, TensorView tokens, TensorView table, TensorView positions, std::int64_t sequence,
               TensorView out) {
  const std::int64_t n = tokens.count(), channels = table.shape[1];
  const std::int32_t* const ids = tokens.as<std::int32_t>();
  const bf16 *const rows = table.as<bf16>(), *const places = optional<bf16>(positions);
  check_tokens(ids, n, table.shape[0]);
  with_activation(out.dtype, [&]<class T>(T) {
    T* const target = out.as<T>();
    for_ranges(parallel, n, 16, [=](std::int64_t begin, std::int64_t length) {
      vectorised([=] {
        for (std::int64_t i = begin; i < begin + length; ++i) {
          const bf16* const row = rows + ids[i] * channels;
          const bf16* const place = places == nullptr ? nullptr : places + i % sequence * channels;
          T* const y = target + i * channels;
          if (place == nullptr) {
#pragma GCC ivdep
            for (std::int64_t c = 0; c < channels; ++c) y[c] = from_float<T>(to_float(row[c]));
          } else {
#pragma GCC ivdep
            for (std::int64_t c = 0; c < channels; ++c) y[c] = from_float<T>(to_float(row[c]) + to_float(place[c]));
          }
        }
      });
    });
  });
}

void embedding_backward(Parallel& parallel, TensorView dout, TensorView tokens, std::int64_t sequence,
                        TensorView dtable, TensorView dpositions) {
  const std::int64_t n = tokens.count(), channels = dout.shape[1];
  const std::int32_t* const ids = tokens.as<std::int32_t>();
  if (dtable) check_tokens(ids, n, dtable.shape[0]);
  with_activation(dout.dtype, [&]<class T>(T) {
    const T* const gradient = dout.as<T>();
    if (dtable) {
      scatter_add(parallel, gradient, n, channels, dtable.as<float>(),
                  [=](std::int64_t i) { return static_cast<std::int64_t>(ids[i]); });
    }
    if (dpositions) {
      scatter_add(parallel, gradient, n, channels, dpositions.as<float>(),
                  [=](std::int64_t i) { return i % sequence; });
    }
  });
}

}  // namespace tandem::fast
