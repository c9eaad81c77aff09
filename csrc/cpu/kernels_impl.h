// Kernels over vectors of V::width floats, for one instruction set. Included once by each kernels_*.cpp after it has
// switched its target on; everything is in an unnamed namespace, so that no function compiled for a newer processor
// can be shared with code that runs on an older one.
//
// V gives: width, max_rows, panels (weight panels multiplied in one pass), and load_half(const uint16_t*) -> Vec<V>.

namespace ascend_moe::cpu {
namespace {

template <class V>
struct VecTypes {
  typedef float f __attribute__((vector_size(4 * V::width), aligned(4), may_alias));
  typedef uint32_t u __attribute__((vector_size(4 * V::width), aligned(4), may_alias));
  typedef int32_t i __attribute__((vector_size(4 * V::width), aligned(4), may_alias));
};
template <class V>
using Vec = typename VecTypes<V>::f;
template <class V>
using UVec = typename VecTypes<V>::u;
template <class V>
using IVec = typename VecTypes<V>::i;

template <class V>
inline Vec<V> load(const float* p) {
  return *reinterpret_cast<const Vec<V>*>(p);
}
template <class V>
inline void store(float* p, Vec<V> x) {
  *reinterpret_cast<Vec<V>*>(p) = x;
}
template <class V>
inline Vec<V> splat(float x) {
  return x - Vec<V>{};  // folds to a broadcast; adding to zero does not, since it turns -0 into 0
}
template <class V>
inline Vec<V> select(IVec<V> mask, Vec<V> yes, Vec<V> no) {
  return (Vec<V>)(((IVec<V>)yes & mask) | ((IVec<V>)no & ~mask));
}
template <class V>
inline Vec<V> at_most(Vec<V> x, float limit) {
  return select<V>((IVec<V>)(x > splat<V>(limit)), splat<V>(limit), x);  // a NaN stays
}
template <class V>
inline Vec<V> at_least(Vec<V> x, float limit) {
  return select<V>((IVec<V>)(x < splat<V>(limit)), splat<V>(limit), x);
}

// ---- elementary functions ------------------------------------------------------------------------------------------

// Relative error under 2e-7 (Cephes' polynomial), arguments clamped to where the result is a normal number.
template <class V>
inline Vec<V> exp(Vec<V> x) {
  x = at_least<V>(at_most<V>(x, 88.0f), -87.0f);
  const Vec<V> round = splat<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec<V> n = (x * 1.44269504f + round) - round;
  const Vec<V> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<V> p = splat<V>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (Vec<V>)((__builtin_convertvector(n, IVec<V>) + 127) << 23);
}

template <class V>
inline Vec<V> sigmoid(Vec<V> x) {
  return 1.0f / (1.0f + exp<V>(-x));
}

// erf by Abramowitz and Stegun 7.1.26, absolute error under 2e-7.
template <class V>
inline Vec<V> gelu_erf(Vec<V> x) {
  const Vec<V> z = x * 0.70710678f;
  const Vec<V> size = select<V>((IVec<V>)(z < 0.0f), -z, z);
  const Vec<V> t = 1.0f / (1.0f + 0.3275911f * size);
  const Vec<V> poly =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const Vec<V> tail = poly * exp<V>(-size * size);  // 1 - erf(size)
  return 0.5f * x * select<V>((IVec<V>)(z < 0.0f), tail, 2.0f - tail);
}

template <class V>
inline Vec<V> gelu_tanh(Vec<V> x) {
  const Vec<V> u = 1.59576912f * (x + 0.044715f * x * x * x);  // twice the argument of tanh
  return x * sigmoid<V>(u);                                    // 0.5 * (1 + tanh(u / 2)) = sigmoid(u)
}

template <class V>
inline Vec<V> pointwise(Activation act, Vec<V> x) {
  switch (act) {
    case Activation::silu:
      return x * sigmoid<V>(x);
    case Activation::gelu:
      return gelu_erf<V>(x);
    case Activation::gelu_tanh:
      return gelu_tanh<V>(x);
    default: {
      const Vec<V> positive = at_least<V>(x, 0.0f);
      return positive * positive;
    }
  }
}

template <class V>
inline Vec<V> gated(Activation act, Vec<V> gate, Vec<V> up) {
  if (act != Activation::swigluoai) return pointwise<V>(act, gate) * up;
  gate = at_most<V>(gate, 7.0f);
  up = at_least<V>(at_most<V>(up, 7.0f), -7.0f);
  return gate * sigmoid<V>(1.702f * gate) * (up + 1.0f);
}

template <class V>
void activate(Activation act, Gate gate, const float* c, const float* bias, int m, float* y) {
  for (int row = 0; row < m; ++row, c += kWide, y += kWide) {
    float room[kWide];
    const float* x = c;
    if (bias || gate == Gate::interleaved) {
      for (int j = 0; j < kWide; ++j) {
        const int from = gate != Gate::interleaved ? j : j < kPanel ? 2 * j : 2 * (j - kPanel) + 1;
        room[j] = c[from] + (bias ? bias[from] : 0.0f);
      }
      x = room;
    }
    if (gate == Gate::none) {
      for (int j = 0; j < kWide; j += V::width) store<V>(y + j, pointwise<V>(act, load<V>(x + j)));
    } else {
      for (int j = 0; j < kPanel; j += V::width)
        store<V>(y + j, gated<V>(act, load<V>(x + j), load<V>(x + kPanel + j)));
    }
  }
}

// ---- conversions ---------------------------------------------------------------------------------------------------

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t round_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return x != x ? 0x7fc0u : rounded;
}
inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }
// Both half conversions follow the branch-free forms of Maratyszcza's FP16 library.
inline float to_float(Fp16 x) {
  const uint32_t w = uint32_t(x.bits) << 16, twice = w + w;
  const float normal = float_of((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float denormal = float_of((twice >> 17) | (126u << 23)) - 0.5f;
  return float_of((w & 0x80000000u) | (twice < (1u << 27) ? bits_of(denormal) : bits_of(normal)));
}
inline uint16_t round_to_half(float x) {
  const uint32_t w = bits_of(x), twice = w + w;
  const float size = float_of(w & 0x7fffffffu);
  const uint32_t bias = (twice & 0xFF000000u) < 0x71000000u ? 0x71000000u : twice & 0xFF000000u;
  const uint32_t bits = bits_of(float_of((bias >> 1) + 0x07800000u) + (size * 0x1.0p+112f) * 0x1.0p-110f);
  const uint32_t magnitude = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return uint16_t(((w & 0x80000000u) >> 16) | (twice > 0xFF000000u ? 0x7E00u : magnitude));
}
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, Bf16* out) { out->bits = uint16_t(round_to_bf16(x)); }
inline void from_float(float x, Fp16* out) { out->bits = round_to_half(x); }

template <class W>
void store_row(const float* acc, int64_t n, void* out) {
  W* w = static_cast<W*>(out);
  for (int64_t i = 0; i < n; ++i) from_float(acc[i], w + i);
}

template <class V>
void accumulate(const float* c, const float* bias, float w, int n, float* acc) {
  int i = 0;
  for (; bias == nullptr && i + V::width <= n; i += V::width) store<V>(acc + i, load<V>(acc + i) + load<V>(c + i) * w);
  for (; i < n; ++i) acc[i] += w * (c[i] + (bias ? bias[i] : 0.0f));
}

// ---- packing -------------------------------------------------------------------------------------------------------

// One step of a transposition: exchanges the blocks of D lanes off the diagonal between two rows that are D apart.
template <class V, int D, bool kUpper, size_t... L>
inline UVec<V> exchange(UVec<V> a, UVec<V> b, std::index_sequence<L...>) {
  constexpr int width = V::width;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (L & D ? int(L) + (kUpper ? width : width - D) : int(L) + (kUpper ? D : 0))...);
#else
  return __builtin_shuffle(
      a, b, UVec<V>{uint32_t(L & D ? int(L) + (kUpper ? width : width - D) : int(L) + (kUpper ? D : 0))...});
#endif
}

