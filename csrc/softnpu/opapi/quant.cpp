// Dynamic quantisation.
#include "opapi/quant.h"

#include "opapi/check.h"

namespace softnpu {
namespace {

// x in float, times the smooth scales: one vector [H], or [E, H] with row e for the rows up to groups[e] (exclusive).
at::Tensor smoothed(const char* op, const at::Tensor& x, const at::Tensor& smooth, const at::Tensor& groups) {
  const auto wide = x.to(at::kFloat);
  if (!smooth.defined()) return wide;
  const auto scale = smooth.to(at::kFloat);
  if (!groups.defined()) return wide * scale;
  const auto ends = groups.to(at::kLong);
  const auto sizes = at::diff(ends, 1, 0, at::zeros({1}, at::kLong));
  const int64_t rows = x.numel() / std::max<int64_t>(x.size(-1), 1);
  check_values(op, "difference of group_index", sizes, 0, rows);
  TORCH_CHECK(ends[-1].item<int64_t>() == rows, op, ": group_index ends at ", ends[-1].item<int64_t>(), ", x has ",
              rows, " rows");
  return wide * at::repeat_interleave(scale, sizes, 0).view_as(x);
}

void check_smooth(const char* op, const at::Tensor& x, const at::Tensor& smooth, const at::Tensor& groups) {
  TORCH_CHECK(!groups.defined() || smooth.defined(), op, ": group_index without smooth_scales");
  if (!smooth.defined()) return;
  TORCH_CHECK(smooth.scalar_type() == x.scalar_type(), op, ": smooth_scales are ", smooth.scalar_type(), ", x is ",
              x.scalar_type());
  TORCH_CHECK(smooth.dim() == (groups.defined() ? 2 : 1) && smooth.size(-1) == x.size(-1), op, ": smooth_scales ",
              smooth.sizes(), " do not fit x ", x.sizes());
  TORCH_CHECK(!groups.defined() || (groups.dim() == 1 && groups.size(0) == smooth.size(0)), op,
              ": one group_index per row of smooth_scales");
}

void dynamic_quant(const char* op, const at::Tensor& x, const at::Tensor& smooth, const at::Tensor& groups,
                   const aclTensor* y, const aclTensor* scale, const aclTensor* offset) {
  const auto wide = smoothed(op, x, smooth, groups);
  if (offset == nullptr) {
    const auto [values, scales] = quantize_rows(wide);
    write(y, values);
    write(scale, scales);
    return;
  }
  const auto [low, high] = at::aminmax(wide, -1, true);
  const auto step = (high - low) / 255;
  const auto zero = 127 - high / step;
  write(y, at::round(wide / step + zero).nan_to_num(0).clamp(-128, 127));
  write(scale, step.squeeze(-1));
  write(offset, zero.squeeze(-1));
}

}  // namespace

std::pair<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& x) {
  const auto wide = x.to(at::kFloat);
  if (wide.numel() == 0) return {at::empty(x.sizes(), at::kChar), at::zeros(x.sizes().slice(0, x.dim() - 1))};
  const auto scale = wide.abs().amax(-1, true) / 127;
  // 0 / 0 is NaN, which the hardware casts to 0.
  const auto values = at::round(wide / scale).nan_to_num(0).clamp(-128, 127);
  return {values.to(at::kChar), scale.squeeze(-1)};
}

}  // namespace softnpu

using softnpu::optional;

ACLNN_OP(aclnnDynamicQuantV2, const aclTensor* x, const aclTensor* smooth, const aclTensor* groups, aclDataType type,
         aclTensor* y, aclTensor* scale, aclTensor* offset) {
  constexpr const char* op = "aclnnDynamicQuantV2";
  EMULATED(type == ACL_INT8, op, "dst_type (aclDataType)", static_cast<int>(type));
  TORCH_CHECK(x->scalar_type() == at::kHalf || x->scalar_type() == at::kBFloat16, op, ": x is ", x->scalar_type(),
              ", not float16 or bfloat16");
  softnpu::check_smooth(op, *x, optional(smooth), optional(groups));
  ACLNN_RUN(y, scale, offset) { softnpu::dynamic_quant(op, *x, optional(smooth), optional(groups), y, scale, offset); };
}
