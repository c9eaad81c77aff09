// One row of several tensors as one row of bytes: what a packed gather sends.
//
// Columns follow each other, each tensor's from a multiple of 16 bytes on, and a row is a multiple of 16 bytes:
//   hidden bf16 [T, 6], weights fp32 [T, 2], ids int32 [T, 2]
//   bytes 0-11 hidden, 12-15 unused, 16-23 weights, 24-31 unused, 32-39 ids, 40-47 unused: 48 bytes a row
// Every column can so be read in place as a strided tensor of its own dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ascend_moe {

constexpr int64_t kColumnAlign = 16;

struct Column {
  at::ScalarType dtype;
  int64_t offset, bytes;                // in the row
  std::vector<int64_t> sizes, strides;  // past dim 0
};

struct RowFormat {
  explicit RowFormat(at::TensorList tensors);

  std::vector<Column> columns;
  int64_t row_bytes;
  bool gapless;  // columns touch: each is a multiple of 16 bytes

  // One strided view a column of `wire` uint8 [rows, row_bytes].
  std::vector<at::Tensor> views(const at::Tensor& wire) const;
};

// Copies the rows of `tensors` to the first rows of `wire`; the others become 0, and pad[i] in column i where not 0.
void write_rows(const RowFormat& format, at::TensorList tensors, at::ArrayRef<int64_t> pad, at::Tensor& wire);

}  // namespace ascend_moe
