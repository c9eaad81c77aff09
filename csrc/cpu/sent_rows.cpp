// All-to-all by row on the host: which rank gets which token, the bytes of the rows, and views of received ones.
// comm/row_plan.py and ops/row_bytes.py hold the plain form. Symbols: T tokens; K top-k; R ranks; S rows sent.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace ascend_moe::cpu {

namespace {

constexpr int64_t kSerialBytes = 128 * 1024;  // moved by one thread: waking the others would take longer

void check_ids(const at::Tensor& ids, const at::Tensor& table, at::ScalarType table_type) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong, "ids must be int32 or int64");
  TORCH_CHECK_VALUE(ids.dim() == 2, "ids must be [rows, K], not ", ids.sizes());
  TORCH_CHECK_TYPE(table.scalar_type() == table_type, "the table must be ", table_type);
  TORCH_CHECK_VALUE(table.dim() == 1 && table.is_contiguous() && table.numel() >= 2, "the table must be [E + 2]");
}

// The rank of every choice, -1 where it has none or an earlier choice of the token has the same.
template <class Id>
void find_ranks(const at::Tensor& ids, const at::Tensor& owners, int64_t ranks, int64_t* of_choice, Id* index,
                int64_t* counts) {
  const int64_t tokens = ids.size(0), top_k = ids.size(1), last_entry = owners.numel() - 1;
  const Id* data = ids.const_data_ptr<Id>();
  const int64_t* owner = owners.const_data_ptr<int64_t>();
  std::vector<int64_t> last(ranks, -1);  // the token that went to the rank last
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t id = data[t * ids.stride(0) + k * ids.stride(1)];
      const int64_t entry = std::clamp<int64_t>(id, -1, last_entry - 1) + 1, rank = owner[entry];
      index[t * top_k + k] = static_cast<Id>(entry);
      const bool is_new = rank >= 0 && rank < ranks && last[rank] != t;
      of_choice[t * top_k + k] = is_new ? rank : -1;
      if (!is_new) continue;
      last[rank] = t;
      ++counts[rank];
    }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> plan_rows(const at::Tensor& ids, const at::Tensor& owners,
                                                                     int64_t ranks) {
  check_ids(ids, owners, at::kLong);
  const int64_t tokens = ids.size(0), top_k = ids.size(1), width = std::min(top_k, ranks);
  at::Tensor index = at::empty({tokens, top_k}, ids.options());
  at::Tensor counts = at::zeros({ranks}, owners.options());
  at::Tensor slots = at::full({tokens, width}, -1, owners.options().dtype(at::kInt));
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  std::vector<int64_t> of_choice(tokens * top_k);
  if (ids.scalar_type() == at::kInt)
    find_ranks(ids, owners, ranks, of_choice.data(), index.mutable_data_ptr<int32_t>(), count);
  else
    find_ranks(ids, owners, ranks, of_choice.data(), index.mutable_data_ptr<int64_t>(), count);

  std::vector<int64_t> next(ranks, 0);  // the next row of each rank
  for (int64_t r = 1; r < ranks; ++r) next[r] = next[r - 1] + count[r - 1];
  at::Tensor sources = at::empty({ranks > 0 ? next[ranks - 1] + count[ranks - 1] : 0}, owners.options());
  int64_t* source = sources.mutable_data_ptr<int64_t>();
  int32_t* slot = slots.mutable_data_ptr<int32_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t* end = slot + t * width;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t rank = of_choice[t * top_k + k];
      if (rank < 0) continue;
      source[next[rank]] = t;
      *end++ = static_cast<int32_t>(next[rank]++);
    }
    std::sort(slot + t * width, end);  // rows follow ranks
  }
  return {index, counts, slots, sources};
}

at::Tensor look_up(const at::Tensor& index, const at::Tensor& table) {
  check_ids(index, table, index.scalar_type());
  at::Tensor out = at::empty(index.sizes(), index.options());
  const int64_t rows = index.size(0), top_k = index.size(1), entries = table.numel();
  const auto fill = [&]<class Id>(Id) {
    const Id *from = index.const_data_ptr<Id>(), *entry = table.const_data_ptr<Id>();
    Id* to = out.mutable_data_ptr<Id>();
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < top_k; ++k) {
        const Id at = from[i * index.stride(0) + k * index.stride(1)];
        TORCH_CHECK_INDEX(at >= 0 && at < entries, "index ", at, " of a table of ", entries);
        *to++ = entry[at];
      }
  };
  if (index.scalar_type() == at::kInt)
    fill(int32_t{});
  else
    fill(int64_t{});
  return out;
}

at::Tensor pack_rows(at::TensorList tensors, const at::Tensor& sources, at::IntArrayRef starts, int64_t row_bytes) {
  TORCH_CHECK_VALUE(tensors.size() == starts.size() && !tensors.empty(), "one start for each of 1 or more tensors");
  TORCH_CHECK_TYPE(sources.scalar_type() == at::kLong, "sources must be int64");
  TORCH_CHECK_VALUE(sources.dim() == 1 && sources.is_contiguous(), "sources must be contiguous [S]");
  const int64_t rows = sources.numel();
  at::Tensor wire = at::empty({rows, row_bytes}, sources.options().dtype(at::kByte));
  const int64_t* source = sources.const_data_ptr<int64_t>();
  char* to = static_cast<char*>(wire.mutable_data_ptr());
  for (size_t c = 0; c < tensors.size(); ++c) {
    const at::Tensor x = tensors[c].contiguous();
    const int64_t available = x.size(0), start = starts[c];
    const int64_t bytes = available > 0 ? static_cast<int64_t>(x.nbytes()) / available : 0;
    TORCH_CHECK_VALUE(start >= 0 && start <= row_bytes - bytes, "column ", c, " does not fit a row of ", row_bytes);
    const char* from = static_cast<const char*>(x.const_data_ptr());
    at::parallel_for(
        0, rows, std::max<int64_t>(1, kSerialBytes / std::max<int64_t>(1, bytes)), [&](int64_t first, int64_t last) {
          for (int64_t i = first; i < last; ++i) {
            TORCH_CHECK_INDEX(source[i] >= 0 && source[i] < available, "row ", source[i], " of ", available);
            std::memcpy(to + i * row_bytes + start, from + source[i] * bytes, bytes);
          }
        });
  }
  return wire;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ascend_moe, m) {
  m.def("plan_rows(Tensor ids, Tensor owners, int ranks) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("look_up(Tensor index, Tensor table) -> Tensor");
  m.def("pack_rows(Tensor[] xs, Tensor sources, int[] starts, int row_bytes) -> Tensor");
}

TORCH_LIBRARY_IMPL(ascend_moe, CPU, m) {
  m.impl("plan_rows", plan_rows);
  m.impl("look_up", look_up);
  m.impl("pack_rows", pack_rows);
}

}  // namespace ascend_moe::cpu
