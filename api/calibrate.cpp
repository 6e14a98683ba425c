#include "api/calibrate.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <future>
#include <vector>

#include "api/copy_load.hpp"
#include "core/base/error.hpp"
#include "core/base/trace.hpp"
#include "core/base/version.hpp"
#include "core/host/cpu_time.hpp"
#include "core/host/large_copy.hpp"
#include "core/host/topology.hpp"
#include "core/memory/carver.hpp"
#include "core/numerics/random.hpp"
#include "core/ops/ops.hpp"
#include "cpu_ops/threads/parallel.hpp"
#include "cpu_ops/update/update_kernels.hpp"
#include "io/atomic_file.hpp"
#include "offload/storage/state_file.hpp"

namespace tandem {
namespace {

// Smallest working set worth measuring over.
constexpr std::size_t least_bytes = std::size_t{8} << 20;
// Largest share of the free memory of the device, and of the host, that calibration takes.
constexpr std::size_t part_of_device = 4;
constexpr std::size_t part_of_host = 8;
constexpr double kernel_bytes = 28.0;
constexpr int fewest_samples = 3;

/// Scratch for the device's ops, which forget it when the memory goes.
class LentWorkspace {
 public:
  LentWorkspace(Ops& ops, const MemoryBlock& memory) : ops_(ops) { ops_.bind_workspace(memory.data(), memory.bytes()); }
  ~LentWorkspace() { ops_.bind_workspace(nullptr, 0); }
  LentWorkspace(const LentWorkspace&) = delete;
  LentWorkspace& operator=(const LentWorkspace&) = delete;

 private:
  Ops& ops_;
};

/// The CPU's update while copies go both ways, and those.
struct BesideCopies {
  Figure update;
  double copies = 0.0;  ///< bytes a second, both ways together
};

Figure counted(double value) { return {value, 0.0, "read from the system"}; }

MachineProfile identify(const Topology& machine, const Device& device) {
  MachineProfile profile;
  profile.name = "this machine";
  profile.cpu = machine.cpu_model;
  profile.device_kind = device.info().kind;
  profile.device = device.info().name;
  profile.driver = device.info().compute_key;
  profile.version = version;
  return profile;
}

class Calibration {
 public:
  Calibration(const Topology& machine, Device& device, const CalibrationOptions& options)
      : device_(device), options_(options), profile_(identify(machine, device)), host_(device.info().kind == "host") {
    const std::size_t room = device.info().capacity - std::min(device.info().capacity, device.allocated_bytes());
    bytes_ = calibrated_bytes(machine, device.info().cache_bytes, room, options.working_set);
    count_machine(machine);
    on_device_ = device.allocate(bytes_, "calibration");
    on_host_ = device.allocate_pinned(bytes_, "calibration");
    std::memset(on_host_.data(), 0, bytes_);
    up_ = device.make_stream("calibration up");
    down_ = device.make_stream("calibration down");
    device.fill_zero(on_device_.data(), bytes_, up_);
    device.synchronize(up_);
  }

  MachineProfile run() {
    measure_link();
    measure_host();
    measure_device();
    measure_disk();
    measure_file();
    return profile_;
  }

 private:
  /// Rate of `work`, which does `amount` and returns when it is done: median of samples over the time allowed.
  template <class Work>
  Figure rate(std::string_view what, double amount, Work work) {
    if (options_.progress && !what.empty()) options_.progress(what);
    work();  // first touches and lazy set-ups do not count
    std::vector<double> samples;
    const double begin = trace_now();
    while (static_cast<int>(samples.size()) < fewest_samples || trace_now() - begin < options_.seconds_per_figure) {
      const double since = trace_now();
      work();
      samples.push_back(amount / std::max(1e-9, trace_now() - since));
    }
    return figure_of(std::move(samples));
  }
  /// Rate of work that `queue` puts on `up_`, `amount` for each call. A GPU gets several calls at a time, as in a run:
  /// waiting for each one would leave it idle for as long as some of them take.
  template <class Queue>
  Figure queued_rate(std::string_view what, double amount, Queue queue) {
    const auto queued = [&](int times) {
      for (int i = 0; i < times; ++i) queue();
      device_.synchronize(up_);
    };
    if (host_) return rate(what, amount, [&] { queued(1); });
    if (options_.progress) options_.progress(what);
    queued(1);  // plans, and code that is loaded when it is first used
    const double since = trace_now();
    queued(1);
    constexpr double of_a_sample = 0.005;
    constexpr double most = 50.0;
    const int times = static_cast<int>(std::clamp(of_a_sample / (trace_now() - since), 1.0, most));
    return rate({}, amount * times, [&] { queued(times); });
  }
  template <class Work>
  Figure seconds_each(std::string_view what, int count, Work work) {
    Figure figure = rate(what, count, work);
    figure.value = 1.0 / figure.value;
    return figure;
  }

