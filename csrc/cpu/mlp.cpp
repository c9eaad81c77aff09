#include "mlp.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "scratch.h"

namespace ascend_moe::cpu {

namespace {

constexpr int kMaxRows = 32;                       // no instruction set has larger row blocks
constexpr int64_t kTilePairs = 4;                  // widest output tile: 4 pairs of panels, 128 columns
constexpr int64_t kAccumulatorBytes = 512 * 1024;  // of one thread, to stay in its L2
constexpr int64_t kSerialValues = 32 * 1024;       // copied by one thread: waking the others would take longer
constexpr int64_t kChunkColumns = 8;               // panel pairs of one expert that a thread works on in a row
constexpr int64_t kAheadBytes = 1024;              // how far ahead of its use a line that is used once is asked for

// Calls `release`, where there is one, at the end of a scope.
struct Finally {
  void (*release)();
  ~Finally() {
    if (release) release();
  }
};

// Runs work(i) for i in [0, n) on all threads; a free thread takes the next i. Results must not depend on who runs
// what. Each thread ends with `release`.
template <class F>
void for_each(int64_t n, const F& work, bool serial = false, void (*release)() = nullptr) {
  if (serial) {
    for (int64_t i = 0; i < n; ++i) work(i);
    return;
  }
  const int64_t threads = std::min<int64_t>(n, at::get_num_threads());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const Finally finally{release};
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) work(i);
  });
}

// What the phases of one call share.
struct Call {
  const Mlp& mlp;
  const Plan& plan;
  const Kernels& kernels;
  char* inputs;                      // row blocks of the routed rows
  char* inners;                      // row blocks of their activated inner values
  int64_t input_bytes, inner_bytes;  // per pair
  int64_t step_bytes;                // of a panel, at each step of k

  char* input(const Block& b) const { return inputs + b.first_pair * input_bytes; }
  char* inner(const Block& b) const { return inners + b.first_pair * inner_bytes; }
};

// Two panels of one expert, their biases, and which panels of the matrix come next (null where none do).
struct Panels {
  const void *first, *second;
  const float* bias;  // 32 values or null
  float bias_room[kWide];
  const char *next_first, *next_second;
};

// Rows of an expert as they lie in memory. A panel takes the bytes of its 16 rows, packed or not.
const char* rows_at(const Matrix& m, int expert, int64_t row) {
  return m.data + (expert * m.rows + (row < m.rows ? row : 0)) * m.k * m.item_size;
}

// The panels as block `index` of `blocks` uses them: while weights that came from memory are used again and again, the
// next panels are asked for, each block a part of them; weights that are used once are asked for a little ahead.
PanelPair pair_for(const Matrix& m, const Panels& panels, int64_t index, int64_t blocks, int64_t step_bytes) {
  const char *first = static_cast<const char*>(panels.first), *second = static_cast<const char*>(panels.second);
  if (blocks == 1 && m.packed) return {first, second, first + kAheadBytes, second + kAheadBytes, step_bytes};
  if (!panels.next_first) return {first, second, first, second, 0};
  const int64_t part = kPanel * m.k * m.item_size * index / blocks;
  return {first, second, panels.next_first + part, panels.next_second + part, (step_bytes + blocks - 1) / blocks};
}

const void* fetch_panel(const Call& call, const Matrix& m, int expert, int64_t row, int64_t end, char* room) {
  const int n = static_cast<int>(std::clamp<int64_t>(end - row, 0, kPanel));
  const char* rows = rows_at(m, expert, row);
  if (m.packed) return rows;  // packed panels are whole; where there is none, its product is not used
  call.kernels.pack_panel(rows, m.k, n, m.k, room);
  return room;
}

// Panels that begin at matrix rows row0 (of rows below end0) and row1.
void fetch_panels(const Call& call, const Matrix& m, int expert, int64_t row0, int64_t end0, int64_t row1, Panels& to) {
  const int64_t multiple = call.kernels.k_multiple;
  const int64_t bytes = (m.k + multiple - 1) / multiple * multiple * m.item_size * kPanel;
  char* room = m.packed ? nullptr : thread_scratch(Room::panels, 2 * bytes);
  to.first = fetch_panel(call, m, expert, row0, end0, room);
  to.second = fetch_panel(call, m, expert, row1, m.rows, m.packed ? nullptr : room + bytes);
  to.bias = m.bias ? to.bias_room : nullptr;
  for (int j = 0; m.bias && j < kPanel; ++j) {
    to.bias_room[j] = row0 + j < end0 ? m.bias[expert * m.rows + row0 + j] : 0.0f;
    to.bias_room[kPanel + j] = row1 + j < m.rows ? m.bias[expert * m.rows + row1 + j] : 0.0f;
  }
}

