#include "scheduler/machine/profile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr double least_both_ways = 0.5;  // share of one way alone
constexpr double kilo = 1e3;
constexpr double giga = 1e9;
constexpr double tera = 1e12;
constexpr double peta = 1e15;

}  // namespace

const std::vector<ProfileField>& profile_fields() {
  using P = MachineProfile;
  static const std::vector<ProfileField> fields{
      {"machine", "devices", "1", "devices that share this host", &P::devices, 1, 64},
      {"machine", "cores", "1", "cores of the host", &P::cores, 1, 4096},
      {"machine", "numa_nodes", "1", "memory nodes of the host", &P::numa_nodes, 1, 64, false},
      {"machine", "host_memory", "B", "memory of the host", &P::host_memory, 1e8, 100 * tera},
      {"machine", "others_busy", "1", "cores that other programs kept busy meanwhile", &P::others_busy, 0, 4096, false},
      {"device", "memory", "B", "memory of one device", &P::device_memory, 1e6, 10 * tera},
      {"device", "threads", "1", "cores of the host that its kernels take (0: it has its own)", &P::device_threads, 0,
       4096, false},
      {"device", "matmul", "FLOP/s", "matrix products at the shapes of layers", &P::matmul, 1e8, 20 * peta},
      {"device", "products_fp8", "FLOP/s", "matrix products of eight-bit factors", &P::products_fp8, 1e8, 40 * peta,
       false},
      {"device", "attention", "FLOP/s", "attention, forward and backward", &P::attention, 1e7, 20 * peta},
      {"device", "bandwidth", "B/s", "its own memory, in memory-bound kernels", &P::device_bandwidth, 1e8, 100 * tera},
      {"device", "update", "parameters/s", "AdamW on the device", &P::device_update, 1e6, 10 * tera},
      {"device", "update_bf16_moments", "parameters/s", "AdamW on the device, of state with bf16 moments",
       &P::device_bf16_moments, 1e6, 10 * tera, false},
      {"device", "update_8bit_moments", "parameters/s", "AdamW on the device, of state with moments in 8 bits",
       &P::device_byte_moments, 1e6, 10 * tera, false},
      {"device", "launch", "s", "least time of a kernel", &P::launch, 0, 0.1, false},
      {"link", "to_device", "B/s", "pinned, host to device, alone", &P::to_device, 1e6, 10 * tera},
      {"link", "to_host", "B/s", "pinned, device to host, alone", &P::to_host, 1e6, 10 * tera},
      {"link", "both_ways", "B/s", "sum of both ways at once", &P::both_ways, 1e6, 20 * tera},
      {"link", "pageable_to_device", "B/s", "from memory that is not pinned", &P::pageable_to_device, 1e6, 10 * tera,
       false},
      {"link", "pageable_to_host", "B/s", "to memory that is not pinned", &P::pageable_to_host, 1e6, 10 * tera, false},
      {"link", "latency", "s", "a copy of nothing", &P::copy_latency, 0, 0.1, false},
      {"link", "dram", "B/B", "bytes of host DRAM traffic for each byte copied", &P::copy_dram, 0.01, 8},
      {"link", "cores", "1", "cores that a copy at full rate takes (0: DMA)", &P::copy_cores, 0, 64, false},
      {"dram", "bandwidth", "B/s", "read and written together, all threads", &P::dram, 1e8, 100 * tera},
      {"cpu", "stream", "B/s", "a pass over gradients on the CPU, alone", &P::host_stream, 1e8, 100 * tera},
      {"cpu", "update", "parameters/s", "AdamW on the CPU, all update threads, alone", &P::cpu_update, 1e5,
       1000 * giga},
      {"cpu", "update_with_copies", "parameters/s", "the same with copies both ways running",
       &P::cpu_update_with_copies, 1e5, 1000 * giga, false},
      {"cpu", "update_cores", "1", "cores that it takes", &P::cpu_update_cores, 0.1, 4096},
      {"cpu", "update_bytes", "B/parameter", "DRAM traffic of its kernel", &P::cpu_update_bytes, 1, 1 * kilo},
      {"cpu", "core_bf16_moments", "parameters/s", "AdamW by a core out of its cache, of state with bf16 moments",
       &P::core_bf16_moments, 1e5, 1000 * giga, false},
      {"cpu", "core_8bit_moments", "parameters/s", "AdamW by a core out of its cache, of state with moments in 8 bits",
       &P::core_byte_moments, 1e5, 1000 * giga, false},
      {"disk", "bandwidth", "B/s", "files written, hashed and flushed, where the profile was kept", &P::disk, 1e5,
       10 * tera, false},
      {"disk", "cores", "1", "cores that writing them takes", &P::disk_cores, 0, 64, false},
      {"file", "read", "B/s", "a file for optimizer state, past the page cache, read alone", &P::file_read, 1e5,
       10 * tera, false},
      {"file", "write", "B/s", "the same, written alone", &P::file_write, 1e5, 10 * tera, false},
      {"file", "both_ways", "B/s", "the sum of both at once", &P::file_both_ways, 1e5, 20 * tera, false},
      {"step", "overhead", "s", "of a step, in no task", &P::step_overhead, 0, 100, false},
      {"step", "task", "s", "from ready to running", &P::task_overhead, 0, 1, false},
  };
  return fields;
}

