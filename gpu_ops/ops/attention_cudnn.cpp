// Attention by cuDNN's fused kernels, found when it is first asked for. The library is loaded and not linked, so that
// the program starts where it is missing. Its graphs are described through the cudnn-frontend, whose headers compile
// slowly and are included here alone.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include "gpu_ops/ops/attention_cudnn.hpp"

#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/base/attention.hpp"
#include "gpu_ops/base/scratch.hpp"
#include "gpu_ops/device/library_file.hpp"
#include "gpu_ops/device/runtime.hpp"
#include "gpu_ops/device/shared_library.hpp"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // library in which the frontend looks up functions
}

namespace tandem::gpu {
namespace {

namespace fe = cudnn_frontend;

/// Since this version the backward is deterministic on every card of ours, and a sequence that is no multiple of 128
/// needs no lengths copied from the host in each call.
constexpr std::size_t oldest_version = 91800;
static_assert(CUDNN_VERSION >= oldest_version, "the build looks for headers of no older version");

std::string version_text(std::size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

// -- the library ---------------------------------------------------------------------------------------------------

/// The library is a front, and opens what it consists of by these names: first where LD_LIBRARY_PATH says, and then
/// beside itself.
std::string part_name(std::string_view part) { return fmt::format("libcudnn_{}.so.{}", part, CUDNN_MAJOR); }

std::size_t told_version(const SharedLibrary& library) {
  const auto version = library.function<decltype(cudnnGetVersion)>("cudnnGetVersion");
  return version == nullptr ? 0 : version();
}

/// Version of a library of cuDNN, read from the file of its first part where that has it, a byte for each number. The
/// library itself would load that part to answer, for good, and each library tried later would find the part by its
/// name and answer by it.
std::size_t version_of(const SharedLibrary& library) {
  const std::uint32_t packed =
      exported_number(library.neighbour(part_name("graph")), "cudnn_graph_version").value_or(0);
  if (packed >> 16 == CUDNN_MAJOR) return CUDNN_MAJOR * 10000 + (packed >> 8 & 0xff) * 100 + (packed & 0xff);
  return told_version(library);
}

/// The cuDNN library of this process, looked for once.
class Library {
 public:
  static Library& get() {
    static Library found;
    return found;
  }
  /// "" while it can be used.
  std::string why_not() const {
    const std::lock_guard lock(mutex_);
    return why_not_;
  }
  void refuse(std::string why) {
    const std::lock_guard lock(mutex_);
    why_not_ = std::move(why);
  }
  std::size_t version() const noexcept { return version_; }
  /// "13.0", of NVRTC.
  const std::string& compiler() const noexcept { return compiler_; }

 private:
  Library() {
    const std::string name = fmt::format("libcudnn.so.{}", CUDNN_MAJOR);
    const auto found = SharedLibrary::find({name}, [this](const SharedLibrary& library) { return accepts(library); });
    if (!found) {
      if (why_not_.empty()) why_not_ = missing(name);
      return;
    }
    // LD_LIBRARY_PATH may lead it to the parts of one that was refused.
    if (!std::exchange(why_not_, {}).empty()) load_parts(*found);
    // The version is the library's own word: the program may have loaded parts of another before.
    version_ = told_version(*found);
    if (version_ < oldest_version) {
      why_not_ = too_old(*found, version_);
      return;
    }
    load_compiler(*found);
    fe::cudnn_dlhandle = found->native();
  }

  static std::string missing(const std::string& name) {
    return fmt::format("{} is neither in the system, nor in Python's packages, nor in TANDEM_CUDA_LIBS", name);
  }
  static std::string too_old(const SharedLibrary& library, std::size_t version) {
    return fmt::format("{} is cuDNN {}, {} or later is needed", library.file(), version_text(version),
                       version_text(oldest_version));
  }

  /// Whether the library is new enough. Of several that are too old, the error names the newest.
  bool accepts(const SharedLibrary& library) {
    const std::size_t version = version_of(library);
    if (version >= oldest_version) return true;
    if (why_not_.empty() || version > version_) {
      version_ = version;
      why_not_ = too_old(library, version);
    }
    return false;
  }

  /// Loads the parts of cuDNN that attention takes, each after those that it needs.
  static void load_parts(const SharedLibrary& cudnn) {
    for (const char* part : {"graph", "ops", "heuristic", "engines_precompiled", "engines_runtime_compiled"}) {
      cudnn.load_neighbour(part_name(part));
    }
  }

  /// cuDNN compiles attention's kernels by NVRTC, of the CUDA version that it was built with, and looks for that in the
  /// system and beside itself. Once loaded it is found by its name, wherever it lay; what it makes may change a bit.
  void load_compiler(const SharedLibrary& cudnn) {
    const auto built_with = cudnn.function<decltype(cudnnGetCudartVersion)>("cudnnGetCudartVersion");
    const std::string name = fmt::format("libnvrtc.so.{}", (built_with ? built_with() : CUDART_VERSION) / 1000);
    const auto found = SharedLibrary::find({name});
    if (!found) {
      why_not_ = fmt::format("cuDNN {} compiles its kernels by NVRTC: {}", version_text(version_), missing(name));
      return;
    }
    int major = 0, minor = 0;
    if (const auto version = found->function<int(int*, int*)>("nvrtcVersion")) version(&major, &minor);
    compiler_ = fmt::format("{}.{}", major, minor);
    // NVRTC opens what its compiler brings along by its bare name when it first compiles. That of Python's packages
    // does not look in its own folder, and every plan would fail.
    found->load_neighbour(fmt::format("libnvrtc-builtins.so.{}", compiler_));
  }

  mutable std::mutex mutex_;
  std::string why_not_;
  std::size_t version_ = 0;
  std::string compiler_;
};

/// Whether a failure says that the library does not take the graph, now or ever, rather than that something broke.
bool unsupported(const fe::error_t& error) {
  if (error.code == fe::error_code_t::GRAPH_NOT_SUPPORTED) return true;
  for (const char* broken : {"EXECUTION_FAILED", "INTERNAL_ERROR", "ALLOC", "NOT_INITIALIZED", "MAPPING_ERROR"}) {
    if (error.err_msg.find(broken) != std::string::npos) return false;
  }
  return error.code == fe::error_code_t::HEURISTIC_QUERY_FAILED ||
         error.code == fe::error_code_t::GRAPH_EXECUTION_PLAN_CREATION_FAILED ||
         error.err_msg.find("NOT_SUPPORTED") != std::string::npos;
}

[[noreturn]] void fail(const char* what, const std::string& why) {
  throw DeviceError(fmt::format("attention: cuDNN failed to {}", what),
                    why.substr(0, std::min(why.find('\n'), std::size_t{200})));
}

/// Calls of the frontend throw what is not an error of ours.
template <class Body>
auto guarded(const char* what, const Body& body) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(what, error.what());
  }
}

/// Says that the device is lost where that is why something failed.
template <class Body>
auto unless_lost(CUstream_st* stream, const Body& body) {
  try {
    return body();
  } catch (const DeviceError&) {
    runtime::require_alive(stream, "attention");
    throw;
  }
}

// -- graphs --------------------------------------------------------------------------------------------------------

using Graph = fe::graph::Graph;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;

/// A plan that can be run, or why there is none.
struct Prepared {
  std::unique_ptr<Graph> graph;
  std::int64_t index = 0;  ///< the plan's index
  AttentionPlan plan;
};

void describe(fe::graph::Tensor_attributes& tensor, AttentionOperand operand, const HeadsTensor& layout) {
  tensor.set_uid(operand)
      .set_dim({layout.dims.begin(), layout.dims.end()})
      .set_stride({layout.strides.begin(), layout.strides.end()})
      .set_data_type(operand == of_lse ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16);
}

TensorPtr input(Graph& graph, AttentionOperand operand, const HeadsTensor& layout) {
  fe::graph::Tensor_attributes tensor;
  describe(tensor, operand, layout);
  return graph.tensor(tensor);
}

void output(const TensorPtr& tensor, AttentionOperand operand, const HeadsTensor& layout) {
  describe(*tensor, operand, layout);
  tensor->set_output(true);
}

/// Each query sees the keys up to its own: a band from the top left that ends at the diagonal. A left bound keeps what
/// has key + bound > query: it counts the query's own position, as a window does.
template <class Attributes>
Attributes causal(const AttentionShape& shape) {
  Attributes attributes;
  attributes.set_name("attention")
      .set_attn_scale(shape.scale)
      .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
  if (shape.windowed()) attributes.set_diagonal_band_left_bound(static_cast<int>(shape.reach()));
  return attributes;
}

/// Elements from token to token of what holds all query heads and nothing else.
std::int64_t dense(const AttentionShape& shape) { return shape.heads * shape.head_dim; }

void describe(Graph& graph, const AttentionSlice& slice) {
  const AttentionShape& shape = slice.shape;
  const std::int64_t batch = slice.slices.batch, kv_heads = slice.slices.kv_heads;
  const std::int64_t heads = kv_heads * shape.group();
  const auto queries = [&](std::int64_t row) { return heads_tensor(shape, batch, heads, row); };
  const auto keys = [&](std::int64_t row) { return heads_tensor(shape, batch, kv_heads, row); };
  const HeadsTensor statistics = statistics_tensor(shape, batch, heads);
  const TensorPtr q = input(graph, of_q, queries(slice.q_row)), k = input(graph, of_k, keys(slice.k_row)),
                  v = input(graph, of_v, keys(slice.v_row));
  if (!slice.backward) {
    auto attributes = causal<fe::graph::SDPA_attributes>(shape);
    const auto [out, lse] = graph.sdpa(q, k, v, attributes.set_generate_stats(true));
    output(out, of_out, queries(dense(shape)));
    output(lse, of_lse, statistics);
    return;
  }
  const TensorPtr out = input(graph, of_out, queries(dense(shape))),
                  dout = input(graph, of_dout, queries(dense(shape)));
  auto attributes = causal<fe::graph::SDPA_backward_attributes>(shape);
  const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, input(graph, of_lse, statistics),
                                                attributes.set_deterministic_algorithm(true));
  output(dq, of_dq, queries(slice.dq_row));
  output(dk, of_dk, keys(slice.dk_row));
  output(dv, of_dv, keys(slice.dv_row));
}

