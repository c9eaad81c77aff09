// Tokens sorted by expert, version 3: a range of experts, key-value counts, quantisation. vllm-ascend's
// npu_moe_init_routing_custom is the same.
#include "opapi/moe_routing.h"
#include "opapi/quant.h"

namespace softnpu {
namespace {

constexpr const char* kOp = "aclnnMoeInitRoutingV3";
constexpr int64_t kNotQuantized = -1, kStaticScale = 0, kScaleOfRow = 1;
constexpr int64_t kCumsum = 0, kCount = 1, kKeyValue = 2;

struct Arguments {
  const aclTensor *x, *expert_idx, *scale, *offset;
  int64_t capacity, expert_num, start, end, tokens_type, quant_mode;
  bool drop_pad, tokens_flag, scatter;
};
struct Outputs {
  const aclTensor *x, *row_idx, *tokens, *scale;
};

void check_attributes(const Arguments& a, int64_t active_num, int64_t drop_pad_mode, int64_t row_idx_type) {
  EMULATED(a.quant_mode >= kNotQuantized && a.quant_mode <= kScaleOfRow, kOp, "quant_mode", a.quant_mode);
  TORCH_CHECK(active_num >= -1, kOp, ": active_num = ", active_num);
  TORCH_CHECK(drop_pad_mode == 0 || drop_pad_mode == 1, kOp, ": drop_pad_mode = ", drop_pad_mode);
  TORCH_CHECK(row_idx_type == 0 || row_idx_type == 1, kOp, ": row_idx_type = ", row_idx_type);
  TORCH_CHECK(a.tokens_type >= kCumsum && a.tokens_type <= kKeyValue, kOp,
              ": expert_tokens_num_type = ", a.tokens_type);
  TORCH_CHECK(a.expert_num > 0 && a.expert_num <= (a.tokens_type == kKeyValue ? 5120 : 10240), kOp,
              ": expert_num = ", a.expert_num);
  TORCH_CHECK(0 <= a.start && a.start < a.end && a.end <= a.expert_num, kOp, ": active_expert_range = [", a.start, ", ",
              a.end, "] of ", a.expert_num, " experts");
  if (!a.drop_pad) return;
  TORCH_CHECK(a.capacity > 0 && a.capacity <= a.x->size(0), kOp, ": expert_capacity = ", a.capacity, " of ",
              a.x->size(0), " rows");
  TORCH_CHECK(a.start == 0 && a.end == a.expert_num, kOp, ": drop_pad_mode = 1 needs all experts, not [", a.start, ", ",
              a.end, "]");
  TORCH_CHECK(!a.tokens_flag || a.tokens_type == kCount, kOp,
              ": drop_pad_mode = 1 has expert_tokens_num_type = 1 only, not ", a.tokens_type);
  EMULATED(!a.scatter, kOp, "row_idx_type", "1 with drop_pad_mode = 1");
}

void check_tensors(const Arguments& a) {
  const auto& x = *a.x;
  TORCH_CHECK(x.dim() == 2 && a.expert_idx->dim() == 2 && x.size(0) == a.expert_idx->size(0), kOp, ": x ", x.sizes(),
              " and expert_idx ", a.expert_idx->sizes(), " do not fit");
  TORCH_CHECK(x.is_floating_point() || x.scalar_type() == at::kChar, kOp, ": x is ", x.scalar_type());
  TORCH_CHECK(x.is_floating_point() || a.quant_mode == kNotQuantized, kOp, ": int8 x with quant_mode = ", a.quant_mode);
  TORCH_CHECK(a.expert_idx->scalar_type() == at::kInt, kOp, ": expert_idx is ", a.expert_idx->scalar_type(),
              ", not int32");
  if (a.quant_mode == kStaticScale) {
    TORCH_CHECK(a.scale != nullptr && a.offset != nullptr && a.scale->numel() == 1 && a.offset->numel() == 1, kOp,
                ": quant_mode = 0 needs scale [1] and offset [1]");
    return;
  }
  TORCH_CHECK(a.offset == nullptr, kOp, ": offset with quant_mode = ", a.quant_mode);
  if (a.scale == nullptr) return;
  const auto sizes = a.scale->sizes();
  const bool fits = a.quant_mode == kNotQuantized ? sizes == at::IntArrayRef{x.size(0)}
                                                  : sizes == at::IntArrayRef{a.end - a.start, x.size(1)} ||
                                                        sizes == at::IntArrayRef{1, x.size(1)};
  TORCH_CHECK(fits, kOp, ": scale ", sizes, " does not fit quant_mode = ", a.quant_mode, ", x ", x.sizes(), " and ",
              a.end - a.start, " experts");
}

// Rows `rows` of x for `experts`, quantised where asked: {values, scales or undefined}.
std::pair<at::Tensor, at::Tensor> expand(const Arguments& a, const at::Tensor& tokens, const at::Tensor& experts) {
  const auto x = a.x->index_select(0, tokens);
  if (a.quant_mode == kNotQuantized) {
    return {x, a.scale == nullptr ? at::Tensor() : a.scale->index_select(0, tokens)};
  }
  const auto wide = x.to(at::kFloat);
  if (a.quant_mode == kStaticScale) {
    const auto values = at::round(wide * a.scale->flatten() + a.offset->flatten());
    return {values.clamp(-128, 127).to(at::kChar), at::Tensor()};
  }
  if (a.scale == nullptr) return quantize_rows(wide);
  const at::Tensor& smooth = *a.scale;
  return quantize_rows(wide * (smooth.size(0) == 1 ? smooth : smooth.index_select(0, experts - a.start)));
}

// Pairs (expert, count) of the experts that have rows, and zeros after them.
void write_key_value(const Routing& routing, int64_t start, int64_t expert_num, const aclTensor* out) {
  const auto experts = routing.counts.nonzero().squeeze(-1);
  const auto pairs = at::stack({experts + start, routing.counts.index_select(0, experts)}, 1);
  out->narrow(0, 0, std::min(routing.counts.size(0) + 1, expert_num)).zero_();
  out->narrow(0, 0, pairs.size(0)).copy_(pairs);
}

void write_tokens(const Arguments& a, const Routing& routing, const aclTensor* out) {
  if (a.tokens_type == kKeyValue) return write_key_value(routing, a.start, a.expert_num, out);
  write(out, a.tokens_type == kCumsum ? routing.counts.cumsum(0) : routing.counts);
}

// What no row is written to stays as it was.
void init_routing(const Arguments& a, const Outputs& out) {
  check_values(kOp, "expert_idx", *a.expert_idx, -1, a.expert_num);
  const auto routing = route(*a.expert_idx, a.start, a.end);
  const int64_t assignments = a.expert_idx->numel(), k = std::max<int64_t>(a.expert_idx->size(1), 1);
  if (a.tokens_flag) write_tokens(a, routing, out.tokens);

  at::Tensor destinations = at::arange(routing.rows.size(0));
  at::Tensor written = destinations.lt(out.x->size(0));
  if (a.drop_pad) {
    destinations = slots(routing, a.capacity);
    written = destinations.ge(0);
    out.x->zero_();
    if (a.quant_mode == kScaleOfRow || a.scale != nullptr) out.scale->zero_();
  }
  if (a.scatter) {
    out.row_idx->narrow(0, 0, routing.rows.size(0)).copy_(routing.rows);
  } else {
    write(out.row_idx, gather_index(routing, destinations, assignments));
  }
  const auto tokens = routing.rows.masked_select(written).floor_divide(k);
  const auto [values, scales] = expand(a, tokens, routing.experts.masked_select(written));
  const auto to = destinations.masked_select(written);
  out.x->flatten(0, -2).index_copy_(0, to, values);
  if (scales.defined()) out.scale->index_copy_(0, to, scales);
}

}  // namespace
}  // namespace softnpu

