#include "train/loop/run_record.hpp"

#include <cmath>

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
  record.lowest_eval_loss = m.lowest_eval_loss;
  record.evaluations_without_gain = m.evaluations_without_gain;
  record.counted_evaluation = m.counted_evaluation;
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
  m.lowest_eval_loss = lowest_eval_loss;
  m.evaluations_without_gain = evaluations_without_gain;
  m.counted_evaluation = counted_evaluation;
}

void RunRecord::note_evaluation(double loss) {
  eval_loss = loss;
  evaluated_step = step;
  if (counted_evaluation == step) return;  // once more, of a state that was loaded
  counted_evaluation = step;
  if (std::isfinite(loss) && (!lowest_eval_loss || loss < *lowest_eval_loss)) {
    lowest_eval_loss = loss;
    evaluations_without_gain = 0;
  } else {
    ++evaluations_without_gain;
  }
}

}  // namespace tandem