void MachineProfile::check() const {
  for (const ProfileField& field : profile_fields()) {
    const Figure& figure = this->*field.figure;
    const std::string what =
        fmt::format("profile {}: {}.{}", name.empty() ? "without a name" : name, field.section, field.key);
    const std::string range = fmt::format("give {} to {} {}", field.least, field.most, field.unit);
    if (std::isnan(figure.value)) throw UsageError(what, "it is not a number", range);
    if (figure.value < 0.0) throw UsageError(what, fmt::format("{} {} is negative", figure.value, field.unit), range);
    if (figure.value == 0.0) {
      if (field.required && field.least > 0.0) throw UsageError(what, "missing", range);
      continue;
    }
    if (figure.value < field.least || figure.value > field.most) {
      throw UsageError(what, fmt::format("{} {} is beyond any machine", figure.value, field.unit), range);
    }
    if (!std::isfinite(figure.spread) || figure.spread < 0.0) {
      throw UsageError(what, fmt::format("its spread is {}", figure.spread), "give a share of the median, 0 or more");
    }
  }
  if (both_ways.value < least_both_ways * std::max(to_device.value, to_host.value)) {
    throw UsageError(fmt::format("profile {}: link.both_ways", name),
                     fmt::format("{} B/s is less than half of one way alone", both_ways.value),
                     "give the sum of both ways at once");
  }
}

Figure figure_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t left_out = samples.size() / 10;
  const double middle = samples[samples.size() / 2];
  const double width = samples[samples.size() - 1 - left_out] - samples[left_out];
  return {middle, middle > 0.0 ? width / middle : 0.0, "measured"};
}

Figure both_ways_of(const Figure& measured, const Figure& to_device, const Figure& to_host) {
  const Figure& faster = to_device.value < to_host.value ? to_host : to_device;
  if (measured.value >= least_both_ways * faster.value) return measured;
  return {faster.value, measured.spread, "measured, one way alone"};
}

Figure copy_dram_of(const MachineProfile& p, double beside) {
  constexpr double slower = 0.95;  // than alone, beyond doubt
  constexpr double least = 0.25, most = 4.0;
  const Figure& update = p.cpu_update_with_copies;
  const double left = p.dram.value - update.value * p.cpu_update_bytes.value;
  const bool slowed = update.value < slower * p.cpu_update.value || beside < slower * p.both_ways.value;
  if (!(beside > 0.0) || (!slowed && left >= beside)) return {1.0, 0.0, "DMA touches each byte once"};
  return {std::clamp(left / beside, least, most), update.spread, "measured, by what the CPU's update leaves"};
}

