#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

namespace softnpu {

// A CPU generator that stands for the NPU generator in `value` (none: the device's default one) for one operator. Its
// seed is made of the NPU generator's seed and offset, and that offset moves on: manual_seed, get_state and set_state
// keep their meaning, though the numbers are not the hardware's.
at::Generator cpu_generator(const c10::IValue& value, c10::Device device);

}  // namespace softnpu
