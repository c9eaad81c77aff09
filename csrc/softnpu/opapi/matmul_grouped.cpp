// Matrix products of groups of rows, each with its own weight.
#include "opapi/matmul_grouped.h"

#include "opapi/check.h"

namespace softnpu::grouped_matmul {
namespace {

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
             const aclTensor* group_list, int64_t group_type, int64_t group_list_type, int64_t activation,
             int64_t split_item) {
  const bool listed = group_list != nullptr && group_list->defined();
  Call call{{op, tensors(x), tensors(weight), tensors(bias), tensors(scale), tensors(per_token_scale), tensors(out),
             activation},
            listed ? static_cast<const at::Tensor&>(*group_list) : at::Tensor(),
            group_type,
            group_list_type};
  check(call.arguments);
  TORCH_CHECK(split_item >= 0 && split_item <= 3, op, ": split_item = ", split_item);
  TORCH_CHECK(split_item < 2 || out->size() == 1, op, ": split_item = ", split_item, " has one output, not ",
              out->size());
  call.check_groups();
  return call;
}

using NamedLists = std::initializer_list<std::pair<const char*, const aclTensorList*>>;

void refuse(const char* op, NamedLists lists) {
  for (const auto& [name, list] : lists) EMULATED(!given(list), op, name, "(not null)");
}

}  // namespace
}  // namespace softnpu::grouped_matmul

#define REFUSED_LISTS                                                                                           \
  {                                                                                                             \
    {"offset", offset}, {"antiquant_scale", antiquant_scale}, {"antiquant_offset", antiquant_offset},           \
        {"activation_input", activation_input}, {"activation_quant_scale", activation_quant_scale},             \
        {"activation_quant_offset", activation_quant_offset}, {"activation_feature_out", activation_feature}, { \
      "dyn_quant_scale_out", dynamic_scale                                                                      \
    }                                                                                                           \
  }

ACLNN_OP(aclnnGroupedMatmulV4, const aclTensorList* x, const aclTensorList* weight, const aclTensorList* bias,
         const aclTensorList* scale, const aclTensorList* offset, const aclTensorList* antiquant_scale,
         const aclTensorList* antiquant_offset, const aclTensorList* per_token_scale, const aclTensor* group_list,
         const aclTensorList* activation_input, const aclTensorList* activation_quant_scale,
         const aclTensorList* activation_quant_offset, int64_t split_item, int64_t group_type, int64_t group_list_type,
         int64_t activation, aclTensorList* out, aclTensorList* activation_feature, aclTensorList* dynamic_scale) {
  softnpu::grouped_matmul::refuse("aclnnGroupedMatmulV4", REFUSED_LISTS);
  const auto call =
      softnpu::grouped_matmul::prepare("aclnnGroupedMatmulV4", x, weight, bias, scale, per_token_scale, out, group_list,
                                       group_type, group_list_type, activation, split_item);
  ACLNN_RUN(*out) { call.run(); };
}

ACLNN_OP(aclnnGroupedMatmulV5, const aclTensorList* x, const aclTensorList* weight, const aclTensorList* bias,
         const aclTensorList* scale, const aclTensorList* offset, const aclTensorList* antiquant_scale,
         const aclTensorList* antiquant_offset, const aclTensorList* per_token_scale, const aclTensor* group_list,
         const aclTensorList* activation_input, const aclTensorList* activation_quant_scale,
         const aclTensorList* activation_quant_offset, int64_t split_item, int64_t group_type, int64_t group_list_type,
         int64_t activation, const aclIntArray* /*tuning_config: speed alone*/, aclTensorList* out,
         aclTensorList* activation_feature, aclTensorList* dynamic_scale) {
  softnpu::grouped_matmul::refuse("aclnnGroupedMatmulV5", REFUSED_LISTS);
  const auto call =
      softnpu::grouped_matmul::prepare("aclnnGroupedMatmulV5", x, weight, bias, scale, per_token_scale, out, group_list,
                                       group_type, group_list_type, activation, split_item);
  ACLNN_RUN(*out) { call.run(); };
}
