#pragma once
// Rows of several records, for tests of what must not see or count across them.
#include <cstdint>
#include <vector>

#include "core/ops/ops.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {

/// Place of one record of a row.
struct PackedRecord {
  std::int64_t row, first, length;
};

/// Records of rows of `sequence` tokens, by their lengths, which fill each row.
struct PackedRecords {
  PackedRecords(std::int64_t sequence, const std::vector<std::vector<std::int64_t>>& lengths)
      : first(DType::i32, {static_cast<std::int64_t>(lengths.size()), sequence}), end(first) {
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      std::int64_t at = 0;
      for (const std::int64_t length : lengths[row]) {
        all.push_back({static_cast<std::int64_t>(row), at, length});
        for (std::int64_t t = at; t < at + length; ++t) {
          const std::int64_t i = static_cast<std::int64_t>(row) * sequence + t;
          first.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(at);
          end.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(at + length);
        }
        at += length;
      }
      EXPECT_EQ(at, sequence) << "records of a test that do not fill row " << row;
    }
  }
  /// View of the records, on the host.
  RecordsView view() const { return {first.view().as<std::int32_t>(), end.view().as<std::int32_t>()}; }

  std::vector<PackedRecord> all;
  Tensor first, end;  ///< (B, T) i32
};

/// Two rows of 200 tokens: records of one token, of a block of 64 and about, short ones beside each other, and one that
/// fills a row but for its last token.
inline PackedRecords two_packed_rows() { return {200, {{1, 64, 3, 65, 1, 1, 40, 25}, {199, 1}}}; }

}  // namespace tandem::testing
