// Plain aten operators on NPU tensors: ATen's CPU kernel runs on the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace softnpu {

// The kernel for any operator that has one for CPU. Results that alias an argument come back as views of it.
void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace softnpu
