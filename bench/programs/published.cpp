// The performance model against published measurements: calibrated on the rows without interleaving and two
// points of the stride sweep, it predicts the rows with interleaving. Prints JSON.
//   bench_published published_h100.csv published_facts.json h100x4-node.toml
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "scheduler/plan/plan.hpp"
#include "scheduler/simulation/simulator.hpp"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

struct Row {
  std::string model;
  double ratio = 0.0;
  bool async_flush = false;
  int stride = 0;
  double iteration = 0.0, forward = 0.0, backward = 0.0, allreduce = 0.0, update = 0.0;
};

struct Prediction {
  double iteration = 0.0;
  double iteration_stated_overhead = 0.0;  ///< with what is stated of iterations with interleaving
  double update = 0.0;
};

std::vector<Row> read_rows(const std::string& file) {
  std::ifstream in(file);
  std::string line;
  if (!std::getline(in, line)) throw InputError(file, "it cannot be read");
  std::map<std::string, std::size_t> columns;
  const auto split = [](const std::string& text) {
    std::vector<std::string> cells;
    std::istringstream stream(text);
    for (std::string cell; std::getline(stream, cell, ',');) {
      if (cell.ends_with('\r')) cell.pop_back();
      cells.push_back(cell);
    }
    return cells;
  };
  for (const std::string& name : split(line)) columns.emplace(name, columns.size());
  std::vector<Row> rows;
  while (std::getline(in, line)) {
    const auto cells = split(line);
    const auto number = [&](const char* name) { return std::stod(cells.at(columns.at(name))); };
    rows.push_back({cells.at(columns.at("model")), number("offload_ratio"), number("async_flush") > 0.0,
                    static_cast<int>(number("stride")), number("iter_s"), number("forward_s"), number("backward_s"),
                    number("allreduce_s"), number("update_s")});
  }
  return rows;
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double v : values) sum += v;
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

/// Common slope of groups of points (x, y), each group with an intercept of its own.
double slope_of(const std::vector<std::pair<std::vector<double>, std::vector<double>>>& groups) {
  double numerator = 0.0;
  double denominator = 0.0;
  for (const auto& [x, y] : groups) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      numerator += (x[i] - mean(x)) * (y[i] - mean(y));
      denominator += (x[i] - mean(x)) * (x[i] - mean(x));
    }
  }
  return denominator > 0.0 ? numerator / denominator : 0.0;
}

/// Argument in [low, high] at which `error` is least; it must fall, then rise.
double least(double low, double high, const std::function<double(double)>& error) {
  constexpr double golden = 0.6180339887498949;
  for (int i = 0; i < 60; ++i) {
    const double a = high - golden * (high - low);
    const double b = low + golden * (high - low);
    (error(a) < error(b) ? high : low) = error(a) < error(b) ? b : a;
  }
  return (low + high) / 2.0;
}

class PublishedModel {
 public:
  PublishedModel(const std::vector<Row>& rows, const Json& facts, MachineProfile machine)
      : facts_(facts), machine_(std::move(machine)) {
    // The path's bytes, less those of the weight on its way to the device, which are a copy's.
    constexpr double weight_bytes = 2.0;
    machine_.cpu_update_bytes.value = facts.at("cpu_path_bytes").get<double>() - weight_bytes;
    machine_.to_device.value = machine_.to_host.value = facts.at("pinned_copy");
    machine_.step_overhead.value = 0.0;
    for (const Row& row : rows) {
      if (row.stride == 0) calibration_.push_back(row);
    }
    calibrate_serial();
    calibrate_dram();
    calibrate_passes();
  }

  Prediction predict(const Row& row) const {
    const auto found = passes_.find(row.model);
    if (found == passes_.end()) {
      throw InputError(fmt::format("model {}", row.model), "no row without interleaving calibrates it");
    }
    const Passes& passes = found->second;
    const double host = parameters(row.model) * row.ratio;
    const Passes::Backward& backward = row.async_flush ? passes.async : passes.serial;
    const Simulation s = run(row, machine_.dram.value, passes.forward, backward.fixed + backward.each * host);
    const double iteration = s.step_seconds + passes.allreduce + passes.overhead;
    return {iteration, iteration + (row.stride > 0 ? interleaving_overhead() : 0.0), s.update_seconds};
  }

  Json figures() const {
    Json json{{"dram_bytes_per_second", machine_.dram.value},
              {"interleaving_overhead_seconds", interleaving_overhead()}};
    for (const auto& [model, passes] : passes_) {
      json["overhead_seconds"][model] = passes.overhead;
      json["cpu_update_parameters_per_second"][model] = passes.serial_rate;
    }
    return json;
  }

