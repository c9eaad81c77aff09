#include "opapi/check.h"
#include "opapi/matmul_grouped.h"

namespace softnpu::grouped_matmul {
namespace {

void check_float(const Arguments& a) {
  const auto type = a.x[0].scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, a.op, ": x is ", type);
  EMULATED(a.weight[0].scalar_type() == type, a.op, "type of weight",
           c10::toString(a.weight[0].scalar_type()) + std::string(" with x of ") + c10::toString(type));
  TORCH_CHECK(a.out[0].scalar_type() == type, a.op, ": output is ", a.out[0].scalar_type(), " for x of ", type);
  const auto bias_type = type == at::kHalf ? at::kHalf : at::kFloat;
  TORCH_CHECK(a.bias.empty() || a.bias[0].scalar_type() == bias_type, a.op, ": bias is ", a.bias[0].scalar_type(),
              ", must be ", bias_type, " for x of ", type);
  TORCH_CHECK(a.scale.empty() && a.per_token_scale.empty(), a.op, ": scale or per_token_scale with x of ", type);
  TORCH_CHECK(a.activation == 0, a.op, ": act_type = ", a.activation, " with x of ", type);
}

void check_int8(const Arguments& a) {
  const auto out = a.out[0].scalar_type();
  EMULATED(a.weight[0].scalar_type() == at::kChar, a.op, "type of weight with int8 x",
           c10::toString(a.weight[0].scalar_type()));
  TORCH_CHECK(a.x.size() == 1 && a.weight.size() == 1 && a.out.size() == 1 && a.weight[0].dim() == 3, a.op,
              ": int8 x needs one x, one weight [E, K, N] and one output");
  TORCH_CHECK(a.bias.empty() || a.bias[0].scalar_type() == at::kInt, a.op, ": bias is ", a.bias[0].scalar_type(),
              ", must be int32 with int8 x");
  if (out == at::kInt) {
    TORCH_CHECK(a.scale.empty() && a.per_token_scale.empty() && a.activation == 0, a.op,
                ": an int32 output is not scaled");
    return;
  }
  EMULATED(out == at::kHalf || out == at::kBFloat16, a.op, "output type with int8 x", c10::toString(out));
  const auto scale_type = out == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
  TORCH_CHECK(a.scale.size() == 1, a.op, ": int8 x with output ", out, " needs one scale");
  // The documentation asks for a bfloat16 scale where the output is; float is taken by the host code, and used, too.
  TORCH_CHECK(a.scale[0].scalar_type() == scale_type || a.scale[0].scalar_type() == at::kFloat, a.op, ": scale is ",
              a.scale[0].scalar_type(), ", must be ", scale_type, " for output ", out);
  const std::vector<int64_t> expected{a.weight[0].size(0), a.weight[0].size(2)};
  TORCH_CHECK(a.scale[0].sizes() == expected, a.op, ": scale ", a.scale[0].sizes(), ", must be ",
              at::IntArrayRef(expected));
  TORCH_CHECK(a.per_token_scale.empty() ||
                  (a.per_token_scale[0].numel() == a.x[0].size(0) && a.per_token_scale[0].scalar_type() == at::kFloat),
              a.op, ": per_token_scale must be float [", a.x[0].size(0), "]");
  TORCH_CHECK(a.activation >= 0 && a.activation <= 5 && a.activation != 3, a.op, ": act_type = ", a.activation);
}

void check_counts(const Arguments& a, size_t weights) {
  TORCH_CHECK(!a.x.empty() && !a.weight.empty() && !a.out.empty(), a.op, ": x, weight or output is empty");
  TORCH_CHECK(a.bias.empty() || a.bias.size() == a.weight.size(), a.op, ": ", a.bias.size(), " biases, ",
              a.weight.size(), " weights");
  TORCH_CHECK(a.x.size() == 1 || a.x.size() == weights, a.op, ": ", a.x.size(), " x, ", weights, " weights");
  TORCH_CHECK(a.out.size() == 1 || a.out.size() == weights, a.op, ": ", a.out.size(), " outputs, ", weights,
              " weights");
}

}  // namespace

size_t count_weights(const Arguments& a) {
  return a.weight.size() == 1 && a.weight[0].dim() == 3 ? a.weight[0].size(0) : a.weight.size();
}

void check(const Arguments& a) {
  check_counts(a, count_weights(a));
  a.x[0].scalar_type() == at::kChar ? check_int8(a) : check_float(a);
}

}  // namespace softnpu::grouped_matmul