  void count_machine(const Topology& machine);
  void measure_link();
  void measure_host();
  void measure_threads(int threads);
  void measure_device();
  void measure_products();
  void measure_fp8_products(std::int64_t n, std::int64_t c, std::int64_t o, double product);
  void measure_attention(std::int64_t n, std::int64_t c, DType type);
  MemoryBlock scratch_of(const WorkspaceNeeds& needs);
  void fill_operands(std::size_t bytes, const Stream& stream);
  void measure_disk();
  void measure_file();
  Figure update_rate(std::string_view what, UpdateKernels& kernels);
  BesideCopies update_rate_with_copies(std::string_view what, UpdateKernels& kernels);
  AdamPiece piece_in(MemoryBlock& block) const;
  Figure core_rate(std::string_view what, StateFormat format);
  Figure device_rate(std::string_view what, StateFormat format);

  template <class T>
  T* device_at(std::size_t elements) {
    return static_cast<T*>(on_device_.data()) + elements;
  }

  Device& device_;
  const CalibrationOptions& options_;
  MachineProfile profile_;
  bool host_;
  std::size_t bytes_ = 0;
  MemoryBlock on_device_;
  MemoryBlock on_host_;
  Stream up_;
  Stream down_;
};

void Calibration::count_machine(const Topology& topology) {
  profile_.devices = counted(1);
  profile_.cores = counted(std::max(1, topology.logical_cpus));
  profile_.numa_nodes = counted(std::max(1, topology.numa_nodes));
  profile_.host_memory = counted(static_cast<double>(topology.memory_bytes));
  profile_.device_memory = counted(static_cast<double>(device_.info().capacity + device_.info().reserved));
  profile_.device_threads = counted(host_ ? std::min<double>(device_.info().threads, profile_.cores.value) : 0.0);
}

void Calibration::measure_link() {
  const std::size_t half = bytes_ / 2;
  const auto up = [&](const void* from) {
    copy_in_pieces(device_, on_device_.data(), from, half, CopyKind::host_to_device, up_);
  };
  const auto down = [&](void* to) {
    copy_in_pieces(device_, to, device_at<std::byte>(half), half, CopyKind::device_to_host, down_);
  };
  std::byte* lower = static_cast<std::byte*>(on_host_.data());
  std::byte* upper = lower + half;
  const auto amount = static_cast<double>(half);
  profile_.to_device = rate("copies to the device", amount, [&] {
    up(lower);
    device_.synchronize(up_);
  });
  profile_.to_host = rate("copies to the host", amount, [&] {
    down(upper);
    device_.synchronize(down_);
  });
  const Figure both = rate("copies both ways", 2.0 * amount, [&] {
    up(lower);
    down(upper);
    device_.synchronize(up_);
    device_.synchronize(down_);
  });
  profile_.both_ways = both_ways_of(both, profile_.to_device, profile_.to_host);
  std::vector<std::byte> pageable(half);
  profile_.pageable_to_device = rate("pageable copies to the device", amount, [&] {
    up(pageable.data());
    device_.synchronize(up_);
  });
  profile_.pageable_to_host = rate("pageable copies to the host", amount, [&] {
    down(pageable.data());
    device_.synchronize(down_);
  });
  constexpr int copies = 200;
  profile_.copy_latency = seconds_each("small copies", copies, [&] {
    for (int i = 0; i < copies; ++i) {
      device_.copy(on_device_.data(), lower, arena_alignment, CopyKind::host_to_device, up_);
    }
    device_.synchronize(up_);
  });
  if (!host_) return;
  const Figure raw = rate("copies by one core", amount, [&] {
    in_pieces(half, [&](std::size_t at, std::size_t count) { large_copy(pageable.data() + at, lower + at, count); });
  });
  profile_.copy_cores = {std::min(1.0, profile_.to_device.value / raw.value), 0.0, "link over one core's copies"};
}

/// State, gradient and weights in a block.
AdamPiece Calibration::piece_in(MemoryBlock& block) const {
  const auto count =
      static_cast<std::int64_t>(bytes_ / calibrated_bytes_of_parameter) / layout_quantum * layout_quantum;
  float* base = static_cast<float*>(block.data());
  auto* half = reinterpret_cast<bf16*>(base + 3 * count);
  return {{base, base + count, base + 2 * count}, half, half + count, count};
}

AdamCoefficients some_coefficients() { return numerics::adam_coefficients(AdamW{}, 1, 1e-3, 1.0, true); }

Figure Calibration::update_rate(std::string_view what, UpdateKernels& kernels) {
  const AdamPiece piece = piece_in(on_host_);
  const AdamCoefficients c = some_coefficients();
  return rate(what, static_cast<double>(piece.count), [&] { kernels.adamw(piece, c); });
}

BesideCopies Calibration::update_rate_with_copies(std::string_view what, UpdateKernels& kernels) {
  // The copies run over memory of their own while the updates are timed.
  MemoryBlock memory = device_.allocate_pinned(bytes_ / 8 * 2, "calibration, copies");
  const std::size_t part = memory.bytes() / 2;
  auto* const own = static_cast<std::byte*>(memory.data());
  CopyLoad copies(device_, {own, on_device_.data(), device_at<std::byte>(bytes_ / 2), own + part, part}, up_, down_);
  const Figure update = update_rate(what, kernels);
  return {update, copies.end()};
}

void Calibration::measure_threads(int threads) {
  const std::shared_ptr<Parallel> parallel = make_parallel(threads);
  ThreadFigures& row = profile_.by_threads.emplace_back();
  row.threads = threads;
  constexpr std::size_t chunk = std::size_t{1} << 20;
  const std::size_t half = bytes_ / 2;
  std::byte* lower = static_cast<std::byte*>(on_host_.data());
  const auto chunks = static_cast<std::int64_t>(half / chunk);
  const double amount = static_cast<double>(chunks) * static_cast<double>(chunk);
  const std::string with = fmt::format("{} thread{}", threads, threads == 1 ? "" : "s");
  const Figure copy = rate(fmt::format("DRAM, {}", with), 2.0 * amount, [&] {
    parallel->run(chunks, [&](std::int64_t i) {
      const std::size_t at = static_cast<std::size_t>(i) * chunk;
      std::memcpy(lower + half + at, lower + at, chunk);
    });
  });
  const std::unique_ptr<UpdateKernels> kernels = make_host_update_kernels(parallel);
  std::vector<double> blocks(half / 2 / layout_quantum + 1);
  const auto elements = static_cast<std::int64_t>(half / 2);
  const Figure read = rate(fmt::format("reading, {}", with), static_cast<double>(half), [&] {
    kernels->norm_blocks(reinterpret_cast<const bf16*>(lower), elements, blocks.data());
  });
  row.dram_copy = copy.value;
  row.dram_read = read.value;
  row.cpu_update = update_rate(fmt::format("CPU update, {}", with), *kernels).value;
  row.cpu_update_with_copies =
      update_rate_with_copies(fmt::format("CPU update beside copies, {}", with), *kernels).update.value;
  if (copy.value > profile_.dram.value) profile_.dram = copy;
  if (read.value > profile_.host_stream.value) profile_.host_stream = read;
}

void Calibration::measure_host() {
  const int all = std::max(1, device_.host_kernels().threads());
  for (int threads = 1; threads < all; threads *= 2) measure_threads(threads);
  measure_threads(all);
  profile_.cpu_update = update_rate("CPU update", device_.host_kernels());
  const BesideCopies beside = update_rate_with_copies("CPU update beside copies", device_.host_kernels());
  profile_.cpu_update_with_copies = beside.update;
  profile_.cpu_update_cores = {std::min<double>(all, profile_.cores.value), 0.0, "threads of the CPU update"};
  profile_.cpu_update_bytes = {kernel_bytes, 0.0, "state read and written, gradient read, weight written"};
  // The update's own traffic may be more than a copy reaches: reads and writes mixed otherwise.
  const double by_update = profile_.cpu_update.value * kernel_bytes;
  if (by_update > profile_.dram.value)
    profile_.dram = {by_update, profile_.cpu_update.spread, "measured, by the update"};
  // A device made of the host's cores copies by one of them, which reads and writes DRAM.
  profile_.copy_dram = host_ ? Figure{2.0, 0.0, "a copy reads and writes"} : copy_dram_of(profile_, beside.copies);
  profile_.core_bf16_moments = core_rate("CPU update, bf16 moments", StateFormat::bf16_moments);
  profile_.core_byte_moments = core_rate("CPU update, 8-bit moments", StateFormat::byte_moments);
  constexpr int calls = 50;
  AdamPiece small = piece_in(on_host_);
  small.count = layout_quantum;
  const AdamCoefficients c = some_coefficients();
  profile_.task_overhead = seconds_each("small updates", calls, [&] {
    for (int i = 0; i < calls; ++i) device_.host_kernels().adamw(small, c);
  });
}

/// State of values as a run has them, small enough for a core's cache.
class CachedState {
 public:
  explicit CachedState(StateFormat format) : format_(format), gradient_(elements), weight_(elements) {
    master_.resize(master_bytes(format, elements));
    m_.resize(m_bytes(format, elements));
    v_.resize(v_bytes(format, elements));
    for (std::size_t i = 0; i < gradient_.size(); ++i) {
      const auto x = static_cast<float>(numerics::philox_block(1, 0, i).word[0]) * 0x1p-32F;
      gradient_[i] = numerics::round_to_bf16(x - 0.5F);
    }
  }
  AdamPiece piece() {
    return {{master_.data(), m_.data(), v_.data()}, gradient_.data(), weight_.data(), elements, format_};
  }