 private:
  struct Passes {
    /// Backward flushes the gradients of what lives on the host: a time of its own, and one for each parameter.
    struct Backward {
      double fixed = 0.0;
      double each = 0.0;
    };
    double serial_rate = 1.0;  ///< rate of the baseline's CPU update, parameters a second
    double forward = 0.0;
    double allreduce = 0.0;
    double overhead = 0.0;
    Backward async;
    Backward serial;
  };

  double parameters(const std::string& model) const { return facts_.at("parameters").at(model); }

  /// The baseline's passes over its state, one after another on the CPU, at each model's own rate: the one at which
  /// the simulated updates, with what follows them across the link, take as long as the measured ones.
  void calibrate_serial() {
    std::map<std::string, std::vector<const Row*>> by_model;
    for (const Row& row : calibration_) by_model[row.model].push_back(&row);
    for (const auto& [model, rows] : by_model) {
      double& rate = passes_[model].serial_rate;
      rate = least(1e9, 20e9, [&, of_model = rows](double tried) {
        rate = tried;
        double error = 0.0;
        for (const Row* row : of_model) {
          error += std::pow(run(*row, machine_.dram.value, 0.1, 0.5).update_seconds / row->update - 1.0, 2);
        }
        return error;
      });
    }
  }

  /// Interleaved, passes of different subgroups overlap and DRAM bounds them: from two points of the sweep.
  void calibrate_dram() {
    const Json& sweep = facts_.at("sweep");
    machine_.dram.value = least(200e9, 800e9, [&](double dram) {
      double error = 0.0;
      for (const std::string k : sweep.at("calibrated_on")) {
        Row row;
        row.model = sweep.at("model");
        row.ratio = sweep.at("offload_ratio");
        row.stride = std::stoi(k);
        const double measured = sweep.at("update_s").at(k);
        error += std::pow(run(row, dram, 0.1, 0.5).update_seconds / measured - 1.0, 2);
      }
      return error;
    });
  }

  void calibrate_passes() {
    // Seconds that a parameter on the host adds to backward: from the model with most ratios.
    const auto slope = [&](bool async) {
      std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> by_model;
      for (const Row& row : calibration_) {
        if (row.async_flush != async) continue;
        by_model[row.model].first.push_back(parameters(row.model) * row.ratio);
        by_model[row.model].second.push_back(row.backward);
      }
      std::vector<std::pair<std::vector<double>, std::vector<double>>> groups;
      for (const auto& [model, points] : by_model) groups.push_back(points);
      return slope_of(groups);
    };
    const double async = slope(true);
    const double serial = slope(false);
    std::map<std::string, std::vector<const Row*>> by_model;
    for (const Row& row : calibration_) by_model[row.model].push_back(&row);
    for (const auto& [model, rows] : by_model) {
      Passes& passes = passes_[model];
      std::vector<double> forward, allreduce, fixed_async, fixed_serial, rest;
      for (const Row* row : rows) {
        forward.push_back(row->forward);
        allreduce.push_back(row->allreduce);
        rest.push_back(row->iteration - row->forward - row->backward - row->allreduce - row->update);
        const double host = parameters(model) * row->ratio;
        if (row->async_flush) {
          fixed_async.push_back(row->backward - async * host);
        } else {
          fixed_serial.push_back(row->backward - serial * host);
        }
      }
      passes.forward = mean(forward);
      passes.allreduce = mean(allreduce);
      passes.overhead = mean(rest);
      passes.async = {mean(fixed_async), async};
      passes.serial = {mean(fixed_serial), serial};
    }
  }

  /// Stated overhead of iterations with interleaving, which no row without it can tell: middle of one range less middle
  /// of the other. Only figures "stated overhead" count it.
  double interleaving_overhead() const {
    const auto middle = [&](const char* name) {
      const Json& range = facts_.at("overhead_s").at(name);
      return (range.at(0).get<double>() + range.at(1).get<double>()) / 2.0;
    };
    return middle("with_interleaving") - middle("without_interleaving");
  }

  int subgroups(const Row& row) const {
    const double own = parameters(row.model) / facts_.at("ranks").get<double>();
    return std::max(1, static_cast<int>(std::ceil(own / facts_.at("subgroup_size").get<double>())));
  }
  /// Subgroups that the host updates, rounded to the nearest; half a subgroup goes to the host.
  int host_subgroups(const Row& row) const { return static_cast<int>(std::floor(subgroups(row) * row.ratio + 0.5)); }