std::vector<std::int64_t> operands_of(bool backward) {
  if (!backward) return {of_q, of_k, of_v, of_out, of_lse};
  return {of_q, of_k, of_v, of_out, of_lse, of_dout, of_dq, of_dk, of_dv};
}

std::size_t granted_workspace(const AttentionSlice& slice) {
  return slice.backward ? backward_workspace(slice.shape, slice.slices.batch, slice.slices.kv_heads)
                        : forward_workspace;
}

/// Card that the library plans for: a handle of the device that is there, or the description of another.
struct Card {
  cudnnHandle_t handle = nullptr;
  int sm = 0;
  std::shared_ptr<const fe::DeviceProperties> properties;  ///< in place of a handle
};

/// The first plan of the library's heuristic that is deterministic and needs no more than it is granted: never a
/// measurement, so that the choice is a function of slice, card and version.
fe::error_t choose(Prepared& prepared, std::size_t granted) {
  Graph& graph = *prepared.graph;
  graph.deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
  fe::error_t refusal{fe::error_code_t::GRAPH_NOT_SUPPORTED, "it has no deterministic engine for it"};
  for (std::int64_t i = 0; i < graph.get_execution_plan_count(); ++i) {
    if (const fe::error_t built = graph.build_plan_at_index(i); built.is_bad()) {
      if (!unsupported(built)) return built;
      continue;
    }
    const std::int64_t bytes = graph.get_workspace_size_plan_at_index(i);
    if (bytes < 0 || static_cast<std::size_t>(bytes) > granted) {
      refusal.err_msg =
          fmt::format("its engine asks for {} of workspace", format_bytes(static_cast<std::size_t>(bytes)));
      continue;
    }
    prepared.index = i;
    prepared.plan.workspace = static_cast<std::size_t>(bytes);
    if (fe::error_t error = graph.prepare_variant_pack_template(); error.is_bad()) return error;
    return graph.get_plan_name_at_index(i, prepared.plan.engine);
  }
  return refusal;
}

