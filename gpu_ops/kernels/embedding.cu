// Rows of a table by token, and their gradients without atomics: the first row that names a token owns it, and adds
// all rows that name it, in their order.
#include "gpu_ops/base/kernels.hpp"
#include "gpu_ops/base/launch.hpp"
#include "gpu_ops/kernels/elements.hpp"

namespace tandem::gpu {
namespace {

constexpr std::uint32_t quiet_nan = 0x7fc00000u;

struct EmbeddingShape {
  std::int64_t tokens, vocabulary, channels;
  TokenRows rows;
};

/// `positions` is null where there are none.
template <class T>
TANDEM_KERNEL(most_threads)
embedding_kernel(const std::int32_t* ids, const bf16* table, const bf16* positions, T* out, EmbeddingShape shape,
                 bool aligned) {
  for (std::int64_t row = block_index(); row < shape.tokens; row += grid_size()) {
    const std::int64_t id = ids[row];
    const bool known = id >= 0 && id < shape.vocabulary;
    const bf16* const from = table + (known ? id : 0) * shape.channels;
    const bf16* const place = positions == nullptr ? nullptr : positions + shape.rows.position(row) * shape.channels;
    T* const to = out + row * shape.channels;
    for_row_spans(shape.channels, aligned, [&](const Span& span) {
      Floats p = load(from, span);
      if (place != nullptr) {
        const Floats q = load(place, span);
        for (int i = 0; i < packet; ++i) p.x[i] = p.x[i] + q.x[i];
      }
      for (int i = 0; i < packet; ++i) p.x[i] = known ? p.x[i] : numerics::bits_float(quiet_nan);
      store(to, span, p);
    });
  }
}

/// Rows that wait for memory together, before they are added one after the other.
constexpr int ahead = 4;

/// total += the span of the first `count` of these rows of x.
template <class T>
TANDEM_DEVICE void add_spans(Floats& total, const T* x, const std::int64_t (&rows)[ahead], int count,
                             std::int64_t channels, const Span& span) {
  Raw<T> raw[ahead] = {};
  TANDEM_UNROLL
  for (int i = 0; i < ahead; ++i) {
    if (i < count) raw[i] = load_raw(x + rows[i] * channels, span);
  }
  TANDEM_UNROLL
  for (int i = 0; i < ahead; ++i) {
    const Floats p = widened(raw[i]);
    if (i >= count) continue;
    for (int k = 0; k < packet; ++k) total.x[k] = total.x[k] + p.x[k];
  }
}

/// sum[0, channels) += the rows, by the threads of the block: a thread always has the same columns.
template <class T>
TANDEM_DEVICE void add_rows(float* sum, const T* x, const std::int64_t (&rows)[ahead], int count, std::int64_t channels,
                            bool aligned) {
  for_row_spans(channels, aligned, [&](const Span& span) {
    Floats total = load(sum, span);
    add_spans(total, x, rows, count, channels, span);
    store_exactly(sum, span, total);
  });
}

/// Bit mask of the rows from `begin` on that are `wanted`: bit i of word w stands for row begin + 32 w + i. All threads
/// of the block call it and may read `words` when it returns, until they call it again.
template <class Wanted>
TANDEM_DEVICE void find_rows(std::int64_t begin, std::int64_t end, std::uint32_t* words, const Wanted& wanted) {
  const std::int64_t row = begin + thread_index();
  const std::uint32_t found = ballot(row < end && wanted(row));
  barrier();
  if (thread_index() % warp_lanes == 0) words[thread_index() / warp_lanes] = found;
  barrier();
}

/// Whether a row before `row` names its token.
TANDEM_DEVICE bool seen_before(const std::int32_t* ids, std::int64_t row, std::uint32_t* words) {
  for (std::int64_t begin = 0; begin < row; begin += most_threads) {
    find_rows(begin, row, words, [&](std::int64_t other) { return ids[other] == ids[row]; });
    for (int w = 0; w < most_warps; ++w) {
      if (words[w] != 0) return true;
    }
  }
  return false;
}

/// Calls `add(rows, count)` for the rows from `first` on that are `wanted`, in their order, up to `ahead` at once. By
/// all threads of the block.
template <class Wanted, class Add>
TANDEM_DEVICE void for_rows(std::int64_t first, std::int64_t end, std::uint32_t* words, const Wanted& wanted,
                            const Add& add) {
  for (std::int64_t begin = first; begin < end; begin += most_threads) {
    find_rows(begin, end, words, wanted);
    int w = 0;
    std::uint32_t left = words[0];
    while (true) {
      std::int64_t rows[ahead] = {};
      int count = 0;
      TANDEM_UNROLL
      for (int i = 0; i < ahead; ++i) {
        while (left == 0 && w + 1 < most_warps) left = words[++w];
        if (left == 0) continue;
        rows[i] = begin + w * warp_lanes + lowest_bit(left);
        left &= left - 1;
        count = i + 1;
      }
      if (count == 0) break;
      add(rows, count);
    }
  }
}

template <class T>
TANDEM_KERNEL(most_threads)
embedding_backward_kernel(const T* dout, const std::int32_t* ids, float* dtable, EmbeddingShape shape, bool aligned) {
  TANDEM_SHARED(std::uint32_t, words, most_warps);
  for (std::int64_t row = block_index(); row < shape.tokens; row += grid_size()) {
    const std::int32_t id = ids[row];
    if (id < 0 || id >= shape.vocabulary || seen_before(ids, row, words)) continue;
    float* const sum = dtable + id * shape.channels;
    const auto names = [&](std::int64_t other) { return ids[other] == id; };
    for_rows(row, shape.tokens, words, names, [&](const std::int64_t(&rows)[ahead], int count) {
      add_rows(sum, dout, rows, count, shape.channels, aligned);
    });
  }
}

TANDEM_KERNEL(most_threads)
clear_kernel(bf16* data, std::int64_t count, bool aligned) {
  for_spans(count, aligned, [&](const Span& span) { store(data, span, Floats{}); });
}

/// Sums stay in registers, a packet for each thread; more channels than that are taken one part after another.
/// `begun` (tokens, channels), or null, is what they begin with.
template <class T>
TANDEM_KERNEL(most_threads)
whole_embedding_backward_kernel(const T* dout, const std::int32_t* ids, const float* begun, bf16* dtable,
                                EmbeddingShape shape, bool aligned) {
  TANDEM_SHARED(std::uint32_t, words, most_warps);
  for (std::int64_t row = block_index(); row < shape.tokens; row += grid_size()) {
    const std::int32_t id = ids[row];
    if (id < 0 || id >= shape.vocabulary || seen_before(ids, row, words)) continue;
    const auto names = [&](std::int64_t other) { return ids[other] == id; };
    for (std::int64_t first = 0; first < shape.channels; first += packet * most_threads) {
      const std::int64_t at = first + packet * thread_index();
      const bool mine = at < shape.channels;
      const Span span = mine ? span_at(at, shape.channels, aligned) : Span{0, 0, false};
      Floats sum = {};
      if (mine && begun != nullptr) sum = load(begun + row * shape.channels, span);
      for_rows(row, shape.tokens, words, names, [&](const std::int64_t(&rows)[ahead], int count) {
        if (mine) add_spans(sum, dout, rows, count, shape.channels, span);
      });
      if (mine) store(dtable + id * shape.channels, span, sum);
    }
  }
}

/// A block for each position: rows position, position + sequence, ...
template <class T>
TANDEM_KERNEL(most_threads)
position_backward_kernel(const T* dout, float* dpositions, EmbeddingShape shape, bool aligned) {
  const std::int64_t sequence = shape.rows.sequence, used = sequence < shape.tokens ? sequence : shape.tokens;
  for (std::int64_t place = block_index(); place < used; place += grid_size()) {
    float* const sum = dpositions + place * shape.channels;
    for (std::int64_t row = place; row < shape.tokens; row += ahead * sequence) {
      std::int64_t rows[ahead];
      int count = 0;
      TANDEM_UNROLL
      for (int i = 0; i < ahead; ++i) {
        rows[i] = row + i * sequence;
        if (rows[i] < shape.tokens) ++count;
      }
      add_rows(sum, dout, rows, count, shape.channels, aligned);
    }
  }
}

/// A block for each position of packed rows: a position has rows wherever a record is that long.
template <class T>
TANDEM_KERNEL(most_threads)
packed_position_backward_kernel(const T* dout, float* dpositions, EmbeddingShape shape, bool aligned) {
  TANDEM_SHARED(std::uint32_t, words, most_warps);
  const std::int64_t sequence = shape.rows.sequence, used = sequence < shape.tokens ? sequence : shape.tokens;
  for (std::int64_t place = block_index(); place < used; place += grid_size()) {
    float* const sum = dpositions + place * shape.channels;
    const auto is_there = [&](std::int64_t row) { return shape.rows.position(row) == place; };
    for_rows(place, shape.tokens, words, is_there, [&](const std::int64_t(&rows)[ahead], int count) {
      add_rows(sum, dout, rows, count, shape.channels, aligned);
    });
  }
}

void write_embedding_backward(const TensorView& dout, const TensorView& tokens, const TensorView& dtable,
                              const TensorView& token_rows, const EmbeddingShape& shape, CUstream_st* stream) {
  auto* const rows = dtable.as<bf16>();
  const auto* const begun = optional<float>(token_rows);
  if (begun == nullptr) {
    launch("clear_embedding", clear_kernel, pointwise_geometry(dtable.count()), stream, rows, dtable.count(),
           aligned(rows));
  }
  with_activation(dout.dtype, [&]<class T>(T) {
    launch("embedding_backward", whole_embedding_backward_kernel<T>,
           Geometry{blocks_for(shape.tokens, 1), most_threads}, stream, dout.as<T>(), tokens.as<std::int32_t>(), begun,
           rows, shape, whole_packets<bf16>(shape.channels) && aligned(dout.data, begun, rows));
  });
}

}  // namespace

void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows, TensorView out,
               CUstream_st* stream) {
  const EmbeddingShape shape{tokens.count(), table.shape[0], table.shape[1], rows};
  with_activation(out.dtype, [&]<class T>(T) {
    launch("embedding", embedding_kernel<T>, row_geometry(shape.tokens, shape.channels), stream,
           tokens.as<std::int32_t>(), table.as<bf16>(), optional<bf16>(positions), out.as<T>(), shape,
           whole_packets<bf16>(shape.channels) && aligned(table.data, positions.data, out.data));
  });
}

