// Storage types and what every kernels_*.cpp needs before it switches its target on.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"

namespace ascend_moe::cpu {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

}  // namespace ascend_moe::cpu
