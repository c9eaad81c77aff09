// AVX-512: vectors of sixteen floats, twelve rows by two panels in 24 accumulators; with the bf16 extension, products
// of bf16 pairs (two multiply-adds in one instruction).
#include "target.h"
#include "types.h"

#if defined(__x86_64__)
#include <immintrin.h>

ASCEND_MOE_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#include "kernels_impl.h"

namespace ascend_moe::cpu {
namespace {

struct Avx512 {
  static constexpr int width = 16;
  static constexpr int max_rows = 12;
  static constexpr int panels = 2;
  static inline Vec<Avx512> load_half(const uint16_t* p) {
    return (Vec<Avx512>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

const Kernels* table(Weight weight) { return fma_kernels<Avx512>("avx512", weight); }

inline void pack_row_pairs(const void* const* rows, int m, int64_t k, void* a) {
  pack_pairs(reinterpret_cast<const uint16_t* const*>(rows), m, m, k, static_cast<uint32_t*>(a));
}

// Columns col .. col + width - 1 (both even) of m rows, as pairs.
inline void store_block_pairs(const float* y, int width, int m, int64_t col, void* a) {
  uint32_t* to = static_cast<uint32_t*>(a) + col / 2 * m;
  for (int i = 0; i < m; ++i) {
    uint32_t bits[kWide];
    for (int j = 0; j < width; ++j) bits[j] = round_to_bf16(y[i * kWide + j]);
    for (int j = 0; j < width; j += 2) to[j / 2 * m + i] = bits[j] | bits[j + 1] << 16;
  }
}

}  // namespace
}  // namespace ascend_moe::cpu
ASCEND_MOE_END

ASCEND_MOE_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
namespace ascend_moe::cpu {
namespace {

template <int M>
void multiply_pairs(int64_t pairs, const uint32_t* a, const PanelPair& panels, float* c) {
  const char *b0 = static_cast<const char*>(panels.first), *b1 = static_cast<const char*>(panels.second);
  const char *ahead0 = panels.ahead0, *ahead1 = panels.ahead1;
  const int64_t stride = panels.stride;
  __m512 acc[M][2];
  for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p, a += M, b0 += 64, b1 += 64, ahead0 += stride, ahead1 += stride) {
    __builtin_prefetch(ahead0);
    __builtin_prefetch(ahead1);
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(b0);
    const __m512bh w1 = (__m512bh)_mm512_loadu_si512(b1);
    for (int i = 0; i < M; ++i) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(int(a[i]));
      acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, w0);
      acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, w1);
    }
  }
  for (int i = 0; i < M; ++i) {
    _mm512_storeu_ps(c + i * kWide, acc[i][0]);
    _mm512_storeu_ps(c + i * kWide + kPanel, acc[i][1]);
  }
}

template <int M>
void multiply_pair_rows(int m, int64_t k, const void* a, const PanelPair& panels, float* c) {
  if constexpr (M > 1) {
    if (m < M) return multiply_pair_rows<M - 1>(m, k, a, panels, c);
  }
  multiply_pairs<M>((k + 1) / 2, static_cast<const uint32_t*>(a), panels, c);
}

const Kernels* pair_table() {
  static const Kernels kernels = [] {
    Kernels pairs = *table(Weight::bf16);
    pairs.isa = "avx512_bf16";
    pairs.slot_values = 2;
    pairs.pack_rows = pack_row_pairs;
    pairs.multiply = multiply_pair_rows<Avx512::max_rows>;
    pairs.store_block = store_block_pairs;
    return pairs;
  }();
  return &kernels;
}

}  // namespace
}  // namespace ascend_moe::cpu
ASCEND_MOE_END

namespace ascend_moe::cpu {
namespace {
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
}  // namespace

const Kernels* kernels_avx512(Weight weight) { return has_avx512() ? table(weight) : nullptr; }

const Kernels* kernels_avx512_bf16(Weight weight) {
  const bool present = has_avx512() && __builtin_cpu_supports("avx512bf16");
  return present && weight == Weight::bf16 ? pair_table() : nullptr;
}
}  // namespace ascend_moe::cpu
#else
namespace ascend_moe::cpu {
const Kernels* kernels_avx512(Weight) { return nullptr; }
const Kernels* kernels_avx512_bf16(Weight) { return nullptr; }
}  // namespace ascend_moe::cpu
#endif
