#include "hccl/reduce.h"

#include <algorithm>
#include <cstring>

namespace softnpu::hccl {
namespace {

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const bool nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = nan ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // nearest, ties to even
  }
};

template <typename A>
A combine(HcclReduceOp op, A a, A b) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return static_cast<A>(a + b);
    case HCCL_REDUCE_PROD:
      return static_cast<A>(a * b);
    case HCCL_REDUCE_MAX:
      return b != b || b > a ? b : a;  // NaN wins
    default:
      return b != b || b < a ? b : a;
  }
}

template <typename T, typename A>
void reduce_as(HcclReduceOp op, const std::vector<const void*>& from, void* to, uint64_t count) {
  constexpr uint64_t kBlock = 1024;
  A sums[kBlock];
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t length = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(from[0]) + begin;
    for (uint64_t i = 0; i < length; ++i) sums[i] = static_cast<A>(first[i]);
    for (size_t r = 1; r < from.size(); ++r) {
      const T* next = static_cast<const T*>(from[r]) + begin;
      for (uint64_t i = 0; i < length; ++i) sums[i] = combine<A>(op, sums[i], static_cast<A>(next[i]));
    }
    T* out = static_cast<T*>(to) + begin;
    for (uint64_t i = 0; i < length; ++i) out[i] = static_cast<T>(sums[i]);
  }
}

}  // namespace

uint64_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      return 0;
  }
}

// HCCL reduces no unsigned types and no double.
bool reduce(HcclDataType type, HcclReduceOp op, const std::vector<const void*>& from, void* to, uint64_t count) {
  if (op > HCCL_REDUCE_MIN) return false;
  switch (type) {
    case HCCL_DATA_TYPE_FP32:
      reduce_as<float, float>(op, from, to, count);
      return true;
    case HCCL_DATA_TYPE_FP16:
      reduce_as<_Float16, float>(op, from, to, count);
      return true;
    case HCCL_DATA_TYPE_BFP16:
      reduce_as<Bfloat16, float>(op, from, to, count);
      return true;
    case HCCL_DATA_TYPE_INT8:
      reduce_as<int8_t, int8_t>(op, from, to, count);
      return true;
    case HCCL_DATA_TYPE_INT16:
      reduce_as<int16_t, int16_t>(op, from, to, count);
      return true;
    case HCCL_DATA_TYPE_INT32:
      reduce_as<int32_t, int32_t>(op, from, to, count);
      return true;
    case HCCL_DATA_TYPE_INT64:
      reduce_as<int64_t, int64_t>(op, from, to, count);
      return true;
    default:
      return false;
  }
}

}  // namespace softnpu::hccl
