// Plain aten operators get ATen's CPU kernels when this library is loaded.
#include "dispatch/register.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <set>

#include "dispatch/boxed.h"

namespace softnpu {
namespace {

// torch_npu's own kernels stay for what manages memory, storage and views, and for copies, which then go through the
// emulated runtime and its checks.
const std::set<std::string> kKept = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_with_format",
    "new_empty",
    "new_empty_strided",
    "view",
    "as_strided",
    "_reshape_alias",
    "resize_",
    "resize_as_",
    "set_",
    "record_stream",
    "pin_memory",
    "_pin_memory",
    "is_pinned",
    "contiguous",
    "is_contiguous",
    "is_set_to",
    "copy_",
    "_copy_from",
    "_copy_from_and_resize",
    "_to_copy",
    "clone",
    "_local_scalar_dense",
    "item",
    "data_ptr",
    "unfold",
    "alias",
    "detach",
    "detach_",
    "slice",
    "select",
    "transpose",
};

// Drops the one warning that registering over torch_npu's kernels gives.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* all = new std::vector<c10::RegistrationHandleRAII>;
  return *all;
}

// Autograd of a plain operator is torch's own, which torch_npu replaces for some to call its kernels directly.
template <c10::DispatchKey key>
void torch_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

void replace_autograd(const c10::OperatorHandle& op, const c10::OperatorName& name) {
  constexpr auto kKey = c10::DispatchKey::AutogradPrivateUse1;
  constexpr auto kFormula = c10::DispatchKey::Autograd, kComposite = c10::DispatchKey::CompositeImplicitAutograd;
  if (op.hasKernelForDispatchKey(kComposite)) {
    replace(name, kKey, c10::KernelFunction::makeFromBoxedFunction<&torch_kernel<kComposite>>());
  } else if (op.hasKernelForDispatchKey(kKey) && op.hasKernelForDispatchKey(kFormula)) {
    replace(name, kKey, c10::KernelFunction::makeFromBoxedFunction<&torch_kernel<kFormula>>());
  }
}

int64_t plain = 0;

void register_all() {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  poison_new_tensors();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || kKept.count(name.name.substr(6)) > 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasSchema()) continue;
    const bool theirs = op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    const bool cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    if (!cpu && !(theirs && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))) continue;
    replace(name, c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&boxed>());
    replace_autograd(*op, name);
    ++plain;
  }
}

}  // namespace

void replace(const c10::OperatorName& name, c10::DispatchKey key, c10::KernelFunction kernel) {
  registrations().push_back(
      c10::Dispatcher::singleton().registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "softnpu"));
}

int64_t plain_operators() { return plain; }

void use_cpu_kernel(const std::string& name, const std::string& overload) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  const c10::OperatorName full(name, overload);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  TORCH_CHECK(op.hasKernelForDispatchKey(c10::DispatchKey::CPU), "softnpu: ", name, " has no kernel for CPU");
  replace(full, c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&boxed>());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse1)) {
    replace(full, c10::DispatchKey::AutogradPrivateUse1, c10::KernelFunction::makeFallthrough());
  }
}

namespace {

// Loading the library is what installs the kernels.
const bool registered = (register_all(), true);

}  // namespace
}  // namespace softnpu