fe::error_t build(Prepared& prepared, const AttentionSlice& slice, const Card& card) {
  Graph& graph = *prepared.graph;
  graph.set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  graph.set_sm_version(card.sm);
  if (card.properties) graph.set_device_properties(card.properties);
  describe(graph, slice);
  if (fe::error_t error = graph.validate(); error.is_bad()) return error;
  fe::error_t error = card.properties ? graph.build_operation_graph() : graph.build_operation_graph(card.handle);
  if (error.is_bad()) return error;
  error = graph.create_execution_plans({fe::HeurMode_t::A});
  if (error.is_bad()) return error;
  return choose(prepared, granted_workspace(slice));
}

/// Throws DeviceError where planning breaks.
Prepared prepare(const AttentionSlice& slice, const Card& card) {
  Prepared prepared{.graph = std::make_unique<Graph>(), .plan = {}};
  const fe::error_t error = guarded("plan", [&] { return build(prepared, slice, card); });
  if (error.is_good()) {
    if (guarded("plan", [&] { return prepared.graph->get_variant_pack_uids_sorted(); }) !=
        operands_of(slice.backward)) {
      fail("plan", "it asks for other operands than it was told of");
    }
    return prepared;
  }
  if (!unsupported(error)) fail("plan", error.err_msg);
  const std::string line = error.err_msg.substr(0, std::min(error.err_msg.find('\n'), std::size_t{200}));
  return {.graph = nullptr, .plan = {.engine = {}, .why_not = line}};
}

