#include "scheduler/simulation/step_record.hpp"

namespace tandem {

void StepRecord::stand_still(double seconds) noexcept {
  if (!reached_backward_) result_.exposed_update_seconds += seconds;
}

void StepRecord::add(const Task& task, double seconds, double times) {
  const double bytes = times * static_cast<double>(task.bytes);
  if (task.lane == Lane::host_to_device) to_device_.add(seconds, bytes);
  if (task.lane == Lane::device_to_host) to_host_.add(seconds, bytes);
  const bool updates = task.kind == TaskKind::update_cpu || task.kind == TaskKind::speculate;
  if (updates && seconds > 0.0) cpu_update_.add(seconds, static_cast<double>(task.count()));
}

bool StepRecord::open_pass(double now, std::int64_t pending) {
  if (openings_.size() == 3) openings_.erase(openings_.begin());
  openings_.push_back({now, pending, compute_seconds_, backward_seconds_, to_device_, to_host_, result_.use});
  return repeat(openings_);
}

double StepRecord::skip(std::int64_t passes) {
  const auto times = static_cast<double>(passes);
  const Snapshot& from = openings_[1];
  const Snapshot& to = openings_[2];
  const double seconds = times * (to.now - from.now);
  const auto repeat = [times](double& sum, double before, double after) { sum += times * (after - before); };
  repeat(compute_seconds_, from.compute, to.compute);
  repeat(backward_seconds_, from.backward, to.backward);
  to_device_.repeat(times, from.to_device, to.to_device);
  to_host_.repeat(times, from.to_host, to.to_host);
  for (std::size_t r = 0; r < result_.use.size(); ++r) repeat(result_.use[r], from.use[r], to.use[r]);
  openings_.clear();
  return seconds;
}

Simulation StepRecord::result(double now, std::int64_t tasks, const CostModel& costs) {
  result_.tasks = tasks;
  if (in_backward_) backward_seconds_ += now - backward_since_;
  result_.backward_seconds = backward_seconds_ / result_.steps;
  result_.forward_seconds = now / result_.steps - result_.backward_seconds;
  result_.update_seconds = update_end_;
  for (double& use : result_.use) use = now > 0.0 ? use / now : 0.0;
  result_.cores_of_device = result_.use[static_cast<std::size_t>(Resource::device)] * costs.device_core_share();
  result_.step_seconds = now / result_.steps + costs.step_overhead();
  result_.rates = {compute_seconds_, to_device_.rate(), to_host_.rate(), cpu_update_.rate()};
  return result_;
}

Simulation StepRecord::given_up(double least_seconds, std::int64_t tasks) {
  result_.tasks = tasks;
  result_.given_up = true;
  result_.step_seconds = least_seconds;
  return result_;
}

}  // namespace tandem