template <class V, int D>
inline void transpose_step(UVec<V>* rows) {
  constexpr auto lanes = std::make_index_sequence<V::width>{};
  for (int i = 0; i < V::width; ++i) {
    if (i & D) continue;
    const UVec<V> a = rows[i], b = rows[i + D];
    rows[i] = exchange<V, D, false>(a, b, lanes);
    rows[i + D] = exchange<V, D, true>(a, b, lanes);
  }
  if constexpr (D > 1) transpose_step<V, D / 2>(rows);
}

// 16 rows of 4-byte words (fp32 values, or pairs of bf16) -> [words][16]
template <class V>
void transpose_words(const char* const* rows, int64_t words, uint32_t* to) {
  int64_t w = 0;
  for (; w + V::width <= words; w += V::width) {
    for (int part = 0; part < kPanel; part += V::width) {
      UVec<V> block[V::width];
      for (int i = 0; i < V::width; ++i) block[i] = *reinterpret_cast<const UVec<V>*>(rows[part + i] + 4 * w);
      transpose_step<V, V::width / 2>(block);
      for (int i = 0; i < V::width; ++i) *reinterpret_cast<UVec<V>*>(to + (w + i) * kPanel + part) = block[i];
    }
  }
  for (; w < words; ++w)
    for (int j = 0; j < kPanel; ++j) std::memcpy(to + w * kPanel + j, rows[j] + 4 * w, 4);
}

