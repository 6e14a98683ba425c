#include "train/loop/run_record.hpp"

namespace tandem {

RunRecord RunRecord::of(const Manifest& m) {
  RunRecord record;
  record.step = m.step;
  record.tokens = m.tokens;
  record.skipped = m.skipped_steps;
  record.first_loss = m.first_loss;
  record.last_loss = m.last_loss;
  record.best_loss = m.best_eval_loss;
  record.best_step = m.best_step;
  return record;
}

void RunRecord::write_to(Manifest& m) const {
  m.step = step;
  m.skipped_steps = skipped;
  m.tokens = tokens;
  m.first_loss = first_loss;
  m.last_loss = last_loss;
  m.best_eval_loss = best_loss;
  m.best_step = best_step;
}

}  // namespace tandem