// -- calls ---------------------------------------------------------------------------------------------------------

/// Key of cached plans: everything that a plan depends on.
struct Key {
  std::int64_t batch, sequence, heads, kv_heads, head_dim, reach;
  std::int64_t slice_batch, slice_kv_heads;
  std::array<std::int64_t, 6> rows;
  std::uint32_t scale;  ///< its bits
  bool backward;
  auto operator<=>(const Key&) const = default;
};

Key key_of(const AttentionSlice& s) {
  return {s.shape.batch,
          s.shape.sequence,
          s.shape.heads,
          s.shape.kv_heads,
          s.shape.head_dim,
          s.shape.reach(),
          s.slices.batch,
          s.slices.kv_heads,
          {s.q_row, s.k_row, s.v_row, s.dq_row, s.dk_row, s.dv_row},
          std::bit_cast<std::uint32_t>(s.shape.scale),
          s.backward};
}

/// Packets of 16 bytes, of which the library checks nothing: an operand that is not made of them gives wrong results.
bool in_packets(const HeadsView& view) {
  return view.row_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
}
bool in_packets(const TensorView& view) { return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0; }

/// Why the library is not even asked for a call; "" where it is.
template <class... Operands>
std::string why_not_asked(const AttentionSlice& slice, DType dtype, const Operands&... operands) {
  const AttentionShape& shape = slice.shape;
  if (dtype != DType::bf16) return "activations are f32";
  if (shape.head_dim % 8 != 0 || shape.head_dim > most_head_dim) return "heads are no multiple of 8 up to 256 wide";
  if (shape.sequence == 1) return "a single token";
  if (!(in_packets(operands) && ...)) return "an operand does not lie in packets of 16 bytes";
  if (slice.slices.batch == 0) return "the sequence is too long for its workspace";
  return {};
}

/// Elements from token to token of the widest operand.
template <class... Views>
std::int64_t widest(const AttentionShape& shape, const Views&... views) {
  return std::max({dense(shape), views.row_stride...});
}

