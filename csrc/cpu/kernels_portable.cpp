// Any processor: vectors of four floats, which compilers map to SSE2 or NEON.
#include "types.h"

#include "kernels_impl.h"

namespace ascend_moe::cpu {
namespace {

struct Portable {
  static constexpr int width = 4;
  static constexpr int max_rows = 3;
  static constexpr int panels = 1;
  static inline Vec<Portable> load_half(const uint16_t* p) {
    Vec<Portable> out;
    for (int i = 0; i < width; ++i) out[i] = to_float(Fp16{p[i]});
    return out;
  }
};

}  // namespace

const Kernels* kernels_portable(Weight weight) { return fma_kernels<Portable>("portable", weight); }

}  // namespace ascend_moe::cpu
