// Random numbers of an operator on an NPU.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <functional>

namespace softnpu {

// A CPU generator that stands for an NPU generator for one operator. Its seed is made of the NPU generator's seed and
// offset, and that offset moves on: manual_seed, get_state and set_state keep their meaning, though the numbers are not
// the hardware's.
struct StandIn {
  at::Generator cpu;
  std::function<void()> seed_for_replay;  // where a graph is being captured: seeds it anew for each replay
};

// For the generator in `value`; none is the device's default one.
StandIn stand_in_generator(const c10::IValue& value, c10::Device device);

}  // namespace softnpu
