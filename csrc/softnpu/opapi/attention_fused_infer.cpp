// aclnnFusedInferAttentionScore, in the versions that torch_npu calls.
#include "opapi/attention.h"
#include "opapi/check.h"

using softnpu::AttentionCall;
using softnpu::optional;

namespace {

std::optional<std::vector<int64_t>> lengths(const aclIntArray* array) {
  if (array == nullptr || array->empty()) return std::nullopt;
  return *array;
}

// A pointer to what is not emulated.
struct Refused {
  const char* name;
  const void* given;
};

void refuse(const char* op, std::initializer_list<Refused> all) {
  for (const auto& [name, given] : all) EMULATED(given == nullptr, op, name, "a tensor");
}

}  // namespace

// Tensors up to key_rope, and the attributes, are the same in all versions.
#define TENSORS                                                                                                      \
  const aclTensor *query, const aclTensorList *key, const aclTensorList *value, const aclTensor *pse,                \
      const aclTensor *mask, const aclIntArray *q_lengths, const aclIntArray *kv_lengths, const aclTensor *dequant1, \
      const aclTensor *quant1, const aclTensor *dequant2, const aclTensor *quant2, const aclTensor *quant_offset2,   \
      const aclTensor *antiquant, const aclTensor *antiquant_offset, const aclTensor *block_table,                   \
      const aclTensor *query_padding, const aclTensor *kv_padding, const aclTensor *key_antiquant,                   \
      const aclTensor *key_antiquant_offset, const aclTensor *value_antiquant,                                       \
      const aclTensor *value_antiquant_offset, const aclTensor *key_prefix, const aclTensor *value_prefix,           \
      const aclIntArray *prefix_lengths, const aclTensor *query_rope, const aclTensor *key_rope,                     \
      const aclTensor *key_rope_antiquant
#define ATTRIBUTES                                                                                            \
  int64_t heads, double scale, int64_t pre_tokens, int64_t next_tokens, const char *layout, int64_t kv_heads, \
      int64_t sparse_mode, int64_t inner_precise, int64_t block_size, int64_t antiquant_mode, bool want_lse,  \
      int64_t key_antiquant_mode, int64_t value_antiquant_mode

#define MAKE_CALL(op, sink)                                                                                   \
  refuse(op, {{"pse_shift", pse},                                                                             \
              {"dequant_scale1", dequant1},                                                                   \
              {"quant_scale1", quant1},                                                                       \
              {"dequant_scale2", dequant2},                                                                   \
              {"quant_scale2", quant2},                                                                       \
              {"quant_offset2", quant_offset2},                                                               \
              {"antiquant_scale", antiquant},                                                                 \
              {"antiquant_offset", antiquant_offset},                                                         \
              {"query_padding_size", query_padding},                                                          \
              {"kv_padding_size", kv_padding},                                                                \
              {"key_antiquant_scale", key_antiquant},                                                         \
              {"key_antiquant_offset", key_antiquant_offset},                                                 \
              {"value_antiquant_scale", value_antiquant},                                                     \
              {"value_antiquant_offset", value_antiquant_offset},                                             \
              {"key_shared_prefix", key_prefix},                                                              \
              {"value_shared_prefix", value_prefix},                                                          \
              {"key_rope_antiquant_scale", key_rope_antiquant}});                                             \
  EMULATED(!lengths(prefix_lengths), op, "actual_shared_prefix_len", *prefix_lengths);                        \
  EMULATED(antiquant_mode == 0 && key_antiquant_mode == 0 && value_antiquant_mode == 0, op, "antiquant_mode", \
           antiquant_mode);                                                                                   \
  EMULATED(key->size() == 1 && value->size() == 1, op, "number of key tensors", key->size());                 \
  const AttentionCall call{op,                                                                                \
                           *query,                                                                            \
                           *key->at(0),                                                                       \
                           *value->at(0),                                                                     \
                           optional(query_rope),                                                              \
                           optional(key_rope),                                                                \
                           optional(mask),                                                                    \
                           optional(block_table),                                                             \
                           optional(sink),                                                                    \
                           lengths(q_lengths),                                                                \
                           lengths(kv_lengths),                                                               \
                           heads,                                                                             \
                           kv_heads == 0 ? heads : kv_heads,                                                  \
                           scale,                                                                             \
                           pre_tokens,                                                                        \
                           next_tokens,                                                                       \
                           layout,                                                                            \
                           sparse_mode,                                                                       \
                           (inner_precise & 2) != 0,                                                          \
                           block_size};                                                                       \
  softnpu::check(call)

#define RUN_CALL(out, lse)                                                \
  ACLNN_RUN(out, lse) {                                                   \
    softnpu::attend(call, *out, want_lse ? optional(lse) : at::Tensor()); \
    if (!want_lse && lse != nullptr) lse->zero_();                        \
  }

ACLNN_OP(aclnnFusedInferAttentionScoreV3, TENSORS, ATTRIBUTES, const aclTensor* out, const aclTensor* lse) {
  MAKE_CALL("npu_fused_infer_attention_score", nullptr);
  RUN_CALL(out, lse);
}

// Of npu_fused_infer_attention_score_v2, without key_antiquant ones.
ACLNN_OP(aclnnFusedInferAttentionScoreV4, TENSORS, const aclTensor* dequant_query, const aclTensor* sink, ATTRIBUTES,
         int64_t query_quant_mode, const aclTensor* out, const aclTensor* lse) {
  MAKE_CALL("npu_fused_infer_attention_score_v2", sink);
  refuse(call.op, {{"dequant_scale_query", dequant_query}});
  EMULATED(query_quant_mode == 0, call.op, "query_quant_mode", query_quant_mode);
  RUN_CALL(out, lse);
}
