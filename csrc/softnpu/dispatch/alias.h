// The same memory seen as an NPU tensor and as a CPU tensor.
#pragma once

#include <ATen/ATen.h>

namespace softnpu {

inline bool on_npu(const at::Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1; }

// A CPU tensor on the memory of an NPU tensor, with its sizes, strides and offset; it keeps that memory alive.
at::Tensor cpu_alias(const at::Tensor& npu);

// A new NPU tensor with the values, sizes and (where they are dense) strides of a CPU tensor.
at::Tensor npu_copy(const at::Tensor& cpu, c10::Device device);

// A new NPU tensor of that shape whose values are not set.
at::Tensor npu_empty_like(const at::Tensor& cpu, c10::Device device);

// While one lives, new tensors of this thread are not filled with NaN first: they are about to be written.
struct WithoutPoison {
  WithoutPoison();
  ~WithoutPoison();
};

// A view of an NPU tensor's storage with the type, sizes, strides and offset of `cpu`, a view of its alias's storage.
at::Tensor npu_view(const at::Tensor& npu, const at::Tensor& cpu);

}  // namespace softnpu
