#include <algorithm>

#include "cpu_ops/kernels/elements.hpp"
#include "cpu_ops/kernels/kernels.hpp"

namespace tandem::fast {
namespace {

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

void clear(Parallel& parallel, const TensorView& rows) {
  constexpr std::int64_t line = 4096;
  bf16* const table = rows.as<bf16>();
  for_ranges(parallel, rows.count(), line, [=](std::int64_t begin, std::int64_t length) {
    std::fill(table + begin, table + begin + length, bf16{});
  });
}

/// table (V, C) = of each token with rows of dout (n, C) their sum in their order. The first row that names a token
/// owns it, and its row of `begun` (n, C), where there is one, is what the sum begins with. Threads share the columns.
template <class T>
void gather_sums(Parallel& parallel, const T* dout, const std::int32_t* ids, std::int64_t n, std::int64_t channels,
                 const float* begun, bf16* table) {
  constexpr std::int64_t columns = 256;
  for_ranges(parallel, channels, columns, [=](std::int64_t begin, std::int64_t length) {
    vectorised([=] {
      float sum[columns];
      for (std::int64_t i = 0; i < n; ++i) {
        if (std::find(ids, ids + i, ids[i]) != ids + i) continue;
        std::fill(sum, sum + columns, 0.0F);
        if (begun != nullptr) std::copy_n(begun + i * channels + begin, length, sum);
        for (std::int64_t j = i; j < n; ++j) {
          if (ids[j] != ids[i]) continue;
          const T* const source = dout + j * channels + begin;
#pragma GCC ivdep
          for (std::int64_t c = 0; c < length; ++c) sum[c] = sum[c] + to_float(source[c]);
        }
        bf16* const target = table + ids[i] * channels + begin;
#pragma GCC ivdep
        for (std::int64_t c = 0; c < length; ++c) target[c] = from_float<bf16>(sum[c]);
      }
    });
  });
}

}  // namespace

void embedding(Parallel& parallel, TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows,
               TensorView out) {
  const std::int64_t n = tokens.count(), channels = table.shape[1];
  const std::int32_t* const ids = tokens.as<std::int32_t>();
  const bf16 *const vectors = table.as<bf16>(), *const places = optional<bf16>(positions);
  check_tokens("embedding", tokens, table.shape[0]);
  with_activation(out.dtype, [&]<class T>(T) {
    T* const target = out.as<T>();
    for_ranges(parallel, n, 16, [=, rows = rows](std::int64_t begin, std::int64_t length) {
      vectorised([=] {
        for (std::int64_t i = begin; i < begin + length; ++i) {
          const bf16* const row = vectors + ids[i] * channels;
          const bf16* const place = places == nullptr ? nullptr : places + rows.position(i) * channels;
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

void embedding_backward(Parallel& parallel, TensorView dout, TensorView tokens, const TokenRows& rows,
                        TensorView dtable, TensorView dpositions, TensorView token_rows) {
  const std::int64_t n = tokens.count(), channels = dout.shape[1];
  const std::int32_t* const ids = tokens.as<std::int32_t>();
  if (dtable) check_tokens("embedding", tokens, dtable.shape[0]);
  with_activation(dout.dtype, [&]<class T>(T) {
    const T* const gradient = dout.as<T>();
    if (dtable && dtable.dtype == DType::bf16) {
      if (!token_rows) clear(parallel, dtable);
      gather_sums(parallel, gradient, ids, n, channels, optional<float>(token_rows), dtable.as<bf16>());
    } else if (dtable) {
      scatter_add(parallel, gradient, n, channels, dtable.as<float>(),
                  [=](std::int64_t i) { return static_cast<std::int64_t>(ids[i]); });
    }
    if (dpositions) {
      scatter_add(parallel, gradient, n, channels, dpositions.as<float>(),
                  [rows](std::int64_t i) { return rows.position(i); });
    }
  });
}

}  // namespace tandem::fast
