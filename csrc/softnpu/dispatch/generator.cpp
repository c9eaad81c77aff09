#include "dispatch/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include "torch_npu/csrc/aten/NPUGeneratorImpl.h"

namespace softnpu {

at::Generator cpu_generator(const c10::IValue& value, c10::Device device) {
  auto generator = value.isNone() ? at_npu::detail::getDefaultNPUGenerator(device.index()) : value.toGenerator();
  if (generator.device().type() == at::kCPU) return generator;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* state = static_cast<at_npu::NPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  const uint64_t offset = state->get_offset();
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ull;  // spreads neighbouring seeds
  constexpr uint64_t kStep = 4;                     // offsets are multiples of it
  state->set_offset(offset + kStep);
  return at::detail::createCPUGenerator(state->current_seed() * kOdd + offset);
}

}  // namespace softnpu
