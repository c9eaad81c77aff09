// Rows into the batched format and back: which slot every choice has, the copies of the rows, and weighted sums of
// slots. comm/batched_rows.py holds the plain form. Symbols: n rows; K top-k; E_l local experts; H hidden size.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

namespace ascend_moe::cpu {

namespace {

constexpr int64_t kSerialBytes = 128 * 1024;  // moved by one thread: waking the others would take longer
constexpr int64_t kColumns = 512;             // fp32 sums of one row that stay in L1

// Runs work(first, last) over rows that move `row_bytes` each.
template <class F>
void for_rows(int64_t rows, int64_t row_bytes, const F& work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kSerialBytes / std::max<int64_t>(1, row_bytes)), work);
}

void check_slots(const at::Tensor& slots, int64_t rows) {
  TORCH_CHECK_TYPE(slots.scalar_type() == at::kInt, "slots must be int32");
  TORCH_CHECK_VALUE(slots.dim() == 2 && slots.is_contiguous() && slots.size(0) == rows, "slots ", slots.sizes(),
                    " must be contiguous [", rows, ", K]");
}

template <class Id>
void fill_slots(const at::Tensor& ids, const int32_t* map, int64_t num_ids, int64_t num_local, int32_t* slots,
                int32_t* counts) {
  const int64_t rows = ids.size(0), top_k = ids.size(1);
  const Id* data = ids.const_data_ptr<Id>();
  // The last row that took a slot of the expert: a row that names it twice has one.
  std::vector<int64_t> last(num_local, -1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t k = 0; k < top_k; ++k) {
      const Id id = data[i * ids.stride(0) + k * ids.stride(1)];
      const int64_t expert = id >= 0 && id < num_ids ? map[id] : -1;
      int32_t& slot = slots[i * top_k + k];
      if (expert < 0 || expert >= num_local) {
        slot = -1;
        continue;
      }
      if (last[expert] != i) ++counts[expert];
      last[expert] = i;
      slot = static_cast<int32_t>(expert * rows + counts[expert] - 1);
    }
}

std::tuple<at::Tensor, at::Tensor> plan_slots(const at::Tensor& ids, const at::Tensor& expert_map, int64_t num_local) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong, "topk_ids must be int32 or int64");
  TORCH_CHECK_VALUE(ids.dim() == 2, "topk_ids must be [rows, K]");
  TORCH_CHECK_TYPE(expert_map.scalar_type() == at::kInt && expert_map.is_contiguous() && expert_map.dim() == 1,
                   "expert_map must be contiguous int32 [E]");
  at::Tensor slots = at::empty(ids.sizes(), expert_map.options());
  at::Tensor counts = at::zeros({num_local}, expert_map.options());
  const auto fill = ids.scalar_type() == at::kInt ? fill_slots<int32_t> : fill_slots<int64_t>;
  fill(ids, expert_map.const_data_ptr<int32_t>(), expert_map.numel(), num_local, slots.mutable_data_ptr<int32_t>(),
       counts.mutable_data_ptr<int32_t>());
  return {slots, counts};
}

// Rows [n, ...] whose inner part is contiguous, as bytes.
int64_t inner_bytes(const at::Tensor& x) {
  int64_t numel = 1;
  for (int64_t d = x.dim() - 1; d > 0; --d) {
    TORCH_CHECK_VALUE(x.size(d) == 1 || x.stride(d) == numel, "a row of strides ", x.strides(), " is not contiguous");
    numel *= x.size(d);
  }
  return numel * x.element_size();
}

void scatter_rows(const at::Tensor& x, const at::Tensor& slots, const at::Tensor& out) {
  TORCH_CHECK_VALUE(x.dim() > 0 && out.dim() == x.dim() && out.sizes().slice(1) == x.sizes().slice(1), "rows ",
                    x.sizes(), " do not fit ", out.sizes());
  TORCH_CHECK_TYPE(x.scalar_type() == out.scalar_type(), "x and out must have one dtype");
  TORCH_CHECK_VALUE(out.is_contiguous(), "out must be contiguous");
  check_slots(slots, x.size(0));
  const int64_t top_k = slots.size(1), bytes = inner_bytes(x), stride = x.stride(0) * x.element_size();
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t limit = out.size(0);
  for_rows(x.size(0), bytes * top_k, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t s = slot[i * top_k + k];
        if (s < 0) continue;
        TORCH_CHECK_INDEX(s < limit, "slot ", s, " of ", limit, " rows");
        std::memcpy(to + s * bytes, from + i * stride, bytes);
      }
  });
}

