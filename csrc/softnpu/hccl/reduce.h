// Sums, products, maxima and minima over ranks, in rank order; half precisions are summed in float and rounded once.
#pragma once

#include <cstdint>
#include <vector>

#include "third_party/hccl/inc/hccl/hccl_types.h"

namespace softnpu::hccl {

uint64_t size_of(HcclDataType type);  // 0: unknown

// to[i] = reduction over r of from[r][i], for i in [0, count). False: no arithmetic for this type or operation.
bool reduce(HcclDataType type, HcclReduceOp op, const std::vector<const void*>& from, void* to, uint64_t count);

}  // namespace softnpu::hccl