ACLNN_OP(aclnnMoeInitRoutingV3, const aclTensor* x, const aclTensor* expert_idx, const aclTensor* scale,
         const aclTensor* offset, int64_t active_num, int64_t expert_capacity, int64_t expert_num,
         int64_t drop_pad_mode, int64_t tokens_type, bool tokens_flag, int64_t quant_mode, const aclIntArray* range,
         int64_t row_idx_type, aclTensor* expanded_x, aclTensor* expanded_row_idx, aclTensor* expert_tokens,
         aclTensor* expanded_scale) {
  TORCH_CHECK(range == nullptr || range->empty() || range->size() == 2, softnpu::kOp, ": active_expert_range has ",
              range->size(), " values");
  const bool whole = range == nullptr || range->empty();
  const softnpu::Arguments arguments{x,
                                     expert_idx,
                                     scale,
                                     offset,
                                     expert_capacity,
                                     expert_num,
                                     whole ? 0 : range->at(0),
                                     whole ? expert_num : range->at(1),
                                     tokens_type,
                                     quant_mode,
                                     drop_pad_mode == 1,
                                     tokens_flag,
                                     row_idx_type == 1};
  softnpu::check_tensors(arguments);
  softnpu::check_attributes(arguments, active_num, drop_pad_mode, row_idx_type);
  const softnpu::Outputs outputs{expanded_x, expanded_row_idx, expert_tokens, expanded_scale};
  ACLNN_RUN(expanded_x, expanded_row_idx, expert_tokens, expanded_scale) { softnpu::init_routing(arguments, outputs); };
}
