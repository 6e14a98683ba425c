#include "tests/gpu_ops/kernels/bench.hpp"

namespace tandem::testing {

Operand Bench::put(const Tensor& tensor, std::size_t offset) {
  Operand operand(allocate(offset + tensor.bytes().size()), offset, tensor.dtype(), tensor.view().shape);
  copy_in(operand.view().data, tensor.bytes().data(), tensor.bytes().size());
  return operand;
}

Tensor Bench::get(const Operand& operand) {
  Tensor tensor(operand.view().dtype, operand.view().shape);
  copy_out(tensor.view().data, operand.view().data, tensor.bytes().size());
  return tensor;
}

void Bench::lend(const WorkspaceNeeds& needs) {
  workspace_ = {};
  workspace_ = allocate(ops().workspace_bytes(needs));
  ops().bind_workspace(workspace_.data(), workspace_.bytes());
}

}  // namespace tandem::testing