inline void pack_pairs(const uint16_t* const* rows, int n, int stride, int64_t k, uint32_t* to) {
  for (int64_t p = 0; p < k / 2; ++p)
    for (int j = 0; j < n; ++j) std::memcpy(to + p * stride + j, rows[j] + 2 * p, 4);
  if (k % 2)
    for (int j = 0; j < n; ++j) to[(k / 2) * stride + j] = rows[j][k - 1];
}

template <class V, class W>
void pack_panel(const void* w, int64_t ldw, int n, int64_t k, void* panel) {
  constexpr bool pairs = std::is_same_v<W, Bf16>;
  const W* rows[kPanel];
  for (int j = 0; j < n; ++j) rows[j] = static_cast<const W*>(w) + j * ldw;
  const int64_t padded = pairs ? (k + 1) / 2 * 2 : k;
  if (n < kPanel) std::memset(panel, 0, sizeof(W) * kPanel * padded);
  if (sizeof(W) * k % 4 == 0 && n == kPanel && !std::is_same_v<W, Fp16>) {
    transpose_words<V>(reinterpret_cast<const char* const*>(rows), sizeof(W) * k / 4, static_cast<uint32_t*>(panel));
  } else if constexpr (pairs) {
    pack_pairs(reinterpret_cast<const uint16_t* const*>(rows), n, kPanel, k, static_cast<uint32_t*>(panel));
  } else {
    for (int64_t kk = 0; kk < k; ++kk)
      for (int j = 0; j < n; ++j) static_cast<W*>(panel)[kk * kPanel + j] = rows[j][kk];
  }
}

template <class W>
void pack_rows(const void* const* rows, int m, int64_t k, void* a) {
  float* to = static_cast<float*>(a);
  const W* const* from = reinterpret_cast<const W* const*>(rows);
  for (int64_t kk = 0; kk < k; ++kk)
    for (int i = 0; i < m; ++i) to[kk * m + i] = to_float(from[i][kk]);
  if (std::is_same_v<W, Bf16> && k % 2)  // bf16 panels hold pairs: one more slot, of zeros
    for (int i = 0; i < m; ++i) to[k * m + i] = 0.0f;
}

inline void store_block(const float* y, int width, int m, int64_t col, void* a) {
  float* to = static_cast<float*>(a) + col * m;
  for (int j = 0; j < width; ++j)
    for (int i = 0; i < m; ++i) to[j * m + i] = y[i * kWide + j];
}

// ---- products, fp32 multiply-add -----------------------------------------------------------------------------------