void gather_inputs(const Call& call) {
  const auto pack = [&](int64_t i) {
    const Block& block = call.plan.blocks[i];
    const void* rows[kMaxRows];
    for (int r = 0; r < block.rows; ++r)
      rows[r] = call.mlp.input + call.plan.pair_row[block.first_pair + r] * call.mlp.input_stride;
    call.kernels.pack_rows(rows, block.rows, call.mlp.hidden, call.input(block));
  };
  const bool small = call.plan.num_pairs() * call.mlp.hidden < kSerialValues;
  for_each(static_cast<int64_t>(call.plan.blocks.size()), pack, small);
}

// Where the panels of one inner column begin in w13.
struct InnerRows {
  int64_t first, end, second;  // the first panel's rows end at `end`
};

InnerRows inner_rows(const Mlp& mlp, int64_t column) {
  if (mlp.gate != Gate::halves) return {column * kWide, mlp.w13.rows, column * kWide + kPanel};
  return {column * kPanel, mlp.inner, mlp.inner + column * kPanel};
}

// Zeros columns `from` .. `to` - 1 of every row.
void clear_columns(float* y, int rows, int from, int to) {
  for (int r = 0; r < rows; ++r) std::fill(y + r * kWide + from, y + r * kWide + to, 0.0f);
}

// Inner values column * width .. of every row of the expert at `at` in the plan.
void inner_column(const Call& call, int64_t at, int64_t column, int64_t width, bool last) {
  const Mlp& mlp = call.mlp;
  const int expert = call.plan.experts[at];
  const InnerRows rows = inner_rows(mlp, column), next = inner_rows(mlp, column + 1);
  Panels panels;
  fetch_panels(call, mlp.w13, expert, rows.first, rows.end, rows.second, panels);
  panels.next_first = last ? nullptr : rows_at(mlp.w13, expert, next.first);
  panels.next_second = last ? nullptr : rows_at(mlp.w13, expert, next.second);
  const int64_t stored = call.kernels.slots(mlp.inner) * call.kernels.slot_values;
  const bool ends = (column + 1) * width >= mlp.inner;  // with what k is padded to: 32 columns in all at most
  const int used = static_cast<int>(ends ? stored - column * width : width);
  const int real = static_cast<int>(ends ? mlp.inner - column * width : width);
  alignas(64) float c[kMaxRows * kWide];
  alignas(64) float y[kMaxRows * kWide];
  const int64_t first = call.plan.first_block[at], blocks = call.plan.first_block[at + 1] - first;
  for (int64_t b = 0; b < blocks; ++b) {
    const Block& block = call.plan.blocks[first + b];
    const PanelPair pair = pair_for(mlp.w13, panels, b, blocks, call.step_bytes);
    call.kernels.multiply(block.rows, mlp.hidden, call.input(block), pair, c);
    call.kernels.activate(mlp.activation, mlp.gate, c, panels.bias, block.rows, y);
    clear_columns(y, block.rows, real, used);  // no panel made them, or infinity times its zeros: weights there are 0
    call.kernels.store_block(y, used, block.rows, column * width, call.inner(block));
  }
}

void inner_values(const Call& call) {
  const int64_t width = call.mlp.gate == Gate::none ? kWide : kPanel;
  const int64_t columns = (call.mlp.inner + width - 1) / width;
  const auto experts = static_cast<int64_t>(call.plan.experts.size());
  const int64_t shared = columns * experts / (4 * at::get_num_threads());  // so that threads end at about the same time
  const int64_t chunk = std::clamp<int64_t>(shared, 1, kChunkColumns);
  const int64_t chunks = (columns + chunk - 1) / chunk;
  for_each(
      experts * chunks,
      [&](int64_t i) {
        const int64_t begin = i % chunks * chunk, end = std::min(begin + chunk, columns);
        for (int64_t c = begin; c < end; ++c) inner_column(call, i / chunks, c, width, c + 1 == end);
      },
      false, call.kernels.release);
}

