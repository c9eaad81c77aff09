// Matrix products of groups of rows, each with its own weight. Symbols: M rows, K inner, N columns, E groups.
#include "opapi/check.h"

namespace softnpu {
namespace {

struct Arguments {
  const char* op;
  std::vector<at::Tensor> x, weight, bias, scale, per_token_scale, out;
  int64_t activation;
};

// One product: rows [start, start + size) of x with weight `index`.
struct Group {
  int64_t index, start, size;
};

std::vector<at::Tensor> tensors(const aclTensorList* list) {
  return list == nullptr ? std::vector<at::Tensor>() : list->tensors();
}

// group_list's rows of each group. Type 0: [E] ends. Type 1: [E] sizes. Type 2: [E, 2] pairs (index, size), of which a
// size of 0 ends the list. All: within `rows`.
std::vector<Group> groups_of(const char* op, const at::Tensor& list, int64_t type, int64_t count, int64_t rows) {
  const auto values = list.to(at::kLong).contiguous();
  const int64_t* value = values.data_ptr<int64_t>();
  std::vector<Group> groups;
  int64_t end = 0;
  for (int64_t i = 0; i < list.size(0); ++i) {
    const int64_t index = type == 2 ? value[2 * i] : i;
    const int64_t size = type == 2 ? value[2 * i + 1] : type == 1 ? value[i] : value[i] - end;
    if (type == 2 && size == 0) break;
    TORCH_CHECK(index >= 0 && index < count, op, ": group_list names group ", index, " of ", count);
    TORCH_CHECK(size >= 0 && end + size <= rows, op, ": group_list gives group ", index, " rows [", end, ", ",
                end + size, ") of ", rows);
    groups.push_back({index, end, size});
    end += size;
  }
  return groups;
}

// Without a group_list: tensor i of x with weight i.
std::vector<Group> groups_of(const std::vector<at::Tensor>& x) {
  std::vector<Group> groups;
  int64_t start = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    groups.push_back({static_cast<int64_t>(i), start, x[i].size(0)});
    start += x[i].size(0);
  }
  return groups;
}

at::Tensor part(const std::vector<at::Tensor>& list, int64_t index) {
  return list.size() == 1 ? list[0][index] : list[index];
}

at::Tensor activated(const at::Tensor& y, int64_t type) {
  switch (type) {
    case 1:
      return at::relu(y);
    case 2:
      return at::gelu(y, "tanh");
    case 4:
      return y * at::sigmoid(1.702 * y);
    case 5:
      return at::silu(y);
    default:
      return y;
  }
}

// int8 x int8, exactly, in int32; then scale per column and per row, in float.
at::Tensor quantized_product(const Arguments& a, const Group& group, const at::Tensor& x, const at::Tensor& weight) {
  auto sum = at::matmul(x.to(at::kDouble), weight.to(at::kDouble)).to(at::kInt);
  if (!a.bias.empty()) sum = sum + part(a.bias, group.index);
  if (a.scale.empty()) return sum;
  auto y = sum.to(at::kFloat) * part(a.scale, group.index).to(at::kFloat);
  if (!a.per_token_scale.empty()) {
    y = y * a.per_token_scale[0].flatten().narrow(0, group.start, group.size).unsqueeze(1);
  }
  return activated(y, a.activation);
}

// Rounded once: products, sum and bias are in float.
at::Tensor product(const Arguments& a, const Group& group, const at::Tensor& x, const at::Tensor& weight) {
  if (x.scalar_type() == at::kChar) return quantized_product(a, group, x, weight);
  const auto y = at::matmul(x.to(at::kFloat), weight.to(at::kFloat));
  return a.bias.empty() ? y : y + part(a.bias, group.index).to(at::kFloat);
}

// Rows of no group stay as they are.
void run_by_rows(const Arguments& a, const std::vector<Group>& groups) {
  const bool one_weight = a.weight.size() == 1 && a.weight[0].dim() == 3;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = groups[i];
    const auto x = a.x.size() == 1 && a.x[0].dim() == 2 ? a.x[0].narrow(0, group.start, group.size) : a.x[i];
    TORCH_CHECK(a.x.size() == 1 || x.size(0) == group.size, a.op, ": group ", i, " has ", group.size,
                " rows, its x has ", x.size(0));
    const auto weight = one_weight ? a.weight[0][group.index] : a.weight[group.index];
    TORCH_CHECK(x.size(-1) == weight.size(0), a.op, ": x ", x.sizes(), " and weight ", weight.sizes(), " do not fit");
    const auto y = a.out.size() == 1 ? a.out[0].narrow(0, group.start, group.size) : a.out[i];
    y.copy_(product(a, group, x, weight).view(y.sizes()));
  }
}

// Groups of the inner dimension: y[e] = x[:, group e] @ weight[group e].
void run_by_inner(const Arguments& a, const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    EMULATED(group.size > 0, a.op, "group_type", "2 with an empty group");
    const auto x = a.x[0].narrow(1, group.start, group.size).to(at::kFloat);
    a.out[0][group.index].copy_(at::matmul(x, a.weight[0].narrow(0, group.start, group.size).to(at::kFloat)));
  }
}

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

size_t count_weights(const Arguments& a) {
  return a.weight.size() == 1 && a.weight[0].dim() == 3 ? a.weight[0].size(0) : a.weight.size();
}

void check(const Arguments& a) {
  check_counts(a, count_weights(a));
  a.x[0].scalar_type() == at::kChar ? check_int8(a) : check_float(a);
}

bool given(const aclTensorList* list) { return list != nullptr && !list->empty(); }