  /// One rank of the node: a quarter of the model, in layers of one subgroup each.
  Simulation run(const Row& row, double dram, double forward, double backward) const {
    const double own = parameters(row.model) / facts_.at("ranks").get<double>();
    const int count = subgroups(row);
    const auto each = static_cast<std::int64_t>(own / count / 1024.0);
    ParameterLayout layout;
    for (int i = 0; i < count; ++i) layout.add_layer(fmt::format("part {}", i)).add("w", {each, 1024});
    OffloadOptions options;
    options.subgroup_size = each * 1024;
    const double host_share = static_cast<double>(host_subgroups(row)) / count;
    options.policy =
        parse_policy(row.stride == 0 ? fmt::format("static:{}", host_share)
                                     : fmt::format("interleave:{},resident={}", row.stride, 1.0 - host_share));
    constexpr std::size_t unlimited = std::size_t{1} << 50;
    const Plan plan = make_plan(layout, options, {unlimited, 0});
    MachineProfile machine = machine_;
    machine.dram.value = dram;
    machine.host_stream.value = dram;
    machine.cpu_update.value =
        row.stride == 0 ? passes_.at(row.model).serial_rate : dram / machine.cpu_update_bytes.value;
    const std::vector<LayerSeconds> compute(static_cast<std::size_t>(count), {forward / count, backward / count});
    return simulate(layout, plan, machine, compute, {.micro_batches = 1, .overlap_updates = false});
  }

  Json facts_;
  MachineProfile machine_;
  std::vector<Row> calibration_;
  std::map<std::string, Passes> passes_;
};

/// Pairs of rows that the measurement tells apart and the prediction has the other way round.
int misordered(const std::vector<std::pair<double, double>>& measured_and_predicted) {
  constexpr double apart = 1.05;
  int wrong = 0;
  for (const auto& [measured, predicted] : measured_and_predicted) {
    for (const auto& [other_measured, other_predicted] : measured_and_predicted) {
      if (measured > apart * other_measured && predicted <= other_predicted) ++wrong;
    }
  }
  return wrong;
}

Json compare(const std::vector<Row>& rows, const PublishedModel& model) {
  Json json;
  double worst_iteration = 0.0;
  double worst_update = 0.0;
  double worst_stated_overhead = 0.0;
  std::vector<std::pair<double, double>> iterations;
  std::vector<std::pair<double, double>> updates;
  std::vector<std::pair<double, double>> stated;
  for (const Row& row : rows) {
    const Prediction p = model.predict(row);
    iterations.emplace_back(row.iteration, p.iteration);
    updates.emplace_back(row.update, p.update);
    stated.emplace_back(row.iteration, p.iteration_stated_overhead);
    json["rows"].push_back({{"model", row.model},
                            {"offload_ratio", row.ratio},
                            {"async_flush", row.async_flush},
                            {"stride", row.stride},
                            {"calibrated_on", row.stride == 0},
                            {"iter_s", row.iteration},
                            {"predicted_iter_s", p.iteration},
                            {"update_s", row.update},
                            {"predicted_update_s", p.update}});
    if (row.stride == 0) continue;
    worst_iteration = std::max(worst_iteration, std::abs(p.iteration / row.iteration - 1.0));
    worst_update = std::max(worst_update, std::abs(p.update / row.update - 1.0));
    worst_stated_overhead =
        std::max(worst_stated_overhead, std::abs(p.iteration_stated_overhead / row.iteration - 1.0));
  }
  json["worst_iter_error"] = worst_iteration;
  json["worst_update_error"] = worst_update;
  json["worst_iter_error_stated_overhead"] = worst_stated_overhead;
  json["misordered_iterations"] = misordered(iterations);
  json["misordered_iterations_stated_overhead"] = misordered(stated);
  json["misordered_updates"] = misordered(updates);
  json["calibrated"] = model.figures();
  return json;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  try {
    if (argc != 4) throw tandem::UsageError("bench_published", "it takes a CSV of rows, facts and a machine profile");
    const auto rows = tandem::read_rows(argv[1]);
    std::ifstream in(argv[2]);
    const auto facts = tandem::Json::parse(in);
    const tandem::PublishedModel model(rows, facts, tandem::read_profile(argv[3]));
    std::cout << tandem::compare(rows, model).dump(2) << "\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_published: " << error.what() << "\n";
    return 1;
  }
}
