// A process group as the operators use it: found by its c10d name, called without the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace ascend_moe {

class Ranks {
 public:
  // Looked up at every call (a map, tens of nanoseconds): names are used again after a group is destroyed.
  Ranks(const std::string& group_name, c10::DeviceType device);

  int64_t size() const { return size_; }
  int64_t rank() const { return rank_; }

  // Each returns when the result may be used: for NCCL and HCCL ordered on the current stream, for gloo by waiting.
  // Tensors are contiguous. `output` may hold `input` as this rank's part where in_place() says so.
  void all_gather(at::Tensor& output, at::Tensor& input) const;
  // Several of one dtype, in one launch where the backend has launches.
  void all_gather(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs) const;
  void reduce_scatter(at::Tensor& output, at::Tensor& input) const;

  bool in_place() const { return device_ == c10::kCUDA; }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::DeviceType device_;
  int64_t size_, rank_;
};

// Number of ranks alone, for shape-only implementations (no backend of the device is needed).
int64_t group_size(const std::string& group_name);

// `x` in order in memory, also to view(): a dim of size 1 may have any stride in a tensor that calls itself contiguous.
at::Tensor dense(const at::Tensor& x);

// Collectives move bytes, but no backend knows every dtype: the same memory in a type that all of them know.
at::Tensor as_wire(const at::Tensor& x);

}  // namespace ascend_moe
