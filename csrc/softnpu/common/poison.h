// What memory holds before anything is written to it: NaN in every floating type, 0xAA bytes in integers.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <limits>

#include "common/settings.h"

namespace softnpu {

// Fills a CPU tensor so, unless ASCEND_MOE_SOFTNPU_POISON=0. Booleans become true: other bytes are no booleans.
inline void poison(const at::Tensor& t) {
  if (!settings().poison || t.numel() == 0) return;
  const bool floating = t.is_floating_point() || t.is_complex();
  const int byte = floating ? 0xFF : t.scalar_type() == at::kBool ? 1 : 0xAA;  // all bits set is NaN
  if (t.is_non_overlapping_and_dense()) {
    std::memset(t.mutable_data_ptr(), byte, t.numel() * t.element_size());
  } else {
    t.copy_(at::full({1}, byte, at::kByte)
                .expand({static_cast<int64_t>(t.element_size())})
                .contiguous()
                .view(t.scalar_type())
                .expand(t.sizes()));
  }
}

}  // namespace softnpu
