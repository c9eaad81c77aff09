// Kernels that replace torch_npu's for NPU tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>

namespace softnpu {

// Registers a kernel, for as long as the process lives.
void replace(const c10::OperatorName& name, c10::DispatchKey key, c10::KernelFunction kernel);

// Makes an operator that has a kernel for CPU use that one for NPU tensors, whatever torch_npu registered for it.
void use_cpu_kernel(const std::string& name, const std::string& overload);

// How many plain aten operators run ATen's CPU kernel.
int64_t plain_operators();

// Makes torch.empty and the like give marked values.
void poison_new_tensors();

}  // namespace softnpu
