// Which operators run CPU kernels on NPU tensors.
#pragma once

#include <string>

namespace softnpu {

// Makes an operator that has a kernel for CPU use that one for NPU tensors, whatever torch_npu registered for it.
void use_cpu_kernel(const std::string& name, const std::string& overload);

}  // namespace softnpu
