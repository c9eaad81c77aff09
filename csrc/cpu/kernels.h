// The arithmetic of the CPU experts, one table of functions per instruction set and weight type.
//
// Layouts (written so that every inner loop reads memory in order):
//   weight panel: 16 rows of a row-major weight [n, k], that is 16 output columns, stored k-major.
//     bf16:        uint32 [ceil(k / 2)][16], each a pair (k even in the low half, k odd in the high half)
//     fp16, fp32:  [k][16]
//     A panel takes exactly the bytes of its 16 rows (k even for bf16), so weights can be repacked in place.
//   row block A: m rows (m <= max_rows) of activations, k-major in 4-byte slots [slots(k)][m].
//     slot_values == 2: a slot is a pair of bf16;  slot_values == 1: a slot is one fp32.
//     AMX: the tiles, bf16 [slots(k) / 16][m][32].
//   result C: fp32 [m][32], the products with two panels side by side.
#pragma once

#include <cstdint>

namespace ascend_moe::cpu {

constexpr int kPanel = 16;
constexpr int kWide = 2 * kPanel;

enum class Weight { bf16, fp16, fp32 };

enum class Activation { silu, gelu, gelu_tanh, relu2, swigluoai };

// How the 32 columns of C become activations: one panel of gates and one of ups, interleaved, or no gate at all.
enum class Gate { halves, interleaved, none };

// Two panels to multiply with, and what to ask memory for meanwhile: one line of each of ahead0 and ahead1 a step of
// k, `stride` bytes further at each step. Hardware prefetches within a page; this goes on to the next panel.
struct PanelPair {
  const void *first, *second;
  const char *ahead0, *ahead1;
  int64_t stride;
};

struct Kernels {
  const char* isa;
  int max_rows;
  int row_group;  // rows that cost as much as one: blocks begin at multiples of it, max_rows is one
  int slot_values;
  int k_multiple;  // rows of A and panels are padded with zeros to a multiple of this many k

  // n of the panel's 16 rows exist (0 <= n <= 16), the rest are zero; ldw in elements.
  void (*pack_panel)(const void* w, int64_t ldw, int n, int64_t k, void* panel);
  void (*pack_rows)(const void* const* rows, int m, int64_t k, void* a);
  void (*multiply)(int m, int64_t k, const void* a, const PanelPair& panels, float* c);
  void (*release)();  // gives back what multiply keeps of the thread between calls; null where it keeps nothing
  // y fp32 [m][32]; the first 16 columns are written for gated forms, all 32 for Gate::none. bias: 32 values or null.
  void (*activate)(Activation act, Gate gate, const float* c, const float* bias, int m, float* y);
  // Writes columns col .. col + width - 1 of m rows into a row block A; the last ones come with the padding of k.
  void (*store_block)(const float* y, int width, int m, int64_t col, void* a);
  // acc[i] += w * (c[i] + bias[i]) for i < n
  void (*accumulate)(const float* c, const float* bias, float w, int n, float* acc);
  // fp32 -> the weight type, rounded to nearest even
  void (*store_row)(const float* acc, int64_t n, void* out);

  int64_t slots(int64_t k) const { return (k + k_multiple - 1) / k_multiple * k_multiple / slot_values; }
};

// Each returns null where this build or this processor does not have the instruction set or the combination.
const Kernels* kernels_portable(Weight weight);
const Kernels* kernels_avx2(Weight weight);
const Kernels* kernels_avx512(Weight weight);
const Kernels* kernels_avx512_bf16(Weight weight);
const Kernels* kernels_amx_bf16(Weight weight);

}  // namespace ascend_moe::cpu
