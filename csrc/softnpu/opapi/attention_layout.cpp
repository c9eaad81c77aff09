// Where the sequences of an attention call are: packed, padded or paged.
#include "opapi/attention.h"
#include "opapi/check.h"

namespace softnpu {

AttentionLayout::AttentionLayout(const AttentionCall& call) {
  const auto cut = call.layout.find('_');
  in = call.layout.substr(0, cut);
  out = cut == std::string::npos ? in : call.layout.substr(cut + 1);
  const auto known = {"BSH", "BSND", "BNSD", "TND", "NTD"};
  EMULATED(std::count(known.begin(), known.end(), in) == 1, call.op, "input_layout", call.layout);
  EMULATED(std::count(known.begin(), known.end(), out) == 1 || out == "NBSD", call.op, "input_layout", call.layout);
}

at::Tensor heads_first(const at::Tensor& tensor, const std::string& layout, int64_t heads) {
  if (layout == "BSH") return tensor.view({tensor.size(0), tensor.size(1), heads, -1}).transpose(1, 2);
  if (layout == "BSND") return tensor.transpose(1, 2);
  if (layout == "TND" || layout == "NBSD") return tensor.transpose(0, 1);
  return tensor;  // BNSD, NTD
}

namespace {

std::vector<Span> packed_spans(const char* op, const char* name, const std::optional<std::vector<int64_t>>& ends) {
  TORCH_CHECK(ends.has_value(), op, ": a layout with T needs ", name);
  std::vector<Span> spans;
  int64_t start = 0;
  for (const int64_t end : *ends) {
    TORCH_CHECK(end >= start, op, ": ", name, " = ", *ends, " falls; in a layout with T they are running sums");
    spans.push_back({start, end - start});
    start = end;
  }
  return spans;
}

// Of `sequences` sequences padded to `longest`: all of it, or what `lengths` says (one number stands for all).
std::vector<Span> padded_spans(const char* op, const char* name, const std::optional<std::vector<int64_t>>& lengths,
                               int64_t sequences, int64_t longest) {
  if (!lengths) return std::vector<Span>(sequences, Span{0, longest});
  const auto given = static_cast<int64_t>(lengths->size());
  TORCH_CHECK(given == 1 || given >= sequences, op, ": ", name, " has ", given, " lengths for ", sequences,
              " sequences");
  std::vector<Span> spans;
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t length = (*lengths)[given == 1 ? 0 : b];
    TORCH_CHECK(length >= 0 && length <= longest, op, ": ", name, " has ", length, "; 0 to ", longest, " are there");
    spans.push_back({0, length});
  }
  return spans;
}

}  // namespace

std::vector<Span> query_spans(const AttentionCall& call, const AttentionLayout& layout) {
  const auto query = heads_first(call.query, layout.in, call.heads);
  if (!layout.packed()) {
    return padded_spans(call.op, "actual_seq_lengths", call.q, query.size(0), query.size(2));
  }
  const auto spans = packed_spans(call.op, "actual_seq_lengths", call.q);
  const int64_t end = spans.empty() ? 0 : spans.back().start + spans.back().length;
  TORCH_CHECK(end == query.size(1), call.op, ": the last of actual_seq_lengths is ", end,
              ", and query has T = ", query.size(1), "; they must be equal");
  return spans;
}

std::vector<Span> kv_spans(const AttentionCall& call, const AttentionLayout& layout, int64_t sequences) {
  if (call.block_table.defined()) {
    TORCH_CHECK(call.kv.has_value(), call.op, ": a block_table needs actual_seq_lengths_kv");
    TORCH_CHECK(call.block_table.dim() == 2 && call.block_table.size(0) == sequences, call.op, ": block_table is ",
                call.block_table.sizes(), "; it needs one row for each of ", sequences, " sequences");
    return padded_spans(call.op, "actual_seq_lengths_kv", call.kv, sequences,
                        call.block_table.size(1) * call.block_size);
  }
  const auto key = heads_first(call.key, layout.in, call.kv_heads);
  if (!layout.packed()) return padded_spans(call.op, "actual_seq_lengths_kv", call.kv, sequences, key.size(2));
  const auto spans = packed_spans(call.op, "actual_seq_lengths_kv", call.kv);
  TORCH_CHECK(static_cast<int64_t>(spans.size()) == sequences, call.op, ": actual_seq_lengths_kv is of ", spans.size(),
              " sequences, and actual_seq_lengths of ", sequences);
  const int64_t end = spans.empty() ? 0 : spans.back().start + spans.back().length;
  TORCH_CHECK(end <= key.size(1), call.op, ": the last of actual_seq_lengths_kv is ", end,
              ", and key has T = ", key.size(1));
  return spans;
}

at::Tensor tokens(const at::Tensor& heads_first, const AttentionLayout& layout, int64_t b, Span span) {
  return (layout.packed() ? heads_first : heads_first.select(0, b)).narrow(1, span.start, span.length);
}

at::Tensor paged_tokens(const AttentionCall& call, const at::Tensor& cache, int64_t b, int64_t length) {
  const int64_t in_block = cache.size(cache.dim() == 5 ? 3 : cache.dim() == 4 ? 2 : 1);
  TORCH_CHECK(in_block == call.block_size, call.op, ": a cache of ", cache.sizes(), " has blocks of ", in_block,
              " tokens, and block_size is ", call.block_size, "; caches are [blocks, block_size, N * D] or ",
              "[blocks, N, block_size, D]");
  const int64_t blocks = (length + call.block_size - 1) / call.block_size;
  const auto ids = call.block_table.select(0, b).narrow(0, 0, blocks).to(at::kLong);
  check_values(call.op, "block_table", ids, 0, cache.size(0) - 1);
  const auto pages = cache.index_select(0, ids);
  at::Tensor all;  // [N, blocks, block_size, D]
  if (cache.dim() == 3) {
    all = pages.view({blocks, call.block_size, call.kv_heads, cache.size(2) / call.kv_heads}).permute({2, 0, 1, 3});
  } else if (cache.dim() == 4) {
    all = pages.transpose(0, 1);
  } else {
    all = pages.permute({1, 0, 3, 2, 4}).flatten(3);
  }
  return all.flatten(1, 2).narrow(1, 0, length);
}

}  // namespace softnpu