// Adds 32 output columns from `col` of one expert's rows to the accumulator [slots, width] at `acc`.
void add_columns(const Call& call, int64_t at, int64_t col, int64_t width, const char* next, float* acc) {
  const Mlp& mlp = call.mlp;
  Panels panels;
  fetch_panels(call, mlp.w2, call.plan.experts[at], col, mlp.w2.rows, col + kPanel, panels);
  panels.next_first = next;
  panels.next_second = next ? next + kPanel * mlp.w2.k * mlp.w2.item_size : nullptr;
  const int used = static_cast<int>(std::min<int64_t>(kWide, mlp.hidden - col));
  alignas(64) float c[kMaxRows * kWide];
  const int64_t first = call.plan.first_block[at], blocks = call.plan.first_block[at + 1] - first;
  for (int64_t b = 0; b < blocks; ++b) {
    const Block& block = call.plan.blocks[first + b];
    const PanelPair pair = pair_for(mlp.w2, panels, b, blocks, call.step_bytes);
    call.kernels.multiply(block.rows, mlp.inner, call.inner(block), pair, c);
    for (int r = 0; r < block.rows; ++r) {
      const int64_t at_pair = block.first_pair + r;
      call.kernels.accumulate(c + r * kWide, panels.bias, call.plan.pair_weight[at_pair], used,
                              acc + call.plan.pair_slot[at_pair] * width);
    }
  }
}

// One tile of output columns, for all rows and experts: sums in a fixed order, without atomics.
void output_tile(const Call& call, int64_t col, int64_t width) {
  const Plan& plan = call.plan;
  const auto slots = static_cast<int64_t>(plan.slot_row.size()), experts = static_cast<int64_t>(plan.experts.size());
  float* acc = reinterpret_cast<float*>(thread_scratch(Room::accumulator, slots * width * 4));
  std::memset(acc, 0, slots * width * 4);
  const int64_t end = std::min(col + width, call.mlp.hidden);
  for (int64_t at = 0; at < experts; ++at) {
    for (int64_t c = col; c < end; c += kWide) {
      const bool same = c + kWide < end;
      const int64_t expert = same ? at : at + 1;
      const char* next =
          expert < experts ? rows_at(call.mlp.w2, plan.experts[expert], same ? c + kWide : col) : nullptr;
      add_columns(call, at, c, width, next, acc + (c - col));
    }
  }
  for (int64_t s = 0; s < slots; ++s) {
    char* row = call.mlp.output + plan.slot_row[s] * call.mlp.output_stride + col * call.mlp.item_size;
    call.kernels.store_row(acc + s * width, end - col, row);
  }
}

void outputs(const Call& call) {
  const int64_t slots = std::max<int64_t>(1, call.plan.slot_row.size());
  const int64_t pairs = (call.mlp.hidden + kWide - 1) / kWide;
  const int64_t shared = pairs / (2 * at::get_num_threads());  // two tiles a thread, so that none waits long
  const int64_t cached = kAccumulatorBytes / (slots * kWide * 4);
  const int64_t width = kWide * std::clamp<int64_t>(std::min(shared, cached), 1, kTilePairs);
  for_each((call.mlp.hidden + width - 1) / width, [&](int64_t i) { output_tile(call, i * width, width); }, false,
           call.kernels.release);
}

}  // namespace

int64_t scratch_per_pair(const Mlp& mlp) {
  return std::max<int64_t>(1, 4 * (mlp.kernels->slots(mlp.hidden) + mlp.kernels->slots(mlp.inner)));
}

void run(const Mlp& mlp, const Plan& plan) {
  const int64_t input_bytes = 4 * mlp.kernels->slots(mlp.hidden);
  const int64_t inner_bytes = 4 * mlp.kernels->slots(mlp.inner);
  const Call call{mlp,
                  plan,
                  *mlp.kernels,
                  thread_scratch(Room::inputs, plan.num_pairs() * input_bytes),
                  thread_scratch(Room::inners, plan.num_pairs() * inner_bytes),
                  input_bytes,
                  inner_bytes,
                  mlp.kernels->k_multiple * kPanel * mlp.item_size};
  gather_inputs(call);
  inner_values(call);
  outputs(call);
}

}  // namespace ascend_moe::cpu
