#include "scheduler/plan/divided_state.hpp"

#include <utility>

namespace tandem {

Knobs smallest_knobs(const ParameterLayout& layout, const OffloadOptions& options) {
  Knobs knobs;
  knobs.prefetch = options.prefetch_layers.value_or(knobs.prefetch);
  knobs.resident_layers = options.resident_layers.value_or(knobs.resident_layers);
  knobs.speculates = options.speculate == Speculate::on;
  if (options.policy.kind == Policy::Kind::device) knobs.resident_layers = layout.layer_count();
  return knobs;
}

DividedState::DividedState(const ParameterLayout& layout, const OffloadOptions& options)
    : layout_(layout), options_(options), divided_(layout, options) {
  divided_.divide_state();
  divided_.order_layers();
}

Plan DividedState::plan(const Knobs& knobs) const {
  PlanBuilder builder = divided_;
  builder.place_in_file(knobs.file_bytes);
  builder.place_weights(knobs.resident_layers, knobs.prefetch, knobs.gradient_buffers);
  if (knobs.codes) builder.place_codes();
  builder.place_gradients(knobs.keep_gradients, knobs.send_sums);
  if (knobs.speculates) builder.speculate();
  builder.book_memory(knobs.small_pieces);
  return std::move(builder).take();
}

}  // namespace tandem
