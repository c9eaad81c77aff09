// AVX2 with FMA and F16C: vectors of eight floats, five rows by one panel: ten accumulators,
// which leave the other six registers for weights and the mask that cuts bf16 pairs apart.
#include "target.h"
#include "types.h"

#if defined(__x86_64__)
#include <immintrin.h>

ASCEND_MOE_BEGIN("avx2,fma,f16c")
#include "kernels_impl.h"

namespace ascend_moe::cpu {
namespace {

struct Avx2 {
  static constexpr int width = 8;
  static constexpr int max_rows = 5;
  static constexpr int panels = 1;
  static inline Vec<Avx2> load_half(const uint16_t* p) {
    return (Vec<Avx2>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

const Kernels* table(Weight weight) { return fma_kernels<Avx2>("avx2", weight); }

}  // namespace
}  // namespace ascend_moe::cpu
ASCEND_MOE_END

namespace ascend_moe::cpu {
const Kernels* kernels_avx2(Weight weight) {
  const bool present =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return present ? table(weight) : nullptr;
}
}  // namespace ascend_moe::cpu
#else
namespace ascend_moe::cpu {
const Kernels* kernels_avx2(Weight) { return nullptr; }
}  // namespace ascend_moe::cpu
#endif
