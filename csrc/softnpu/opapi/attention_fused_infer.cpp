// aclnnFusedInferAttentionScore, in the versions that torch_npu calls: they differ in what comes after these tensors
// and after these attributes.
#include "opapi/attention.h"
#include "opapi/check.h"

using softnpu::AttentionCall;
using softnpu::optional;

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

#define TENSORS_GIVEN                                                                                                 \
  query, key, value, pse, mask, q_lengths, kv_lengths, dequant1, quant1, dequant2, quant2, quant_offset2, antiquant,  \
      antiquant_offset, block_table, query_padding, kv_padding, key_antiquant, key_antiquant_offset, value_antiquant, \
      value_antiquant_offset, key_prefix, value_prefix, prefix_lengths, query_rope, key_rope, key_rope_antiquant
#define ATTRIBUTES_GIVEN                                                                                           \
  heads, scale, pre_tokens, next_tokens, layout, kv_heads, sparse_mode, inner_precise, block_size, antiquant_mode, \
      want_lse, key_antiquant_mode, value_antiquant_mode

namespace {

std::optional<std::vector<int64_t>> lengths(const aclIntArray* array) {
  if (array == nullptr || array->empty()) return std::nullopt;
  return *array;
}

AttentionCall make_call(const char* op, TENSORS, const aclTensor* sink, ATTRIBUTES) {
  const std::initializer_list<std::pair<const char*, const aclTensor*>> refused = {
      {"pse_shift", pse},
      {"dequant_scale1", dequant1},
      {"quant_scale1", quant1},
      {"dequant_scale2", dequant2},
      {"quant_scale2", quant2},
      {"quant_offset2", quant_offset2},
      {"antiquant_scale", antiquant},
      {"antiquant_offset", antiquant_offset},
      {"query_padding_size", query_padding},
      {"kv_padding_size", kv_padding},
      {"key_antiquant_scale", key_antiquant},
      {"key_antiquant_offset", key_antiquant_offset},
      {"value_antiquant_scale", value_antiquant},
      {"value_antiquant_offset", value_antiquant_offset},
      {"key_shared_prefix", key_prefix},
      {"value_shared_prefix", value_prefix},
      {"key_rope_antiquant_scale", key_rope_antiquant},
  };
  for (const auto& [name, tensor] : refused) EMULATED(tensor == nullptr, op, name, "a tensor");
  EMULATED(!lengths(prefix_lengths), op, "actual_shared_prefix_len", *prefix_lengths);
  EMULATED(antiquant_mode == 0, op, "antiquant_mode", antiquant_mode);
  EMULATED(key_antiquant_mode == 0, op, "key_antiquant_mode", key_antiquant_mode);
  EMULATED(value_antiquant_mode == 0, op, "value_antiquant_mode", value_antiquant_mode);
  EMULATED(inner_precise >= 0 && inner_precise <= 3, op, "inner_precise", inner_precise);  // bit 0: speed alone
  EMULATED(key->size() == 1 && value->size() == 1, op, "number of key tensors", key->size());
  AttentionCall call{
      .op = op,
      .query = *query,
      .key = *key->at(0),
      .value = *value->at(0),
      .query_rope = optional(query_rope),
      .key_rope = optional(key_rope),
      .mask = optional(mask),
      .block_table = optional(block_table),
      .sink = optional(sink),
      .q = lengths(q_lengths),
      .kv = lengths(kv_lengths),
      .heads = heads,
      .kv_heads = kv_heads == 0 ? heads : kv_heads,
      .scale = scale,
      .pre_tokens = pre_tokens,
      .next_tokens = next_tokens,
      .layout = layout,
      .sparse_mode = sparse_mode,
      .fix_masked_rows = (inner_precise & 2) != 0,
      .want_lse = want_lse,
      .block_size = block_size,
  };
  softnpu::check(call);
  return call;
}

}  // namespace

ACLNN_OP(aclnnFusedInferAttentionScoreV3, TENSORS, ATTRIBUTES, const aclTensor* out, const aclTensor* lse) {
  const auto call = make_call("npu_fused_infer_attention_score", TENSORS_GIVEN, nullptr, ATTRIBUTES_GIVEN);
  ACLNN_RUN(out, lse) { softnpu::attend(call, *out, *lse); };
}

ACLNN_OP(aclnnFusedInferAttentionScoreV4, TENSORS, const aclTensor* dequant_query, const aclTensor* sink, ATTRIBUTES,
         int64_t query_quant_mode, const aclTensor* out, const aclTensor* lse) {
  const auto call = make_call("npu_fused_infer_attention_score_v2", TENSORS_GIVEN, sink, ATTRIBUTES_GIVEN);
  EMULATED(dequant_query == nullptr, call.op, "dequant_scale_query", "a tensor");
  EMULATED(query_quant_mode == 0, call.op, "query_quant_mode", query_quant_mode);
  ACLNN_RUN(out, lse) { softnpu::attend(call, *out, *lse); };
}

// Asked for before a graph is captured, for the longest sequences that may come: the emulation needs no workspace.
extern "C" aclnnStatus aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize(TENSORS, ATTRIBUTES, const aclTensor*,
                                                                          const aclTensor*, uint64_t* workspace,
                                                                          aclOpExecutor** executor) {
  make_call("_npu_fused_infer_attention_score_get_max_workspace", TENSORS_GIVEN, nullptr, ATTRIBUTES_GIVEN);
  *workspace = 0;
  *executor = nullptr;
  return ACL_SUCCESS;
}
extern "C" aclnnStatus aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize(TENSORS, const aclTensor*,
                                                                          const aclTensor* sink, ATTRIBUTES, int64_t,
                                                                          const aclTensor*, const aclTensor*,
                                                                          uint64_t* workspace,
                                                                          aclOpExecutor** executor) {
  make_call("_npu_fused_infer_attention_score_v2_get_max_workspace", TENSORS_GIVEN, sink, ATTRIBUTES_GIVEN);
  *workspace = 0;
  *executor = nullptr;
  return ACL_SUCCESS;
}
