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

// How far ahead, in bytes, weights are asked for. They stream from memory once; hardware stops at page borders.
constexpr int64_t kPrefetch = 1024;

}  // namespace ascend_moe::cpu