/// Moves an operand's address to its part in the slice that begins with sequence `b` and key/value head `kv`.
void move(void*& address, AttentionOperand operand, const AttentionSlice& slice, std::int64_t b, std::int64_t kv) {
  const AttentionShape& shape = slice.shape;
  const std::int64_t h = kv * shape.group();
  const auto by = [&](std::int64_t row, std::int64_t head) {
    address = static_cast<bf16*>(address) + heads_offset(shape, row, b, head);
  };
  switch (operand) {
    case of_q:
      return by(slice.q_row, h);
    case of_k:
      return by(slice.k_row, kv);
    case of_v:
      return by(slice.v_row, kv);
    case of_out:
    case of_dout:
      return by(dense(shape), h);
    case of_lse:
      address = static_cast<float*>(address) + statistics_offset(shape, b, h);
      return;
    case of_dq:
      return by(slice.dq_row, h);
    case of_dk:
      return by(slice.dk_row, kv);
    case of_dv:
      return by(slice.dv_row, kv);
  }
}

struct HandleCloser {
  void operator()(cudnnHandle_t handle) const noexcept { static_cast<void>(fe::detail::destroy_handle(handle)); }
};
using Handle = std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, HandleCloser>;

class CudnnAttention final : public Attention {
 public:
  CudnnAttention(Handle handle, int sm, Notice slower)
      : handle_(std::move(handle)), sm_(sm), slower_(std::move(slower)) {}

  std::size_t scratch_bytes(const AttentionShape& shape, DType activations) const override {
    return cudnn_attention_scratch(shape, activations);
  }

  void forward(const AttentionForward& call, void* scratch, CUstream_st* stream) override {
    const AttentionShape& shape = call.shape;
    if (shape.batch == 0) return;
    if (shape.records) return plain_attention(call, stream);
    const AttentionSlice slice{.shape = shape,
                               .slices = forward_slices(shape, widest(shape, call.q, call.k, call.v)),
                               .q_row = call.q.row_stride,
                               .k_row = call.k.row_stride,
                               .v_row = call.v.row_stride};
    const std::lock_guard lock(mutex_);
    const Prepared* const prepared =
        found(slice, why_not_asked(slice, call.q.dtype, call.q, call.k, call.v, call.out), stream);
    if (prepared == nullptr) return plain_attention(call, stream);
    // Statistics are always written, into scratch if nobody asked: the same kernel, and so the same bits.
    void* const lse = call.lse ? call.lse.data : scratch;
    std::byte* const workspace =
        static_cast<std::byte*>(scratch) + plain_attention_scratch(shape.batch * shape.sequence, shape.heads);
    run(*prepared, slice, {call.q.data, call.k.data, call.v.data, call.out.data, lse}, workspace, stream);
  }

  void backward(const AttentionBackward& call, void* scratch, CUstream_st* stream) override {
    const AttentionShape& shape = call.shape;
    if (shape.batch == 0) return;
    if (shape.records) return plain_attention_backward(call, scratch, stream);
    const AttentionSlice slice{
        .shape = shape,
        .slices = backward_slices(shape, widest(shape, call.q, call.k, call.v, call.dq, call.dk, call.dv)),
        .q_row = call.q.row_stride,
        .k_row = call.k.row_stride,
        .v_row = call.v.row_stride,
        .dq_row = call.dq.row_stride,
        .dk_row = call.dk.row_stride,
        .dv_row = call.dv.row_stride,
        .backward = true};
    const std::string why_not =
        why_not_asked(slice, call.q.dtype, call.q, call.k, call.v, call.dout, call.out, call.dq, call.dk, call.dv);
    const std::lock_guard lock(mutex_);
    const Prepared* const prepared = found(slice, why_not, stream);
    if (prepared == nullptr) return plain_attention_backward(call, scratch, stream);
    run(*prepared, slice,
        {call.q.data, call.k.data, call.v.data, call.out.data, call.lse.data, call.dout.data, call.dq.data,
         call.dk.data, call.dv.data},
        scratch, stream);
  }

 private:
  using Addresses = std::array<void*, of_dv>;  ///< by AttentionOperand, less 1

  /// The plan of a slice; null where the library is not to be asked, or takes no such call.
  const Prepared* found(const AttentionSlice& slice, const std::string& why_not_asked, CUstream_st* stream) {
    if (!why_not_asked.empty()) {
      tell(slice, why_not_asked);
      return nullptr;
    }
    const Key key = key_of(slice);
    auto known = prepared_.find(key);
    if (known == prepared_.end()) {
      known = prepared_.emplace(key, unless_lost(stream,
                                                 [&] {
                                                   return prepare(slice, {handle_.get(), sm_, {}});
                                                 }))
                  .first;
    }
    if (known->second.graph) return &known->second;
    tell(slice, known->second.plan.why_not);
    return nullptr;
  }