// One step of k for one panel: `panel` points at the 16 columns of this step (bf16: of this pair of steps).
template <class V, class W>
struct Columns {
  static constexpr int vectors = kPanel / V::width;
  static constexpr int steps = 1;
  static constexpr int64_t bytes = sizeof(W) * kPanel;
  static inline Vec<V> get(const void* panel, int v, int) {
    if constexpr (sizeof(W) == 4)
      return load<V>(static_cast<const float*>(panel) + v * V::width);
    else
      return V::load_half(static_cast<const uint16_t*>(panel) + v * V::width);
  }
};
template <class V>
struct Columns<V, Bf16> {
  static constexpr int vectors = kPanel / V::width;
  static constexpr int steps = 2;
  static constexpr int64_t bytes = 4 * kPanel;
  static inline Vec<V> get(const void* panel, int v, int step) {
    const UVec<V> pair = *reinterpret_cast<const UVec<V>*>(static_cast<const uint32_t*>(panel) + v * V::width);
    return (Vec<V>)(step == 0 ? pair << 16 : pair & 0xffff0000u);
  }
};

template <class V, class W, int M, int P>
void multiply_block(int64_t k, const float* a, const PanelPair& panels, float* c) {
  using C = Columns<V, W>;
  Vec<V> acc[M][P * C::vectors] = {};
  const char *b0 = static_cast<const char*>(panels.first), *b1 = static_cast<const char*>(panels.second);
  const char *ahead0 = panels.ahead0, *ahead1 = panels.ahead1;
  const int64_t trips = (k + C::steps - 1) / C::steps, stride = panels.stride;
  for (int64_t t = 0; t < trips; ++t, b0 += C::bytes, b1 += C::bytes, ahead0 += stride, ahead1 += stride) {
    __builtin_prefetch(ahead0);
    if (P == 2) __builtin_prefetch(ahead1);
    for (int step = 0; step < C::steps; ++step, a += M) {
      Vec<V> w[P * C::vectors];
      for (int v = 0; v < C::vectors; ++v) {
        w[v] = C::get(b0, v, step);
        if (P == 2) w[(P - 1) * C::vectors + v] = C::get(b1, v, step);
      }
      for (int i = 0; i < M; ++i) {
        const Vec<V> x = splat<V>(a[i]);
        for (int v = 0; v < P * C::vectors; ++v) acc[i][v] += x * w[v];
      }
    }
  }
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < P * C::vectors; ++v) store<V>(c + i * kWide + v * V::width, acc[i][v]);
}

template <class V, class W, int M>
void multiply_rows(int m, int64_t k, const void* a, const PanelPair& panels, float* c) {
  if constexpr (M > 1) {
    if (m < M) return multiply_rows<V, W, M - 1>(m, k, a, panels, c);
  }
  const float* rows = static_cast<const float*>(a);
  // Few rows have few sums in flight: both panels in one pass hide the latency of the additions.
  if constexpr (V::panels == 2 || 2 * M * Columns<V, W>::vectors <= 8) {
    multiply_block<V, W, M, 2>(k, rows, panels, c);
  } else {
    multiply_block<V, W, M, 1>(k, rows, panels, c);
    multiply_block<V, W, M, 1>(k, rows, {panels.second, panels.second, panels.ahead1, panels.ahead1, panels.stride},
                               c + kPanel);
  }
}

template <class V, class W>
constexpr Kernels make_kernels(const char* isa) {
  constexpr bool pairs = std::is_same_v<W, Bf16>;
  return {isa,
          V::max_rows,
          1,
          1,
          pairs ? 2 : 1,
          pack_panel<V, W>,
          pack_rows<W>,
          multiply_rows<V, W, V::max_rows>,
          nullptr,
          activate<V>,
          store_block,
          accumulate<V>,
          store_row<W>};
}

template <class V>
const Kernels* fma_kernels(const char* isa, Weight weight) {
  static const Kernels bf16 = make_kernels<V, Bf16>(isa);
  static const Kernels fp16 = make_kernels<V, Fp16>(isa);
  static const Kernels fp32 = make_kernels<V, float>(isa);
  return weight == Weight::bf16 ? &bf16 : weight == Weight::fp16 ? &fp16 : &fp32;
}

}  // namespace
}  // namespace ascend_moe::cpu
