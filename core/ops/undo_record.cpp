#include "core/ops/undo_record.hpp"

namespace tandem {

std::int64_t recorded_elements(const UndoPiece& undo, StateFormat format, std::int64_t count) {
  std::int64_t recorded = 0;
  for (std::int64_t at = undo.begin; at < undo.begin + count; at += layout_quantum) {
    const UndoRun run(undo.memory, format, undo.range, at / undo_run);
    if (run.counts(at % undo_run / layout_quantum).updated != 0) recorded += layout_quantum;
  }
  return recorded;
}

}  // namespace tandem
