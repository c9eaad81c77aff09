#include "dispatch/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include "torch_npu/csrc/aten/NPUGeneratorImpl.h"

namespace softnpu {
namespace {

uint64_t mixed(uint64_t seed, uint64_t offset) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;  // spreads neighbouring seeds
  return seed * kOdd + offset;
}

// One integer in device memory, which is host memory.
uint64_t value_of(const at::Tensor& t) {
  return static_cast<uint64_t>(*static_cast<const int64_t*>(t.const_data_ptr()));
}

}  // namespace

StandIn stand_in_generator(const c10::IValue& value, c10::Device device) {
  auto npu = value.isNone() ? at_npu::detail::getDefaultNPUGenerator(device.index()) : value.toGenerator();
  if (npu.device().type() == at::kCPU) return {npu, nullptr};
  const std::lock_guard<std::mutex> lock(npu.mutex());
  constexpr uint64_t kStep = 4;  // offsets are multiples of it
  const auto state = static_cast<at_npu::NPUGeneratorImpl*>(npu.unsafeGetGeneratorImpl())->philox_npu_state(kStep);
  if (!state.captured_) return {at::detail::createCPUGenerator(mixed(state.seed_.val, state.offset_.val)), nullptr};
  // During a capture, seed and offset are tensors that torch_npu fills before each replay.
  auto cpu = at::detail::createCPUGenerator(0);
  const at::Tensor seed = *state.seed_.ptr, offset = *state.offset_.ptr;
  const auto seed_it = [cpu, seed, offset, within = state.offset_intragraph_]() mutable {
    cpu.set_current_seed(mixed(value_of(seed), value_of(offset) + within));
  };
  return {cpu, seed_it};
}

}  // namespace softnpu