// One row's columns: products and sums in fp32, each rounded (no fused multiply-add), in the order of k.
template <class T, class Out>
void sum_row(const T* y, int64_t y_stride, int64_t y_rows, const int32_t* slots, int64_t top_k, const float* weights,
             int64_t weight_stride, int64_t hidden, Out* out) {
  float total[kColumns];
  for (int64_t column = 0; column < hidden; column += kColumns) {
    const int64_t n = std::min(kColumns, hidden - column);
    std::fill(total, total + n, 0.0f);
    for (int64_t k = 0; k < top_k; ++k) {
      if (slots[k] < 0) continue;  // nothing of it is read: it may hold NaN
      TORCH_CHECK_INDEX(slots[k] < y_rows, "slot ", slots[k], " of ", y_rows, " rows");
      const T* row = y + slots[k] * y_stride + column;
      if (weights) {
        const float w = weights[k * weight_stride];
        for (int64_t c = 0; c < n; ++c) total[c] += w * static_cast<float>(row[c]);
      } else {
        for (int64_t c = 0; c < n; ++c) total[c] += static_cast<float>(row[c]);
      }
    }
    for (int64_t c = 0; c < n; ++c) out[column + c] = static_cast<Out>(total[c]);
  }
}

template <class T, class Out>
void sum_rows(const at::Tensor& y, const at::Tensor& slots, const std::optional<at::Tensor>& weights,
              const at::Tensor& out) {
  const int64_t top_k = slots.size(1), hidden = y.size(1), y_stride = y.stride(0), out_stride = out.stride(0);
  const T* from = y.const_data_ptr<T>();
  Out* to = out.mutable_data_ptr<Out>();
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  const float* weight = weights ? weights->const_data_ptr<float>() : nullptr;
  const int64_t row = weights ? weights->stride(0) : 0, column = weights ? weights->stride(1) : 0;
  for_rows(slots.size(0), hidden * (sizeof(T) * top_k + sizeof(Out)), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      sum_row(from, y_stride, y.size(0), slot + i * top_k, top_k, weight ? weight + i * row : nullptr, column, hidden,
              to + i * out_stride);
  });
}

void sum_slots(const at::Tensor& y, const at::Tensor& slots, const std::optional<at::Tensor>& weights,
               const at::Tensor& out) {
  TORCH_CHECK_VALUE(y.dim() == 2 && out.dim() == 2 && out.size(1) == y.size(1), "y ", y.sizes(), " does not fit out ",
                    out.sizes());
  TORCH_CHECK_VALUE(inner_bytes(y) == inner_bytes(out) / out.element_size() * y.element_size(), "rows must be alike");
  check_slots(slots, out.size(0));
  TORCH_CHECK_VALUE(!weights || weights->sizes() == slots.sizes(), "weights must be [rows, K], as slots");
  TORCH_CHECK_TYPE(!weights || weights->scalar_type() == at::kFloat, "weights must be float32");
  TORCH_CHECK_TYPE(out.scalar_type() == y.scalar_type() || out.scalar_type() == at::kFloat,
                   "out must have the dtype of y, or float32");
  AT_DISPATCH_SWITCH(y.scalar_type(), "sum_slots", AT_DISPATCH_CASE(at::kFloat, [&] {
                       sum_rows<float, float>(y, slots, weights, out);
                     }) AT_DISPATCH_CASE_REDUCED_FLOATING_TYPES([&] {
                       const bool wide = out.scalar_type() == at::kFloat;
                       (wide ? sum_rows<scalar_t, float> : sum_rows<scalar_t, scalar_t>)(y, slots, weights, out);
                     }));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ascend_moe, m) {
  m.def("plan_slots(Tensor topk_ids, Tensor expert_map, int num_local) -> (Tensor, Tensor)");
  m.def("scatter_rows(Tensor x, Tensor slots, Tensor(a!) out) -> ()");
  m.def("sum_slots(Tensor y, Tensor slots, Tensor? weights, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(ascend_moe, CPU, m) {
  m.impl("plan_slots", plan_slots);
  m.impl("scatter_rows", scatter_rows);
  m.impl("sum_slots", sum_slots);
}

TORCH_LIBRARY_IMPL(ascend_moe, Meta, m) {
  m.impl("plan_slots", [](const at::Tensor& ids, const at::Tensor& expert_map, int64_t num_local) {
    return std::make_tuple(at::empty_symint(ids.sym_sizes(), expert_map.options()),
                           at::empty({num_local}, expert_map.options()));
  });
  m.impl("scatter_rows", [](const at::Tensor&, const at::Tensor&, const at::Tensor&) {});
  m.impl("sum_slots", [](const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&) {});
}

}  // namespace ascend_moe::cpu