  /// Runs every slice of the call with what its first one was planned as.
  void run(const Prepared& prepared, const AttentionSlice& slice, const Addresses& first, void* workspace,
           CUstream_st* stream) {
    unless_lost(stream, [&] {
      guarded("take a stream", [&] { require(fe::detail::set_stream(handle_.get(), stream)); });
      for (std::int64_t b = 0; b < slice.shape.batch; b += slice.slices.batch) {
        for (std::int64_t kv = 0; kv < slice.shape.kv_heads; kv += slice.slices.kv_heads) {
          Addresses addresses = first;
          for (int operand = of_q; operand <= (slice.backward ? of_dv : of_lse); ++operand) {
            move(addresses[static_cast<std::size_t>(operand - 1)], static_cast<AttentionOperand>(operand), slice, b,
                 kv);
          }
          const fe::error_t error = guarded("run", [&] {
            return prepared.graph->execute_plan_at_index(handle_.get(), addresses.data(),
                                                         slice.backward ? of_dv : of_lse, workspace, prepared.index);
          });
          if (error.is_bad()) fail("run", error.err_msg);
        }
      }
    });
  }

  static void require(cudnnStatus_t status) {
    if (status != CUDNN_STATUS_SUCCESS) fail("take a stream", fe::detail::get_error_string(status));
  }

  void tell(const AttentionSlice& slice, const std::string& why) {
    if (const Notice slower = std::exchange(slower_, {})) {
      const AttentionShape& shape = slice.shape;
      const std::string window = shape.windowed() ? fmt::format(" in windows of {}", shape.reach()) : "";
      slower(fmt::format("{}cuDNN {} takes no {} of {} tokens{} with {} heads of {} over {}: {}", plain_is_slower,
                         version_text(Library::get().version()), slice.backward ? "backward" : "forward",
                         shape.sequence, window, shape.heads, shape.head_dim, shape.kv_heads, why));
    }
  }

  Handle handle_;
  const int sm_;
  Notice slower_;
  std::mutex mutex_;  ///< guards the cache and the handle's stream
  std::map<Key, Prepared> prepared_;
};

/// The library's own reason, where there is one.
std::string why_no_handle(cudnnStatus_t status) {
  return fmt::format("cuDNN {} does not start: {}", version_text(Library::get().version()),
                     fe::detail::get_error_string(status));
}

}  // namespace

std::unique_ptr<Attention> make_attention(Notice slower) {
  Library& library = Library::get();
  if (library.why_not().empty()) {
    cudnnHandle_t made = nullptr;
    const cudnnStatus_t status = guarded("start", [&] { return fe::detail::create_handle(&made); });
    if (status == CUDNN_STATUS_SUCCESS) {
      return std::make_unique<CudnnAttention>(Handle(made), runtime::compute_capability(), std::move(slower));
    }
    library.refuse(why_no_handle(status));
  }
  return make_plain_attention(std::move(slower), library.why_not());
}

std::string attention_key() {
  const Library& library = Library::get();
  if (!library.why_not().empty()) return "plain";
  return fmt::format("cudnn {} frontend {} nvrtc {}", library.version(), CUDNN_FRONTEND_VERSION, library.compiler());
}

AttentionPlan plan_attention(const AttentionSlice& slice, int sm, const std::string& properties) {
  if (const std::string why = Library::get().why_not(); !why.empty())
    throw DeviceError("attention cannot be planned", why);
  auto described = std::make_shared<fe::DeviceProperties>();
  const fe::error_t error = guarded("read a card's properties", [&] {
    return described->deserialize({properties.begin(), properties.end()});
  });
  if (error.is_bad()) fail("read a card's properties", error.err_msg);
  return prepare(slice, {nullptr, sm, described}).plan;
}

}  // namespace tandem::gpu
