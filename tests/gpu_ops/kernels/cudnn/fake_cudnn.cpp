#include "tests/gpu_ops/kernels/cudnn/fake_cudnn.hpp"

#include <cudnn.h>
#include <dlfcn.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "core/numerics/bf16.hpp"
#include "gpu_ops/ops/attention_cudnn.hpp"

namespace {

using tandem::bf16;
using tandem::gpu::AttentionOperand;

tandem::fake_cudnn::Counters counted;
tandem::fake_cudnn::Behaviour behaviour;

/// Number in the environment variable `name`; `usual` where it is not set.
std::size_t setting(const char* name, std::size_t usual) {
  const char* const text = std::getenv(name);
  return text == nullptr ? usual : static_cast<std::size_t>(std::atoi(text));
}

std::size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    default:
      return 4;
  }
}

struct Object {
  cudnnBackendDescriptorType_t type;
  struct Attribute {
    cudnnBackendAttributeType_t type;
    std::vector<std::uint8_t> bytes;
  };
  std::map<cudnnBackendAttributeName_t, Attribute> attributes;

  template <class T>
  std::vector<T> all(cudnnBackendAttributeName_t name) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    std::vector<T> values(found->second.bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), found->second.bytes.data(), values.size() * sizeof(T));
    return values;
  }
  template <class T>
  T one(cudnnBackendAttributeName_t name, T otherwise = {}) const {
    const std::vector<T> values = all<T>(name);
    return values.empty() ? otherwise : values[0];
  }
  template <class T>
  void put(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t as, T value) {
    Attribute& attribute = attributes[name];
    attribute.type = as;
    attribute.bytes.resize(sizeof value);
    std::memcpy(attribute.bytes.data(), &value, sizeof value);
  }
};

/// Descriptors, kept: the caller may let go of one that another refers to.
std::vector<std::unique_ptr<Object>>& kept() {
  static std::vector<std::unique_ptr<Object>> all;
  return all;
}

struct TensorLayout {
  std::vector<std::int64_t> dims, strides;
  bool by_value = false;
};

/// Contents of a graph, as far as attention is concerned.
struct Facts {
  std::map<std::int64_t, TensorLayout> tensors;
  std::int64_t scale = -1;  ///< name of the tensor that the scores are multiplied by
  std::int64_t bound = -1;  ///< name of what is added to keys' positions, which must then be after the query's
  bool causal = false;
  bool bounded = false;
};

bool by_value(const Object* tensor) {
  return tensor != nullptr && tensor->one<std::uint8_t>(CUDNN_ATTR_TENSOR_IS_BY_VALUE) != 0;
}

void collect(const Object& object, Facts& facts, std::set<const Object*>& seen) {
  if (!seen.insert(&object).second) return;
  if (object.type == CUDNN_BACKEND_TENSOR_DESCRIPTOR) {
    facts.tensors[object.one<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)] = {
        object.all<std::int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS), object.all<std::int64_t>(CUDNN_ATTR_TENSOR_STRIDES),
        object.one<std::uint8_t>(CUDNN_ATTR_TENSOR_IS_BY_VALUE) != 0};
  }
  if (object.type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
    const Object* how = object.one<Object*>(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const Object* b = object.one<Object*>(CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
    const auto mode = how->one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
    if (mode == CUDNN_POINTWISE_CMP_GE) facts.causal = true;
    if (mode == CUDNN_POINTWISE_CMP_GT) facts.bounded = true;
    if (mode == CUDNN_POINTWISE_MUL && by_value(b)) facts.scale = b->one<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
    if (mode == CUDNN_POINTWISE_ADD && by_value(b)) facts.bound = b->one<std::int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  }
  for (const auto& [name, attribute] : object.attributes) {
    if (attribute.type != CUDNN_TYPE_BACKEND_DESCRIPTOR) continue;
    for (const Object* inner : object.all<Object*>(name)) {
      if (inner != nullptr) collect(*inner, facts, seen);
    }
  }
}

/// An operand where it lies.
struct Operand {
  TensorLayout layout;
  void* data = nullptr;

  /// A product takes an operand transposed where its strides say so.
  std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d) const {
    if (layout.strides[3] != 1) std::swap(t, d);
    return b * layout.strides[0] + h * layout.strides[1] + t * layout.strides[2] + d * layout.strides[3];
  }
  double get(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d) const {
    return static_cast<double>(tandem::numerics::bf16_to_float(static_cast<const bf16*>(data)[at(b, h, t, d)]));
  }
  void put(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t d, double value) const {
    static_cast<bf16*>(data)[at(b, h, t, d)] = tandem::numerics::round_to_bf16(static_cast<float>(value));
  }
  float& statistic(std::int64_t b, std::int64_t h, std::int64_t t) const {
    return static_cast<float*>(data)[at(b, h, t, 0)];
  }
};

struct Call {
  std::map<std::int64_t, Operand> operands;
  double scale = 1.0;
  double bound = std::numeric_limits<double>::infinity();
  std::int64_t batch = 0, heads = 0, kv_heads = 0, tokens = 0, dim = 0;

