#include "row_format.h"

#include <ATen/ATen.h>

#include <cstring>

#include "ranks.h"

namespace ascend_moe {

namespace {

int64_t aligned(int64_t bytes) { return (bytes + kColumnAlign - 1) / kColumnAlign * kColumnAlign; }

at::Tensor view_of(const Column& column, const at::Tensor& wire, int64_t row_bytes) {
  const int64_t item = static_cast<int64_t>(c10::elementSize(column.dtype));
  const size_t dims = column.inner.size() + 1;
  std::vector<int64_t> sizes(dims), strides(dims);
  sizes[0] = wire.size(0);
  strides[0] = row_bytes / item;
  int64_t step = 1;
  for (size_t d = dims - 1; d > 0; --d) {
    sizes[d] = column.inner[d - 1];
    strides[d] = step;
    step *= sizes[d];
  }
  const int64_t start = (wire.storage_offset() + column.offset) / item;
  return wire.view(column.dtype).as_strided(sizes, strides, start);
}

// Rows of host memory: one memcpy a cell, no kernel launches.
void write_on_host(const RowFormat& format, at::TensorList tensors, char* wire) {
  for (size_t c = 0; c < tensors.size(); ++c) {
    const at::Tensor x = tensors[c].contiguous();
    const Column& column = format.columns[c];
    const char* from = static_cast<const char*>(x.const_data_ptr());
    for (int64_t row = 0; row < x.size(0); ++row)
      std::memcpy(wire + row * format.row_bytes + column.offset, from + row * column.bytes, column.bytes);
  }
}

// One kernel for all columns where they touch, else one for each.
void write_on_device(const RowFormat& format, at::TensorList tensors, const at::Tensor& rows) {
  if (!format.gapless) {
    const auto views = format.views(rows);
    for (size_t c = 0; c < tensors.size(); ++c) views[c].copy_(tensors[c]);
    return;
  }
  std::vector<at::Tensor> words;
  words.reserve(tensors.size());
  for (size_t c = 0; c < tensors.size(); ++c) {
    const int64_t count = tensors[c].size(0);
    words.push_back(dense(tensors[c]).view({count, -1}).view(at::kLong));
  }
  at::Tensor to = rows.view(at::kLong);
  at::cat_out(to, words, 1);
}

}  // namespace

RowFormat::RowFormat(at::TensorList tensors) {
  int64_t at = 0;
  gapless = true;
  columns.reserve(tensors.size());
  for (const at::Tensor& x : tensors) {
    int64_t values = 1;
    for (const int64_t size : x.sizes().slice(1)) values *= size;
    const int64_t bytes = values * static_cast<int64_t>(x.element_size());
    gapless = gapless && bytes % kColumnAlign == 0 && bytes > 0;
    columns.push_back({x.scalar_type(), at, bytes, x.sizes().slice(1).vec()});
    at += aligned(bytes);
  }
  row_bytes = at;
}

std::vector<at::Tensor> RowFormat::views(const at::Tensor& wire) const {
  std::vector<at::Tensor> out;
  out.reserve(columns.size());
  for (const Column& column : columns) out.push_back(view_of(column, wire, row_bytes));
  return out;
}

void write_rows(const RowFormat& format, at::TensorList tensors, at::ArrayRef<int64_t> pad, at::Tensor& wire) {
  const int64_t used = tensors[0].size(0), rows = wire.size(0);
  if (wire.is_cpu()) {
    write_on_host(format, tensors, static_cast<char*>(wire.mutable_data_ptr()));
  } else if (used > 0) {
    write_on_device(format, tensors, used == rows ? wire : wire.narrow(0, 0, used));
  }
  if (used == rows) return;
  at::Tensor rest = wire.narrow(0, used, rows - used);
  rest.zero_();
  for (size_t c = 0; c < tensors.size(); ++c)
    if (pad[c] != 0) view_of(format.columns[c], rest, format.row_bytes).fill_(pad[c]);
}

}  // namespace ascend_moe
