#include "dispatch/boxed.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "common/softnpu.h"
#include "dispatch/alias.h"
#include "dispatch/generator.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace softnpu {
namespace {

using Stack = torch::jit::Stack;

// An NPU tensor among the arguments, and the CPU tensor that stands for it.
struct Pair {
  at::Tensor npu, cpu;
  bool written;
};
using Pairs = std::vector<Pair>;

// What the schema says, looked up once.
struct Signature {
  std::string name;
  std::vector<bool> written;  // by argument
  bool one_device = true;     // all tensors must be on the same device
  int generator = -1;         // index of that argument
};

// Plain operators refuse tensors of several devices, but for these; what others (`atb::`, say) take is up to them.
bool one_device(const std::string& name) {
  static const std::set<std::string> several = {
      "aten::index",         "aten::index_put",         "aten::index_put_",    "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_foreach_copy", "aten::_foreach_copy_"};
  return name.rfind("aten::", 0) == 0 && several.count(name) == 0;
}

const Signature& signature_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Signature> known;
  const auto& schema = op.schema();
  const auto found = known.find(&schema);
  if (found != known.end()) return found->second;
  Signature signature{toString(op.operator_name()), {}, one_device(schema.name()), -1};
  for (const c10::Argument& argument : schema.arguments()) {
    signature.written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    if (argument.type()->str().find("Generator") != std::string::npos) {
      signature.generator = static_cast<int>(signature.written.size()) - 1;
    }
  }
  return known.emplace(&schema, std::move(signature)).first->second;
}

// Applies `change` to each tensor in a value: a tensor or a list of tensors or optional tensors.
template <typename Change>
c10::IValue map_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  if (!value.isList() || value.isIntList() || value.isDoubleList() || value.isBoolList()) return value;
  auto list = value.toList().copy();
  for (size_t i = 0; i < list.size(); ++i) {
    const c10::IValue element = list.get(i);
    if (element.isTensor()) list.set(i, change(element.toTensor()));
  }
  return list;
}

at::Tensor stand_in(Pairs& pairs, const at::Tensor& t, bool written) {
  if (!on_npu(t)) return t;
  for (Pair& pair : pairs) {
    if (!pair.npu.is_same(t)) continue;
    pair.written = pair.written || written;
    return pair.cpu;
  }
  // An empty output may be resized, which an alias cannot be: the operator gets a tensor of its own instead.
  const bool own = written && t.numel() == 0;
  pairs.push_back({t, own ? at::empty(t.sizes(), t.options().device(at::kCPU)) : cpu_alias(t), written});
  return pairs.back().cpu;
}

// The NPU tensor for a result on the CPU: an argument, a view of one, or a new one.
at::Tensor result_of(const Pairs& pairs, const at::Tensor& cpu, c10::Device device, bool with_values) {
  if (!cpu.defined() || cpu.device().type() != at::kCPU) return cpu;
  for (const Pair& pair : pairs) {
    if (pair.cpu.is_same(cpu)) return pair.npu;
  }
  for (const Pair& pair : pairs) {
    const void* data = cpu.storage().data();
    if (data != nullptr && data == pair.cpu.storage().data()) return npu_view(pair.npu, cpu);
  }
  return with_values ? npu_copy(cpu, device) : npu_empty_like(cpu, device);
}

// A CPU tensor with dimensions, or two NPUs: the device's kernels could not read one of them.
void check_devices(const Signature& signature, const Pairs& pairs, const Stack& arguments) {
  if (!signature.one_device || pairs.empty()) return;
  const auto device = pairs.front().npu.device();
  for (const Pair& pair : pairs) {
    TORCH_CHECK(pair.npu.device() == device, "Expected all tensors to be on the same device, but ", signature.name,
                " got ", device, " and ", pair.npu.device());
  }
  const auto check = [&](const at::Tensor& t) {
    const auto is_t = [&](const Pair& pair) { return pair.cpu.is_same(t); };
    const bool ours = std::any_of(pairs.begin(), pairs.end(), is_t);
    TORCH_CHECK(!t.defined() || t.dim() == 0 || ours, "Expected all tensors to be on the same device, but ",
                signature.name, " got ", device, " and ", t.device());
    return t;
  };
  for (const c10::IValue& value : arguments) map_tensors(value, check);
}

