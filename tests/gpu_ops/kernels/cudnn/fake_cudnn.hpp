#pragma once
// A cuDNN made of this CPU, under the real one's name. It takes apart the graphs that it is given as the backend's
// interface describes them (tensors by name, dimensions and strides; the scale; the mask) and computes causal attention
// from them in double. Can be made to refuse and to fail.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::fake_cudnn {

/// One call as it arrived: where its operands begin, by gpu::AttentionOperand, and how much of them it is about.
struct Slice {
  std::array<void*, 10> operands{};
  void* workspace = nullptr;
  std::int64_t batch = 0, heads = 0, kv_heads = 0;
  bool bounded = false;  ///< whether keys are hidden that lie far before a query
};

struct Counters {
  int plans = 0;     ///< made
  int forwards = 0;  ///< slices run
  int backwards = 0;
  void* stream = nullptr;  ///< the one set last
  std::vector<Slice> slices;
};
/// Since the last call of reset().
Counters counters();

struct Behaviour {
  bool has_engines = true;
  bool deterministic = true;      ///< whether engines call themselves deterministic
  int start_status = 0;           ///< status of making a handle
  int plan_status = 0;            ///< status of finishing a plan
  int run_status = 0;             ///< status of every execution
  bool computes = true;           ///< else slices are noted, and no memory is touched
  std::int64_t workspace = 4096;  ///< bytes that an engine asks for, beside those of the graph
};
/// Zero counters, and this behaviour from now on.
void reset(Behaviour behaviour);

}  // namespace tandem::fake_cudnn