  const Operand& operator[](AttentionOperand which) const { return operands.at(which); }
  bool sees(std::int64_t t, std::int64_t u) const {
    return u <= t && static_cast<double>(u) + bound > static_cast<double>(t);
  }
  double product(AttentionOperand a, AttentionOperand b, std::int64_t n, std::int64_t h, std::int64_t kv,
                 std::int64_t t, std::int64_t u) const {
    double sum = 0.0;
    for (std::int64_t d = 0; d < dim; ++d) sum += (*this)[a].get(n, h, t, d) * (*this)[b].get(n, kv, u, d);
    return sum;
  }
};

using namespace tandem::gpu;

void forward(const Call& call) {
  const std::int64_t group = call.heads / call.kv_heads;
  for (std::int64_t n = 0; n < call.batch; ++n) {
    for (std::int64_t h = 0; h < call.heads; ++h) {
      for (std::int64_t t = 0; t < call.tokens; ++t) {
        std::vector<double> scores;
        double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
        for (std::int64_t u = 0; u <= t; ++u) {
          const double score = call.scale * call.product(of_q, of_k, n, h, h / group, t, u);
          scores.push_back(call.sees(t, u) ? score : -std::numeric_limits<double>::infinity());
          largest = std::fmax(largest, scores.back());
        }
        for (double& score : scores) sum += score = std::exp(score - largest);
        for (std::int64_t d = 0; d < call.dim; ++d) {
          double out = 0.0;
          for (std::int64_t u = 0; u <= t; ++u) {
            out += scores[static_cast<std::size_t>(u)] / sum * call[of_v].get(n, h / group, u, d);
          }
          call[of_out].put(n, h, t, d, out);
        }
        call[of_lse].statistic(n, h, t) = static_cast<float>(largest + std::log(sum));
      }
    }
  }
}

void backward(const Call& call) {
  const std::int64_t group = call.heads / call.kv_heads;
  const auto index = [&](std::int64_t t, std::int64_t d) { return static_cast<std::size_t>(t * call.dim + d); };
  for (std::int64_t n = 0; n < call.batch; ++n) {
    for (std::int64_t kv = 0; kv < call.kv_heads; ++kv) {
      std::vector<double> dk(index(call.tokens, 0)), dv(index(call.tokens, 0));
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        for (std::int64_t t = 0; t < call.tokens; ++t) {
          std::vector<double> dq(static_cast<std::size_t>(call.dim));
          const double delta = call.product(of_dout, of_out, n, h, h, t, t);
          for (std::int64_t u = 0; u <= t; ++u) {
            const double lse = static_cast<double>(call[of_lse].statistic(n, h, t));
            const double weight =
                call.sees(t, u) ? std::exp(call.scale * call.product(of_q, of_k, n, h, kv, t, u) - lse) : 0.0;
            const double dscore = weight * (call.product(of_dout, of_v, n, h, kv, t, u) - delta) * call.scale;
            for (std::int64_t d = 0; d < call.dim; ++d) {
              dq[static_cast<std::size_t>(d)] += dscore * call[of_k].get(n, kv, u, d);
              dk[index(u, d)] += dscore * call[of_q].get(n, h, t, d);
              dv[index(u, d)] += weight * call[of_dout].get(n, h, t, d);
            }
          }
          for (std::int64_t d = 0; d < call.dim; ++d) call[of_dq].put(n, h, t, d, dq[static_cast<std::size_t>(d)]);
        }
      }
      for (std::int64_t t = 0; t < call.tokens; ++t) {
        for (std::int64_t d = 0; d < call.dim; ++d) {
          call[of_dk].put(n, kv, t, d, dk[index(t, d)]);
          call[of_dv].put(n, kv, t, d, dv[index(t, d)]);
        }
      }
    }
  }
}

Object& object_of(cudnnBackendDescriptor_t descriptor) { return *static_cast<Object*>(descriptor); }

}  // namespace

namespace tandem::fake_cudnn {

Counters counters() { return counted; }
void reset(Behaviour next) {
  counted = {};
  behaviour = next;
}

}  // namespace tandem::fake_cudnn