  static constexpr std::int64_t elements = 8 * layout_quantum;

 private:
  StateFormat format_;
  std::vector<std::byte> master_, m_, v_;
  std::vector<bf16> gradient_, weight_;
};

/// Rate of one core while all are at work, over state that stays in its cache: the arithmetic of a format without the
/// memory. Drawing random bits can keep a few cores short of instructions before memory is the limit.
Figure Calibration::core_rate(std::string_view what, StateFormat format) {
  Parallel& parallel = device_.host_kernels().parallel();
  const int threads = std::max(1, parallel.threads());
  std::vector<CachedState> states(static_cast<std::size_t>(threads), CachedState(format));
  const AdamCoefficients c = some_coefficients();
  constexpr int updates = 400;  // milliseconds: it takes a worker a while to come
  return rate(what, static_cast<double>(updates * CachedState::elements), [&] {
    parallel.run(threads, [&](std::int64_t i) {
      const AdamPiece piece = states[static_cast<std::size_t>(i)].piece();
      for (int u = 0; u < updates; ++u) adamw_with(best_isa(), piece, c);
    });
  });
}

Figure Calibration::device_rate(std::string_view what, StateFormat format) {
  AdamPiece piece = piece_in(on_device_);  // holds fp32 state, the largest format
  piece.format = format;
  device_.fill_zero(on_device_.data(), bytes_, up_);  // the bytes that one format left are not valid state of another
  const AdamCoefficients c = some_coefficients();
  return queued_rate(what, static_cast<double>(piece.count), [&] { device_.ops().adamw(piece, c, up_); });
}

void Calibration::measure_device() {
  float* base = device_at<float>(0);
  profile_.device_bf16_moments = device_rate("device update, bf16 moments", StateFormat::bf16_moments);
  profile_.device_byte_moments = device_rate("device update, 8-bit moments", StateFormat::byte_moments);
  profile_.device_update = device_rate("device update", StateFormat::fp32);
  // An addition of tensors reads two and writes one.
  const auto third = static_cast<std::int64_t>(bytes_ / 12);
  const auto row = [&](int i) { return TensorView{base + i * third, DType::f32, {third}}; };
  profile_.device_bandwidth = queued_rate("device memory", 12.0 * static_cast<double>(third),
                                          [&] { device_.ops().add(row(0), row(1), row(2), up_); });
  constexpr int launches = 200;
  profile_.launch = seconds_each("small kernels", launches, [&] {
    const TensorView one{base, DType::f32, {256}};
    for (int i = 0; i < launches; ++i) device_.ops().add(one, one, one, up_);
    device_.synchronize(up_);
  });
  measure_products();
}

/// Values as a run has them in the device's first bytes: a GPU multiplies zeros faster, as they take less power. Each
/// is a bf16 of magnitude 2^-4 to 1, and so is each pair as fp32.
void Calibration::fill_operands(std::size_t bytes, const Stream& stream) {
  constexpr std::uint64_t seed = 1;
  constexpr std::uint32_t least = 0x3d803d80U, exponents = 0x01800180U, signs_and_mantissas = 0x807f807fU;
  const std::size_t piece = std::min(bytes, std::size_t{16} << 20);
  auto* const words = static_cast<std::uint32_t*>(on_host_.data());
  device_.host_kernels().parallel().run(
      static_cast<std::int64_t>(piece / sizeof(numerics::Philox128)), [&](std::int64_t i) {
        const numerics::Philox128 random = numerics::philox_block(seed, 0, static_cast<std::uint64_t>(i));
        for (std::size_t w = 0; w < 4; ++w) {
          words[4 * static_cast<std::size_t>(i) + w] =
              (random.word[w] & signs_and_mantissas) | (least + (random.word[w] & exponents));
        }
      });
  for (std::size_t at = 0; at < bytes; at += piece) {
    device_.copy(device_at<std::byte>(at), words, std::min(piece, bytes - at), CopyKind::host_to_device, stream);
  }
}

/// Operands of linear layers: n tokens, c channels in, 4c out on the host and 2c on a GPU, where the operands of a
/// large model must fit into the smallest working set. Gradients of weights are bf16, as blocks write them.
struct LinearOperands {
  TensorView x, dx, y, dw, w;
  std::size_t bytes = 0;  ///< bytes of all operands together
};

LinearOperands take_linear(Carver carver, std::int64_t n, std::int64_t c, DType type) {
  const std::int64_t o = type == DType::f32 ? 4 * c : 2 * c;
  const TensorView x = carver.take(type, {n, c}), dx = carver.take(type, {n, c}), y = carver.take(type, {n, o});
  const TensorView dw = carver.take(DType::bf16, {o, c}), w = carver.take(DType::bf16, {o, c});
  return {x, dx, y, dw, w, carver.bytes()};
}

/// Shapes of a layer of a small model on the host's cores, of a large one elsewhere, with which a GPU shows what it is
/// capable of; as large as fits.
void Calibration::measure_products() {
  Ops& ops = device_.ops();
  const DType type = host_ ? DType::f32 : DType::bf16;
  std::int64_t n = host_ ? 256 : 2048;
  std::int64_t c = host_ ? 768 : 4096;
  while (take_linear(Carver(nullptr), n, c, type).bytes > bytes_) {
    n = std::max<std::int64_t>(16, n / 2);
    c /= 2;
  }
  const LinearOperands of = take_linear(Carver(on_device_.data()), n, c, type);
  const std::int64_t o = of.y.shape[1];
  const MemoryBlock workspace = scratch_of({n, n, 1, o, 0, 0, 0, type});
  const LentWorkspace lent(ops, workspace);
  fill_operands(of.bytes, up_);
  const double product = 2.0 * static_cast<double>(n) * static_cast<double>(c) * static_cast<double>(o);
  profile_.matmul = queued_rate("matrix products", 3.0 * product, [&] {
    ops.linear(of.x, of.w, {}, of.y, up_);
    ops.linear_backward_input(of.y, of.w, of.dx, false, up_);
    ops.linear_backward_weight(of.y, of.x, of.dw, {}, up_);
  });
  measure_fp8_products(n, c, o, product);
  measure_attention(n, c, type);
}

/// Products of eight-bit factors, which are quantized once before. On the host's cores they are those of bf16.
void Calibration::measure_fp8_products(std::int64_t n, std::int64_t c, std::int64_t o, double product) {
  Ops& ops = device_.ops();
  if (host_ || !ops.has_fp8() || c % fp8_multiple != 0) return;
  Carver carver(on_device_.data());
  const TensorView values = carver.take(DType::bf16, {std::max(n, c), o}), dx = carver.take(DType::bf16, {n, c});
  const TensorView y = carver.take(DType::bf16, {n, o}), dw = carver.take(DType::bf16, {o, c});
  const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
    const std::size_t bytes = align_up(ops.fp8_bytes(rows, columns, Fp8Sums::both));
    const TensorView memory = carver.take(DType::f32, {static_cast<std::int64_t>(bytes / sizeof(float))});
    return Fp8Matrix{memory.data, rows, columns, Fp8Sums::both};
  };
  const Fp8Matrix x = matrix(n, c), w = matrix(o, c), dy = matrix(n, o);
  if (carver.bytes() > bytes_) return;
  fill_operands(values.bytes(), up_);
  for (const Fp8Matrix& m : {x, w, dy}) {
    ops.quantize(TensorView{values.data, DType::bf16, {m.rows, m.columns}}, m, up_);
  }
  profile_.products_fp8 = queued_rate("products of eight-bit factors", 3.0 * product, [&] {
    ops.fp8_linear(x, w, Fp8Accumulation::full, {}, {}, y, up_);
    ops.fp8_backward_input(dy, w, Fp8Accumulation::full, dx, false, up_);
    ops.fp8_backward_weight(dy, x, Fp8Accumulation::full, dw, up_);
  });
}

/// Forward and backward together, as a model's attention is: n tokens, heads of c channels.
void Calibration::measure_attention(std::int64_t n, std::int64_t c, DType type) {
  Ops& ops = device_.ops();
  const std::int64_t head_dim = host_ ? 64 : 128;
  const std::int64_t heads = std::max<std::int64_t>(1, c / head_dim), width = heads * head_dim;
  Carver carver(on_device_.data());
  enum { q, k, v, out, dout, dq, dk, dv, operands };
  std::array<TensorView, operands> of{};
  for (TensorView& operand : of) operand = carver.take(type, {1, n, width});
  const TensorView lse = carver.take(DType::f32, {1, heads, n});
  const MemoryBlock workspace = scratch_of({n, n, 1, width, heads, heads, head_dim, type});
  const LentWorkspace lent(ops, workspace);
  fill_operands(carver.bytes(), up_);
  const AttentionShape shape{1, n, heads, heads, head_dim, 0.125F};
  const auto view = [&](int operand) { return HeadsView{of[static_cast<std::size_t>(operand)].data, type, width}; };
  // Two products of (n, n) with each head, and five backward, of which a causal mask leaves half.
  const double flops = 7.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(width);
  profile_.attention = queued_rate("attention", flops, [&] {
    ops.attention(view(q), view(k), view(v), of[out], lse, shape, up_);
    ops.attention_backward(of[dout], view(q), view(k), view(v), of[out], lse, view(dq), view(dk), view(dv), shape, up_);
  });
}

/// Scratch for the device's ops, at least a byte.
MemoryBlock Calibration::scratch_of(const WorkspaceNeeds& needs) {
  return device_.allocate(std::max<std::size_t>(1, device_.ops().workspace_bytes(needs)), "calibration");
}

/// Measures the disk as a checkpoint is written: hashed on its way, flushed at its end.
void Calibration::measure_disk() {
  if (options_.disk_folder.empty()) return;
  if (options_.progress) options_.progress("disk");
  constexpr std::size_t file_bytes = std::size_t{64} << 20;
  const std::size_t bytes = std::min(bytes_, file_bytes);
  create_directories_or_throw(options_.disk_folder);
  const std::filesystem::path file = options_.disk_folder / fmt::format(".calibration-{}", ::getpid());
  const Unfinished guard(file);
  std::vector<double> rates;
  std::vector<double> cores;
  while (static_cast<int>(rates.size()) < fewest_samples) {
    const double began = trace_now();
    const double cpu = thread_cpu_seconds();
    FileWriter writer(file, system_files(), way_of_file(bytes));
    writer.write(on_host_.data(), bytes);
    writer.finish();
    const double seconds = std::max(1e-9, trace_now() - began);
    rates.push_back(static_cast<double>(bytes) / seconds);
    cores.push_back(std::min(1.0, (thread_cpu_seconds() - cpu) / seconds));
  }
  profile_.disk = figure_of(std::move(rates));
  profile_.disk_cores = figure_of(std::move(cores));
}

/// Measures a file of state as a run uses it, one way and both at once: past the page cache, a piece at a time.
void Calibration::measure_file() {
  if (options_.state_folder.empty()) return;
  constexpr std::size_t piece = std::size_t{4} << 20;
  constexpr std::size_t pieces = 16;
  StateFile file(options_.state_folder, 2 * pieces * piece);
  const auto memory = [&](std::size_t i) { return static_cast<std::byte*>(on_host_.data()) + i * piece; };
  const auto for_pieces = [&](std::size_t first, auto move) {
    for (std::size_t i = first; i < first + pieces; ++i) move(i * piece);
  };
  const auto write = [&](std::size_t first) {
    for_pieces(first, [&](std::uint64_t at) { file.write_blocks(at, {memory(0), piece}); });
  };
  const auto read = [&](std::size_t first) {
    for_pieces(first, [&](std::uint64_t at) { file.read_blocks(at, {memory(1), piece}); });
  };
  constexpr auto amount = static_cast<double>(pieces * piece);
  write(pieces);  // this round reads one part while it writes another
  profile_.file_write = rate("a file for state, written", amount, [&] { write(0); });
  profile_.file_read = rate("a file for state, read", amount, [&] { read(0); });
  profile_.file_both_ways = rate("a file for state, both ways", 2 * amount, [&] {
    auto reading = std::async(std::launch::async, read, pieces);
    write(0);
    reading.get();
  });
}

}  // namespace

