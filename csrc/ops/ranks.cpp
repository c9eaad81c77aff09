#include "ranks.h"

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ascend_moe {

namespace {

void finish(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

}  // namespace

Ranks::Ranks(const std::string& group_name, c10::DeviceType device) : device_(device) {
  const auto group = c10d::resolve_process_group(group_name);
  size_ = group->getSize();
  if (size_ > 1) backend_ = group->getBackend(device);
  rank_ = group->getRank();
}

// asyncOp = false runs on the current stream where the backend can, which saves two event waits.

// One rank needs no backend, only results of its own.

void Ranks::all_gather(at::Tensor& output, at::Tensor& input) const {
  if (size_ == 1) {
    if (output.const_data_ptr() != input.const_data_ptr()) output.copy_(input);
    return;
  }
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  finish(backend_->_allgather_base(output, input, options));
}

void Ranks::all_gather(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs) const {
  if (size_ == 1 || device_ == c10::kCPU) {  // gloo has no launch to save, and concatenates what it coalesces
    for (size_t i = 0; i < outputs.size(); ++i) all_gather(outputs[i], inputs[i]);
    return;
  }
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  finish(backend_->allgather_into_tensor_coalesced(outputs, inputs, options));
}

void Ranks::reduce_scatter(at::Tensor& output, at::Tensor& input) const {
  if (size_ == 1) {
    output.copy_(input);
    return;
  }
  c10d::ReduceScatterOptions options;
  options.asyncOp = false;
  finish(backend_->_reduce_scatter_base(output, input, options));
}

int64_t group_size(const std::string& group_name) { return c10d::resolve_process_group(group_name)->getSize(); }

at::Tensor dense(const at::Tensor& x) {
  if (!x.is_contiguous()) return x.contiguous();
  return x.stride(-1) == 1 ? x : x.clone(at::MemoryFormat::Contiguous);
}

at::Tensor as_wire(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return x;
    default:
      break;
  }
  switch (x.element_size()) {
    case 1:
      return x.view(at::kByte);
    case 2:
      return x.view(at::kHalf);
    case 4:
      return x.view(at::kInt);
    default:
      return x.view(at::kLong);
  }
}

}  // namespace ascend_moe