std::vector<std::string> doubts(const MachineProfile& p) {
  constexpr double wide = 0.25;
  constexpr double half_a_core = 0.5;
  std::vector<std::string> lines;
  if (p.others_busy.value > half_a_core) {
    lines.emplace_back(
        fmt::format("other programs kept {:.1f} of {:g} cores busy meanwhile: what they took of cores and "
                    "memory is missing in the rates, however steady those are",
                    p.others_busy.value, p.cores.value));
  }
  const auto slower = [](const Figure& a, const Figure& b, double share) {
    return a.known() && b.known() && a.value < share * b.value;
  };
  if (slower(p.to_device, p.to_host, 0.6) || slower(p.to_host, p.to_device, 0.6)) {
    lines.emplace_back("one way of the link is much slower than the other: a card in a narrow slot, or a busy link");
  }
  if (p.both_ways.value < 1.2 * std::max(p.to_device.value, p.to_host.value)) {
    lines.emplace_back("both ways at once are hardly faster than one: copies share something, or do not overlap");
  }
  const bool dma = p.copy_cores.value == 0.0;
  if (dma && p.pageable_to_device.known() && p.pageable_to_device.value > 0.9 * p.to_device.value) {
    lines.emplace_back("pageable copies are as fast as pinned ones: the pinned memory may not be pinned");
  }
  if (dma && p.to_device.value < 10e9) {
    lines.emplace_back(
        fmt::format("the link carries {:.1f} GB/s, less than PCIe 3 with 16 lanes: fewer lanes, or a "
                    "lower generation than the card's",
                    p.to_device.value / giga));
  }
  if (p.dram.value < p.cpu_update.value * p.cpu_update_bytes.value * 0.8) {
    lines.emplace_back("the CPU update moves more bytes than DRAM was measured to: caches held the data");
  }
  if (p.numa_nodes.value > 1 && p.by_threads.size() > 1) {
    const ThreadFigures& most = p.by_threads.back();
    const double expected = p.dram.value / p.numa_nodes.value;
    if (most.dram_copy > 0.0 && most.dram_copy < 1.3 * expected) {
      lines.emplace_back("all threads together reach the bandwidth of one memory node: memory may lie on one node");
    }
  }
  for (const ProfileField& field : profile_fields()) {
    const Figure& figure = p.*field.figure;
    if (figure.spread > wide) {
      lines.push_back(fmt::format("{}.{} varies by {:.0f}%: something else was running", field.section, field.key,
                                  100.0 * figure.spread));
    }
  }
  return lines;
}

MachineProfile with_link(MachineProfile p, double bytes_per_second) {
  const double before = p.to_device.value;
  for (Figure* figure : {&p.to_device, &p.to_host}) figure->value = std::min(figure->value, bytes_per_second);
  p.both_ways.value = std::min(p.both_ways.value, 2.0 * bytes_per_second);
  // The copying thread sleeps while the link is behind.
  p.copy_cores.value *= p.to_device.value / before;
  return p;
}

MachineProfile with_update_rate(MachineProfile p, double parameters_per_second) {
  const double before = p.cpu_update.value;
  for (Figure* figure : {&p.cpu_update, &p.cpu_update_with_copies}) {
    figure->value = std::min(figure->value, parameters_per_second);
  }
  // The updating threads sleep for the rest of the time.
  p.cpu_update_cores.value *= p.cpu_update.value / before;
  return p;
}

MachineProfile shared_by(MachineProfile p, int devices) {
  if (devices == 1) return p;  // a profile may say itself how many there are
  p.devices.value = devices;
  if (p.device_kind != "host") return p;
  const double taken = p.device_threads.known() ? p.device_threads.value : p.cores.value;
  const double shared = p.cores.known() ? std::max(1.0, devices * taken / p.cores.value) : devices;
  for (Figure* figure : {&p.matmul, &p.products_fp8, &p.attention, &p.device_bandwidth, &p.device_update,
                         &p.device_bf16_moments, &p.device_byte_moments}) {
    figure->value /= shared;
  }
  return p;
}

MachineProfile with_update_threads(MachineProfile p, int threads) {
  const double all = p.cpu_update_cores.value;
  if (threads <= 0 || threads >= all) return p;
  double share = threads / all;
  // Rates between two measured counts are interpolated.
  const ThreadFigures none{};
  const ThreadFigures* below = &none;
  for (const ThreadFigures& row : p.by_threads) {
    if (row.threads < threads) {
      below = &row;
    } else if (row.cpu_update > 0.0 && p.by_threads.back().cpu_update > 0.0) {
      const double part = static_cast<double>(threads - below->threads) / (row.threads - below->threads);
      share = (below->cpu_update + part * (row.cpu_update - below->cpu_update)) / p.by_threads.back().cpu_update;
      break;
    }
  }
  p.cpu_update.value *= std::min(1.0, share);
  p.cpu_update_cores.value = threads;
  return p;
}

MachineProfile without_overhead(MachineProfile p) {
  for (Figure* figure : {&p.launch, &p.copy_latency, &p.step_overhead, &p.task_overhead}) figure->value = 0.0;
  return p;
}

std::string difference(const MachineProfile& a, const MachineProfile& b) {
  std::string text;
  const auto compare = [&](std::string_view what, const std::string& x, const std::string& y) {
    if (x == y) return;
    text += fmt::format("{}{}: {} and {}", text.empty() ? "" : "; ", what, x.empty() ? "unknown" : x,
                        y.empty() ? "unknown" : y);
  };
  compare("CPU", a.cpu, b.cpu);
  compare("device", a.device, b.device);
  compare("driver", a.driver, b.driver);
  compare("tandem", a.version, b.version);
  return text;
}

}  // namespace tandem