std::size_t calibrated_bytes(const Topology& machine, std::size_t device_cache, std::size_t room,
                             std::size_t working_set) {
  constexpr std::size_t usual = std::size_t{256} << 20;
  constexpr std::size_t beyond_caches = 4;
  const std::size_t most = std::max(usual, beyond_caches * std::max(machine.cache_bytes, device_cache));
  const std::size_t wanted = working_set > 0 ? std::clamp(working_set, usual, most) : most;
  if (room / part_of_device < least_bytes) {
    throw PlanError("calibration does not fit", fmt::format("{} are free on the device", format_bytes(room)),
                    fmt::format("it needs {} of --device-memory", format_bytes(part_of_device * least_bytes)));
  }
  std::size_t bytes = std::min(wanted, room / part_of_device);
  if (const std::size_t available = machine.available_memory_bytes; available > 0) {
    if (available / part_of_host < least_bytes) {
      throw PlanError("calibration does not fit",
                      fmt::format("{} of the host's memory are free", format_bytes(available)),
                      fmt::format("it needs {}", format_bytes(part_of_host * least_bytes)));
    }
    bytes = std::min(bytes, available / part_of_host);
  }
  return bytes / arena_alignment * arena_alignment;
}

MachineProfile identify(const Device& device) { return identify(read_topology(), device); }

MachineProfile calibrate(Device& device, const CalibrationOptions& options) {
  const OthersAtWork others;
  MachineProfile profile = Calibration(read_topology(), device, options).run();
  if (const auto cores = others.cores()) profile.others_busy = {*cores, 0.0, "measured"};
  profile.check();
  return profile;
}

}  // namespace tandem
