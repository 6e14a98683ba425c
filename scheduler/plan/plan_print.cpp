// A plan as a table for people and as JSON.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "core/base/json_text.hpp"
#include "scheduler/plan/plan.hpp"

namespace tandem {
namespace {

using nlohmann::json;

/// Every field but the subgroups.
json outline_of(const Plan& plan) {
  json j;
  j["policy"] = plan.policy.text();
  j["chosen_by_auto"] = plan.chosen_by_auto;
  j["state"] = name_of(plan.state);
  j["subgroup_size"] = plan.subgroup_size;
  j["piece_elements"] = plan.piece_elements;
  j["staging_pieces"] = plan.staging_pieces;
  j["state_buffers"] = plan.state_buffers;
  j["file_buffers"] = plan.file_buffers;
  j["code_buffers"] = plan.code_buffers;
  j["rank"] = plan.rank.index;
  j["ranks"] = plan.rank.count;
  j["max_micro_batches"] = plan.max_micro_batches;
  j["micro_batches_at_once"] = plan.micro_batches_at_once;
  j["owners_make_gradients"] = plan.owners_make_gradients;
  j["offloaded_input_bytes"] = plan.offloaded_input_bytes;
  j["updates_in_backward"] = plan.updates_in_backward;
  j["speculate"] = name_of(plan.speculate);
  j["speculating_parameters"] = plan.speculating_parameters();
  j["update_threads"] = plan.update_threads;
  j["sends_sums"] = plan.sends_sums;
  j["device_memory"] = plan.device_memory;
  j["reserved_device_memory"] = plan.reserved_device_memory;
  j["device_reserved"] = plan.device_reserved;
  j["page_tables"] = plan.page_tables;
  j["reserved_host_memory"] = plan.reserved_host_memory;
  j["spare_device_memory"] = plan.spare_device_memory;
  j["spare_host_memory"] = plan.spare_host_memory;
  for (const LayerPlacement& l : plan.layers) {
    j["layers"].push_back(
        {{"resident", l.resident}, {"host_copy", l.host_copy}, {"in_codes", l.in_codes}, {"size_class", l.size_class}});
  }
  for (const SizeClass& c : plan.size_classes) {
    j["size_classes"].push_back({{"weight_elements", c.weight_elements},
                                 {"weight_bytes", c.weight_bytes},
                                 {"gradient_elements", c.gradient_elements},
                                 {"gradient_bytes", c.gradient_bytes},
                                 {"sum_elements", c.sum_elements},
                                 {"receive_bytes", c.receive_bytes},
                                 {"weight_buffers", c.weight_buffers},
                                 {"gradient_buffers", c.gradient_buffers},
                                 {"sum_buffers", c.sum_buffers},
                                 {"receive_buffers", c.receive_buffers}});
  }
  for (const MemoryEntry& e : plan.memory.entries) {
    j["memory"].push_back(
        {{"name", e.name}, {"phase", e.phase}, {"where", std::string(name_of(e.place))}, {"bytes", e.bytes}});
  }
  return j;
}

}  // namespace

std::string table_of(const MemoryPlan& memory) {
  struct Row {
    std::string_view name;
    std::size_t device = 0;
    std::size_t host = 0;
  };
  std::vector<Row> rows;
  for (const MemoryEntry& e : memory.entries) {
    if (e.place == Place::file) continue;
    auto row = std::ranges::find(rows, e.name, &Row::name);
    if (row == rows.end()) row = rows.insert(row, Row{e.name});
    (e.place == Place::device ? row->device : row->host) += e.bytes;
  }
  rows.push_back({"total", memory.device_bytes(), memory.host_bytes()});
  std::string text = fmt::format("{:<28}{:>12}{:>12}\n", "plan", "device", "host");
  const auto shown = [](std::size_t bytes) { return bytes > 0 ? format_bytes(bytes) : std::string("-"); };
  for (const Row& row : rows) text += fmt::format("{:<28}{:>12}{:>12}\n", row.name, shown(row.device), shown(row.host));
  if (const std::size_t file = memory.bytes_in(Place::file); file > 0) {
    text += fmt::format("in a file: {} of optimizer state, read and written in every step\n", format_bytes(file));
  }
  return text;
}

std::string Plan::table() const { return table_of(needs()) + notes(); }

std::string Plan::notes() const {
  const Shares s = shares();
  const double all = std::max(1.0, static_cast<double>(s.cpu + s.streamed + s.resident));
  std::string text =
      fmt::format("policy {}: updates {:.0f}% on the CPU, {:.0f}% streamed through the device, {:.0f}% resident\n",
                  policy_text(), 100.0 * static_cast<double>(s.cpu) / all,
                  100.0 * static_cast<double>(s.streamed) / all, 100.0 * static_cast<double>(s.resident) / all);
  if (update_threads > 0)
    text += fmt::format("CPU updates on {} thread{}\n", update_threads, update_threads == 1 ? "" : "s");
  if (updates_in_backward) text += "updates run in backward: none waits for the gradient norm\n";
  if (const std::int64_t some = speculating_parameters(); some > 0) {
    text += fmt::format("speculation: {:.0f}% of the updates may run before the gradient norm is known\n",
                        100.0 * static_cast<double>(some) / all);
  }
  if (const auto some = std::ranges::count_if(layers, &LayerPlacement::in_codes); some > 0) {
    text += fmt::format("weights of eight-bit products cross the link in a byte each, in {} layers\n", some);
  }
  if (max_micro_batches > 1) text += fmt::format("order {}\n", order());
  return text;
}

MemoryPlan Plan::needs() const {
  MemoryPlan all = memory;
  all.add("reserved by the caller", "run", Place::device, reserved_device_memory);
  all.add("reserved by the caller", "run", Place::pageable, reserved_host_memory);
  all.add("context and libraries", "run", Place::device, device_reserved);
  all.add("page tables of pinned memory", "run", Place::device, page_tables);
  return all;
}

std::string Plan::common_text() const {
  std::string text = fmt::format("{} ranks, {} {}/{} micro-batches, {}, layers", rank.count, storage_hash,
                                 micro_batches_at_once, max_micro_batches, owners_make_gradients);
  for (const LayerPlacement& l : layers) text += fmt::format(" {}{}", l.resident ? "r" : "", l.size_class);
  text += ", buffers";
  for (const SizeClass& c : size_classes) {
    text += fmt::format(" {}/{}/{}", c.weight_buffers, c.gradient_buffers, c.receive_buffers);
  }
  return text;
}

std::string Plan::policy_text() const {
  const bool fixed = policy.kind != Policy::Kind::automatic;
  return policy.text() + (fixed && chosen_by_auto ? ", auto" : "");
}

std::string Plan::order() const {
  const auto times = [&](int at_once) {
    const int passes = (max_micro_batches + at_once - 1) / at_once;
    return passes == 1 ? std::string("twice") : fmt::format("2 x {} times", passes);
  };
  std::string text = micro_batches_at_once == 1 ? "by micro-batch"
                     : micro_batches_at_once == max_micro_batches
                         ? "by layer"
                         : fmt::format("by layer, {} at once", micro_batches_at_once);
  if (!streams_weights()) {
    text += ": weights stay on the device";
  } else {
    text += fmt::format(": weights cross the link {} a step", times(micro_batches_at_once));
    if (micro_batches_at_once > 1) text += " instead of " + times(1);
  }
  if (sends_gradients())
    text += fmt::format(", gradients {}{} times", sends_sums ? "once instead of " : "", max_micro_batches);
  return text;
}

std::string Plan::json() const {
  nlohmann::json j = outline_of(*this);
  j["subgroups"] = nlohmann::json::array();
  for (const Subgroup& s : subgroups) {
    j["subgroups"].push_back({{"layer", s.layer},
                              {"begin", s.begin},
                              {"end", s.end},
                              {"tier", name_of(s.tier)},
                              {"updater", name_of(s.updater)},
                              {"gradient_on_device", s.gradient_on_device}});
  }
  return json_text(j, 2);
}

std::string Plan::outline_json() const {
  nlohmann::json j = outline_of(*this);
  const Shares s = shares();
  j["subgroups"] = subgroups.size();
  j["updated_parameters"] = {{"cpu", s.cpu}, {"streamed", s.streamed}, {"resident", s.resident}};
  return json_text(j);
}

}  // namespace tandem
