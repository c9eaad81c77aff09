// Operators `softnpu::`, for the Python side (vllm_ascend_moe/softnpu).
#include <torch/library.h>

#include "common/softnpu.h"
#include "dispatch/register.h"

namespace softnpu {

std::string counts() { return counts_text(); }

}  // namespace softnpu

TORCH_LIBRARY(softnpu, m) {
  m.def("use_cpu_kernel(str name, str overload) -> ()", &softnpu::use_cpu_kernel);
  m.def("emulated_aclops() -> str", &softnpu::emulated_aclops);
  m.def("plain_operators() -> int", &softnpu::plain_operators);
  m.def("counts() -> str", &softnpu::counts);
  m.def("reset_counts() -> ()", &softnpu::reset_counts);
}
