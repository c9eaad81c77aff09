// How an operator refuses. What CANN's documentation forbids: TORCH_CHECK(condition, "aclnnXxx: ...") . What it allows
// and we do not compute: EMULATED. Values of device data are checked in the body of ACLNN_RUN.
#pragma once

#include "opapi/op.h"

#define EMULATED(condition, op, attribute, value)                                                                     \
  TORCH_CHECK(condition, "softnpu: ", op, ": ", attribute, " = ", value, " is not emulated; add it to csrc/softnpu/", \
              "opapi/", __FILE_NAME__)

namespace softnpu {

// All values are in [low, high].
inline void check_values(const char* op, const char* name, const at::Tensor& values, int64_t low, int64_t high) {
  if (values.numel() == 0) return;
  const auto [least, most] = at::aminmax(values);
  TORCH_CHECK(least.item<int64_t>() >= low && most.item<int64_t>() <= high, op, ": ", name, " has values from ",
              least.item<int64_t>(), " to ", most.item<int64_t>(), "; allowed are ", low, " to ", high);
}

}  // namespace softnpu