extern "C" {

std::size_t cudnnGetVersion() { return setting("TANDEM_FAKE_CUDNN_VERSION", 91900); }
std::size_t cudnnGetCudartVersion() { return setting("TANDEM_FAKE_CUDNN_CUDART", 13000); }
const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_NOT_INITIALIZED:
      return "CUDNN_STATUS_NOT_INITIALIZED";
    case CUDNN_STATUS_NOT_SUPPORTED:
      return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_INTERNAL_ERROR:
      return "CUDNN_STATUS_INTERNAL_ERROR";
    case CUDNN_STATUS_EXECUTION_FAILED:
      return "CUDNN_STATUS_EXECUTION_FAILED";
    default:
      return "CUDNN_STATUS_OF_A_FAKE";
  }
}
void cudnnGetLastErrorString(char* message, std::size_t size) {
  if (size > 0) *message = '\0';
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  static int somewhere;
  *handle = reinterpret_cast<cudnnHandle_t>(&somewhere);
  return static_cast<cudnnStatus_t>(behaviour.start_status);
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t stream) {
  counted.stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) {
  *stream = static_cast<cudaStream_t>(counted.stream);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  kept().push_back(std::make_unique<Object>(Object{type, {}}));
  *made = kept().back().get();
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, std::int64_t count, const void* values) {
  const auto* const bytes = static_cast<const std::uint8_t*>(values);
  object_of(descriptor).attributes[name] = {type, {bytes, bytes + static_cast<std::size_t>(count) * size_of(type)}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t, std::int64_t, std::int64_t* count, void* values) {
  const Object& object = object_of(descriptor);
  const auto tell = [&](std::int64_t n) {
    if (count != nullptr) *count = n;
    return CUDNN_STATUS_SUCCESS;
  };
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    if (values != nullptr && behaviour.has_engines) {
      Object& config = object_of(*static_cast<cudnnBackendDescriptor_t*>(values));
      config.put(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                 object.one<Object*>(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH));
    }
    return tell(behaviour.has_engines ? 1 : 0);
  }
  if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE && !behaviour.deterministic) {
    if (values != nullptr) *static_cast<cudnnBackendNumericalNote_t*>(values) = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    return tell(1);
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE) {
    *static_cast<std::int64_t*>(values) = behaviour.workspace;
    return tell(1);
  }
  if (name == CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED) {
    *static_cast<std::int32_t*>(values) = 0;
    return tell(1);
  }
  if (name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX) {
    *static_cast<std::int64_t*>(values) = 6;
    return tell(1);
  }
  return tell(name == CUDNN_ATTR_ENGINECFG_ENGINE ? 1 : 0);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  if (object_of(descriptor).type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) return CUDNN_STATUS_SUCCESS;
  ++counted.plans;
  // Kernels are compiled by what was loaded for that.
  void* const compiler = ::dlopen("libnvrtc.so.13", RTLD_NOW | RTLD_NOLOAD);
  using Compile = int(void*, int, const char* const*);
  auto* const compile =
      reinterpret_cast<Compile*>(compiler != nullptr ? ::dlsym(compiler, "nvrtcCompileProgram") : nullptr);
  if (compile == nullptr || compile(nullptr, 0, nullptr) != 0) return CUDNN_STATUS_INTERNAL_ERROR;
  return static_cast<cudnnStatus_t>(behaviour.plan_status);
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  if (behaviour.run_status != 0) return static_cast<cudnnStatus_t>(behaviour.run_status);
  const Object* config = object_of(plan).one<Object*>(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  Facts facts;
  std::set<const Object*> seen;
  collect(*config, facts, seen);
  const auto names = object_of(pack).all<std::int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto data = object_of(pack).all<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  auto* const workspace = object_of(pack).one<std::uint8_t*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  if (!facts.causal || names.size() != data.size()) return CUDNN_STATUS_BAD_PARAM;
  if (facts.bounded != (facts.bound >= 0)) return CUDNN_STATUS_BAD_PARAM;
  Call call;
  for (std::size_t i = 0; i < names.size(); ++i) {
    call.operands[names[i]] = {facts.tensors[names[i]], data[i]};
    if (names[i] == facts.scale) call.scale = static_cast<double>(*static_cast<const float*>(data[i]));
    if (names[i] == facts.bound) call.bound = static_cast<double>(*static_cast<const float*>(data[i]));
  }

  const std::vector<std::int64_t>& q = call[of_q].layout.dims;
  call.batch = q[0], call.heads = q[1], call.tokens = q[2], call.dim = q[3];
  call.kv_heads = call[of_k].layout.dims[1];
  // The frontend gives what numbers are left to tensors of its own, scalars in forward.
  const bool is_backward = call.operands.contains(of_dout) && !call[of_dout].layout.by_value;
  ++(is_backward ? counted.backwards : counted.forwards);
  tandem::fake_cudnn::Slice slice{.operands = {},
                                  .workspace = workspace,
                                  .batch = call.batch,
                                  .heads = call.heads,
                                  .kv_heads = call.kv_heads,
                                  .bounded = facts.bounded};
  for (int operand = of_q; operand <= (is_backward ? of_dv : of_lse); ++operand) {
    slice.operands[static_cast<std::size_t>(operand)] = call[static_cast<AttentionOperand>(operand)].data;
  }
  counted.slices.push_back(slice);
  if (!behaviour.computes) return CUDNN_STATUS_SUCCESS;
  // Whatever lies there is its own until it is done.
  const auto use = [&] { std::memset(workspace, 0xFF, static_cast<std::size_t>(behaviour.workspace)); };
  use();
  is_backward ? backward(call) : forward(call);
  use();
  return CUDNN_STATUS_SUCCESS;
}
}
