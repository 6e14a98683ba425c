#pragma once
// cuDNN's plan for a call of attention, on a card that need not be there. This header includes none of cuDNN's.
// Internal to gpu_ops.
#include <cstddef>
#include <string>

#include "gpu_ops/base/attention_slices.hpp"

namespace tandem::gpu {

/// A slice of a call in bf16, to the element: what a plan of cuDNN's depends on.
struct AttentionSlice {
  AttentionShape shape;    ///< shape of the whole call
  AttentionSlices slices;  ///< how it is cut
  /// Elements from token to token; the last three of backward alone.
  std::int64_t q_row = 0, k_row = 0, v_row = 0, dq_row = 0, dk_row = 0, dv_row = 0;
  bool backward = false;
};

/// Names of the operands between us and the library, in the order in which it takes their addresses.
enum AttentionOperand : int { of_q = 1, of_k, of_v, of_out, of_lse, of_dout, of_dq, of_dk, of_dv };

struct AttentionPlan {
  std::string engine;         ///< the library's name of it; empty: it takes no such call
  std::string why_not;        ///< then, in one line
  std::size_t workspace = 0;  ///< bytes
};

/// Plans a slice for the card that `properties` describe (JSON, as cuDNN writes it; compute capability 9.0 is `sm` 90)
/// as it is planned for the card that is there, but for loading what was compiled. Blocks for up to a second. Throws
/// DeviceError where there is no library to ask, or it fails.
AttentionPlan plan_attention(const AttentionSlice& slice, int sm, const std::string& properties);

}  // namespace tandem::gpu