void embedding_backward(TensorView dout, TensorView tokens, TensorView dtable, TensorView token_rows,
                        CUstream_st* stream) {
  const EmbeddingShape shape{tokens.count(), dtable.shape[0], dtable.shape[1], 1};
  if (dtable.dtype == DType::bf16) return write_embedding_backward(dout, tokens, dtable, token_rows, shape, stream);
  with_activation(dout.dtype, [&]<class T>(T) {
    launch("embedding_backward", embedding_backward_kernel<T>, Geometry{blocks_for(shape.tokens, 1), most_threads},
           stream, dout.as<T>(), tokens.as<std::int32_t>(), dtable.as<float>(), shape,
           whole_packets<bf16>(shape.channels) && aligned(dout.data, dtable.data));
  });
}

void position_backward(TensorView dout, const TokenRows& rows, TensorView dpositions, CUstream_st* stream) {
  const EmbeddingShape shape{dout.shape[0], 0, dout.shape[1], rows};
  const std::int64_t used = rows.sequence < shape.tokens ? rows.sequence : shape.tokens;
  with_activation(dout.dtype, [&]<class T>(T) {
    const bool whole = whole_packets<bf16>(shape.channels) && aligned(dout.data, dpositions.data);
    if (rows.records) {
      launch("position_backward", packed_position_backward_kernel<T>, Geometry{blocks_for(used, 1), most_threads},
             stream, dout.as<T>(), dpositions.as<float>(), shape, whole);
    } else {
      launch("position_backward", position_backward_kernel<T>, row_geometry(used, shape.channels), stream, dout.as<T>(),
             dpositions.as<float>(), shape, whole);
    }
  });
}

}  // namespace tandem::gpu