// What versions 4 and 5 have in common.
struct Call {
  Arguments arguments;
  at::Tensor group_list;
  int64_t group_type, group_list_type;

  void check_groups() const {
    const auto& a = arguments;
    TORCH_CHECK(group_list_type >= 0 && group_list_type <= 2, a.op, ": group_list_type = ", group_list_type);
    TORCH_CHECK(group_type == -1 || group_type == 0 || group_type == 2, a.op, ": group_type = ", group_type);
    if (group_list.defined()) {
      const int64_t dims = group_list_type == 2 ? 2 : 1;
      TORCH_CHECK(group_list.dim() == dims && group_list.scalar_type() == at::kLong, a.op, ": group_list ",
                  group_list.sizes(), " of ", group_list.scalar_type(), "; must be int64 with ", dims, " dimensions");
    }
    if (group_type == -1) {
      TORCH_CHECK(!group_list.defined() && a.x.size() == a.weight.size() && a.out.size() == a.weight.size(), a.op,
                  ": group_type = -1 has no group_list, and as many x and outputs as weights");
    } else {
      TORCH_CHECK(group_list.defined() || a.x.size() > 1, a.op, ": group_type = ", group_type, " needs a group_list");
      EMULATED(a.out.size() == 1, a.op, "number of outputs", a.out.size());
    }
    if (group_type == 2) {
      EMULATED(a.x.size() == 1 && a.weight.size() == 1, a.op, "number of weights with group_type = 2", a.weight.size());
      TORCH_CHECK(a.bias.empty() && a.x[0].scalar_type() != at::kChar, a.op, ": group_type = 2 with bias or int8");
      TORCH_CHECK(a.x[0].dim() == 2 && a.weight[0].dim() == 2, a.op, ": group_type = 2 needs x [M, K], weight [K, N]");
    } else if (group_list.defined()) {
      TORCH_CHECK(group_list.size(0) == static_cast<int64_t>(count_weights(a)), a.op, ": group_list has ",
                  group_list.size(0), " groups, there are ", count_weights(a), " weights");
    }
  }

  void run() const {
    const auto& a = arguments;
    if (!group_list.defined()) return run_by_rows(a, groups_of(a.x));
    if (group_type == 2) {
      return run_by_inner(a, groups_of(a.op, group_list, group_list_type, group_list.size(0), a.x[0].size(1)));
    }
    int64_t rows = 0;
    for (const at::Tensor& x : a.x) rows += x.size(0);
    run_by_rows(a, groups_of(a.op, group_list, group_list_type, count_weights(a), rows));
  }
};

Call prepare(const char* op, const aclTensorList* x, const aclTensorList* weight, const aclTensorList* bias,
             const aclTensorList* scale, const aclTensorList* per_token_scale, const aclTensorList* out,
             const aclTensor* group_list, int64_t group_type, int64_t group_list_type, int64_t activation) {
  const bool listed = group_list != nullptr && group_list->defined();
  Call call{{op, tensors(x), tensors(weight), tensors(bias), tensors(scale), tensors(per_token_scale), tensors(out),
             activation},
            listed ? static_cast<const at::Tensor&>(*group_list) : at::Tensor(),
            group_type,
            group_list_type};
  check(call.arguments);
  call.check_groups();
  return call;
}

void refuse(const char* op, const aclTensorList* offset, const aclTensorList* antiquant_scale,
            const aclTensorList* antiquant_offset) {
  EMULATED(!given(offset), op, "offset", "(not null)");
  EMULATED(!given(antiquant_scale), op, "antiquant_scale", "(not null)");
  EMULATED(!given(antiquant_offset), op, "antiquant_offset", "(not null)");
}

}  // namespace
}  // namespace softnpu

ACLNN_OP(aclnnGroupedMatmulV4, const aclTensorList* x, const aclTensorList* weight, const aclTensorList* bias,
         const aclTensorList* scale, const aclTensorList* offset, const aclTensorList* antiquant_scale,
         const aclTensorList* antiquant_offset, const aclTensorList* per_token_scale, const aclTensor* group_list,
         const aclTensorList*, const aclTensorList*, const aclTensorList*, int64_t, int64_t group_type,
         int64_t group_list_type, int64_t activation, aclTensorList* out, aclTensorList*, aclTensorList*) {
  softnpu::refuse("aclnnGroupedMatmulV4", offset, antiquant_scale, antiquant_offset);
  const auto call = softnpu::prepare("aclnnGroupedMatmulV4", x, weight, bias, scale, per_token_scale, out, group_list,
                                     group_type, group_list_type, activation);
  ACLNN_RUN(*out) { call.run(); };
}

ACLNN_OP(aclnnGroupedMatmulV5, const aclTensorList* x, const aclTensorList* weight, const aclTensorList* bias,
         const aclTensorList* scale, const aclTensorList* offset, const aclTensorList* antiquant_scale,
         const aclTensorList* antiquant_offset, const aclTensorList* per_token_scale, const aclTensor* group_list,
         const aclTensorList*, const aclTensorList*, const aclTensorList*, int64_t, int64_t group_type,
         int64_t group_list_type, int64_t activation, const aclIntArray*, aclTensorList* out, aclTensorList*,
         aclTensorList*) {
  softnpu::refuse("aclnnGroupedMatmulV5", offset, antiquant_scale, antiquant_offset);
  const auto call = softnpu::prepare("aclnnGroupedMatmulV5", x, weight, bias, scale, per_token_scale, out, group_list,
                                     group_type, group_list_type, activation);
  ACLNN_RUN(*out) { call.run(); };
}