void redispatch(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void adopt_resized(const Pairs& pairs) {
  for (const Pair& pair : pairs) {
    if (!pair.written || pair.cpu.sizes() == pair.npu.sizes()) continue;
    pair.npu.resize_(pair.cpu.sizes());
    if (pair.cpu.numel() > 0) cpu_alias(pair.npu).copy_(pair.cpu);
  }
}

Stack run_now(const c10::OperatorHandle& op, const Stack& arguments, const Pairs& pairs, c10::Device device) {
  Stack results = arguments;
  redispatch(op, &results);
  adopt_resized(pairs);
  for (c10::IValue& value : results) {
    value = map_tensors(value, [&](const at::Tensor& t) { return result_of(pairs, t, device, true); });
  }
  return results;
}

// A CPU tensor like `t` on a copy of its storage.
at::Tensor detached_copy(const at::Tensor& t) {
  const auto bytes = static_cast<int64_t>(t.storage().nbytes());
  if (bytes == 0) return t;
  auto copy = at::from_blob(t.storage().mutable_data(), {bytes}, at::kByte).clone();
  return at::empty({0}, t.options()).set_(copy.storage(), t.storage_offset(), t.sizes(), t.strides());
}

// Results of a replay go where those of the capture said they would be.
void store(const c10::IValue& result, const c10::IValue& output) {
  const auto put = [](const at::Tensor& from, const at::Tensor& npu) {
    if (!on_npu(npu) || npu.numel() == 0) return;
    const auto to = cpu_alias(npu);
    TORCH_CHECK(from.sizes() == to.sizes(), "softnpu: an operator of a captured graph returned shape ", from.sizes(),
                " at replay, and ", to.sizes(), " when it was captured");
    if (from.storage().data() != to.storage().data()) to.copy_(from);
  };
  if (result.isTensor()) {
    put(result.toTensor(), output.toTensor());
  } else if (result.isTensorList()) {
    const auto from = result.toTensorVector(), to = output.toTensorVector();
    for (size_t i = 0; i < from.size(); ++i) put(from[i], to[i]);
  }
}

// Records the operator in the graph that is being captured. It runs once on copies of what it writes, which shows what
// comes out and changes nothing.
Stack record(const c10::OperatorHandle& op, const Stack& arguments, const Pairs& pairs, c10::Device device,
             aclrtStream stream, const std::function<void()>& prepare) {
  Pairs trial = pairs;
  for (Pair& pair : trial) {
    // Integers that the graph computes are not computed yet; as indices they must be in range, and 0 always is.
    const bool index = !pair.written && at::isIntegralType(pair.cpu.scalar_type(), /*includeBool=*/true);
    if (pair.written || index) pair.cpu = detached_copy(pair.cpu);
    if (index) pair.cpu.zero_();
  }
  Stack outputs;
  for (const c10::IValue& value : arguments) {
    outputs.push_back(map_tensors(value, [&](const at::Tensor& t) {
      for (size_t i = 0; i < pairs.size(); ++i) {
        if (pairs[i].cpu.is_same(t)) return trial[i].cpu;
      }
      return t;
    }));
  }
  redispatch(op, &outputs);
  for (c10::IValue& value : outputs) {
    value = map_tensors(value, [&](const at::Tensor& t) { return result_of(trial, t, device, false); });
  }
  submit(stream, signature_of(op).name.c_str(), [op, arguments, outputs, prepare]() -> aclError {
    if (prepare) prepare();
    Stack results = arguments;
    redispatch(op, &results);
    for (size_t i = 0; i < results.size(); ++i) store(results[i], outputs[i]);
    return ACL_SUCCESS;
  });
  return outputs;
}

}  // namespace

void boxed(const c10::OperatorHandle& op, Stack* stack) {
  const Signature& signature = signature_of(op);
  const size_t count = signature.written.size();
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(count);
  Pairs pairs;
  std::optional<c10::Device> device;
  Stack arguments;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = *(begin + static_cast<std::ptrdiff_t>(i));
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
      device = value.toDevice();
      arguments.emplace_back(c10::Device(at::kCPU));
    } else {
      const bool written = signature.written[i];
      arguments.push_back(map_tensors(value, [&](const at::Tensor& t) { return stand_in(pairs, t, written); }));
    }
  }
  if (!device && !pairs.empty()) device = pairs.front().npu.device();
  if (!device || !device->has_index()) device = c10::Device(c10::DeviceType::PrivateUse1, current_device());
  check_devices(signature, pairs, arguments);
  const c10::DeviceGuard guard(*device);
  std::function<void()> seed_for_replay;
  if (signature.generator >= 0) {
    const StandIn generator = stand_in_generator(arguments[signature.generator], *device);
    arguments[signature.generator] = generator.cpu;
    seed_for_replay = generator.seed_for_replay;
  }
  const aclrtStream stream = c10_npu::getCurrentNPUStream(device->index()).stream(false);
  Stack results;
  if (capturing(stream)) {
    results = record(op, arguments, pairs, *device, stream, seed_for_replay);
  } else {
    const aclError code = submit(stream, signature.name.c_str(), [&]() -> aclError {
      results = run_now(op, arguments, pairs, *device);
      return ACL_SUCCESS;
    });
    TORCH_CHECK(code == ACL_SUCCESS, "softnpu: ", signature.name, ": error ", code);
  }
  stack->erase(begin, stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

}  // namespace softnpu
