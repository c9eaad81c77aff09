// New NPU tensors whose values are not set start as NaN or 0xAA bytes: torch_npu's own kernels make them.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <map>

#include "common/poison.h"
#include "dispatch/alias.h"
#include "dispatch/register.h"

namespace softnpu {
namespace {

thread_local int unpoisoned = 0;

std::map<const c10::FunctionSchema*, c10::SafeKernelFunction>& originals() {
  static auto* all = new std::map<const c10::FunctionSchema*, c10::SafeKernelFunction>;
  return *all;
}

void poisoned_empty(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  originals().at(&op.schema()).callBoxed(op, keys, stack);
  const at::Tensor& made = stack->back().toTensor();
  if (unpoisoned == 0 && on_npu(made)) poison(cpu_alias(made));
}

}  // namespace

WithoutPoison::WithoutPoison() { ++unpoisoned; }
WithoutPoison::~WithoutPoison() { --unpoisoned; }

void poison_new_tensors() {
  for (const auto& [name, overload] : {std::pair{"aten::empty", "memory_format"}, {"aten::empty_strided", ""}}) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    originals().emplace(&op.schema(), op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1));
    replace({name, overload}, c10::DispatchKey::PrivateUse1,
            c10::KernelFunction::makeFromBoxedFunction<&poisoned_empty>());
  }
}

}  // namespace softnpu
