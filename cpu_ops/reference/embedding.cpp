#include <vector>

#include "cpu_ops/reference/element_access.hpp"
#include "cpu_ops/reference/reference.hpp"

namespace tandem::reference {

void embedding(TensorView tokens, TensorView table, TensorView positions, const TokenRows& rows, TensorView out) {
  const std::int64_t channels = table.shape[1];
  for (std::int64_t n = 0; n < tokens.count(); ++n) {
    const std::int64_t token = tokens.as<std::int32_t>()[n];
    for (std::int64_t c = 0; c < channels; ++c) {
      const double place = positions ? get(positions, rows.position(n) * channels + c) : 0.0;
      put(out, n * channels + c, get(table, token * channels + c) + place);
    }
  }
}

void embedding_backward(TensorView dout, TensorView tokens, const TokenRows& lengths, TensorView dtable,
                        TensorView dpositions, TensorView token_rows) {
  const std::int64_t channels = dout.shape[1];
  const bool whole = dtable && dtable.dtype == DType::bf16;
  std::vector<double> rows(whole ? static_cast<std::size_t>(dtable.count()) : 0);
  for (std::size_t i = 0; token_rows && i < rows.size(); ++i) rows[i] = get(dtable, static_cast<std::int64_t>(i));
  for (std::int64_t n = tokens.count(); token_rows && n-- > 0;) {  // the first that has a token is the last to say
    const std::int64_t token = tokens.as<std::int32_t>()[n];
    for (std::int64_t c = 0; c < channels; ++c) {
      rows[static_cast<std::size_t>(token * channels + c)] = get(token_rows, n * channels + c);
    }
  }
  for (std::int64_t n = 0; n < tokens.count(); ++n) {
    const std::int64_t token = tokens.as<std::int32_t>()[n];
    for (std::int64_t c = 0; c < channels; ++c) {
      const double gradient = get(dout, n * channels + c);
      if (whole) rows[static_cast<std::size_t>(token * channels + c)] += gradient;
      if (dtable && !whole) add_to(dtable, token * channels + c, gradient);
      if (dpositions) add_to(dpositions, lengths.position(n) * channels + c, gradient);
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) put(dtable, static_cast<std::int64_t>(i), rows[i]);
}

}  // namespace tandem::reference
