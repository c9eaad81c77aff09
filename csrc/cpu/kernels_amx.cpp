// AMX: products of tiles of 16 rows by 32 values of k with 32 by 16 columns, for bf16. Up to 32 rows by two panels in
// four tiles of sums. Everything but the products is AVX-512's.
#include "target.h"
#include "types.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>

ASCEND_MOE_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")
#include "kernels_impl.h"

namespace ascend_moe::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row
constexpr int kStep = 32;       // values of k in a tile
constexpr int kRows = 2 * kTileRows;
constexpr int64_t kPanelStep = kStep / 2 * 64;  // bytes of a panel that one step uses, the B tile as it is

// What LDTILECFG reads. Tiles 0..3 are C (rows, then panels), 4 and 5 are A, 6 and 7 are B.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int tile_rows) {
    rows[tile] = uint8_t(tile_rows);
    row_bytes[tile] = tile_rows > 0 ? kTileBytes : 0;
  }
};

// One for each number of rows: tiles have the rows that exist, so none needs padding.
constexpr std::array<TileConfig, kRows + 1> make_configs() {
  std::array<TileConfig, kRows + 1> configs;
  for (int m = 0; m <= kRows; ++m) {
    const int upper = m < kTileRows ? m : kTileRows, lower = m - upper;
    for (const int tile : {0, 1, 4}) configs[m].set(tile, upper);
    for (const int tile : {2, 3, 5}) configs[m].set(tile, lower);
    for (const int tile : {6, 7}) configs[m].set(tile, kTileRows);
  }
  return configs;
}
constexpr std::array<TileConfig, kRows + 1> kConfigs = make_configs();

// Compilers do not always know what tile loads read: no store may move past this.
inline void stores_done() { asm volatile("" ::: "memory"); }

template <bool kTwo>
inline void multiply_step(const char* a, const char* b0, const char* b1) {
  _tile_loadd(6, b0, kTileBytes);
  _tile_loadd(4, a, kTileBytes);
  _tile_loadd(7, b1, kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, a + kTileRows * kTileBytes, kTileBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The last k values of a panel, with zeros up to a whole tile: panels end where k ends.
inline void copy_tail(const char* panel, int64_t k, char* tile) {
  const int64_t bytes = (k + 1) / 2 * 64;
  std::memcpy(tile, panel, bytes);
  std::memset(tile + bytes, 0, kPanelStep - bytes);
}

// Rows that this thread's tiles are set for, 0 where they are not set. Setting them takes about 0.1 us.
thread_local int configured = 0;

void set_tiles(int m) {
  if (configured == m) return;
  _tile_loadconfig(&kConfigs[m]);
  configured = m;
}

void release_tiles() {
  if (configured) _tile_release();
  configured = 0;
}

// The order of the sums of a row does not depend on m.
template <bool kTwo>
void multiply_tiles(int m, int64_t k, const char* a, const PanelPair& panels, float* c) {
  const char *b0 = static_cast<const char*>(panels.first), *b1 = static_cast<const char*>(panels.second);
  const char *ahead0 = panels.ahead0, *ahead1 = panels.ahead1;
  const int64_t stride = panels.stride;
  stores_done();
  set_tiles(m);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < k / kStep; ++s, a += m * kTileBytes, b0 += kPanelStep, b1 += kPanelStep) {
    multiply_step<kTwo>(a, b0, b1);
    for (int64_t line = 0; line < stride; line += 64) {
      __builtin_prefetch(ahead0 + line);
      __builtin_prefetch(ahead1 + line);
    }
    ahead0 += stride;
    ahead1 += stride;
  }
  if (k % kStep) {
    alignas(64) char tail0[kPanelStep], tail1[kPanelStep];
    copy_tail(b0, k % kStep, tail0);
    copy_tail(b1, k % kStep, tail1);
    stores_done();
    multiply_step<kTwo>(a, tail0, tail1);
    stores_done();
  }
  constexpr int64_t row_bytes = kWide * sizeof(float);
  _tile_stored(0, c, row_bytes);
  _tile_stored(1, c + kPanel, row_bytes);
  if constexpr (kTwo) {
    _tile_stored(2, c + kTileRows * kWide, row_bytes);
    _tile_stored(3, c + kTileRows * kWide + kPanel, row_bytes);
  }
  stores_done();
}

void multiply(int m, int64_t k, const void* a, const PanelPair& panels, float* c) {
  (m > kTileRows ? multiply_tiles<true> : multiply_tiles<false>)(m, k, static_cast<const char*>(a), panels, c);
}

void pack_tile_rows(const void* const* rows, int m, int64_t k, void* a) {
  for (int i = 0; i < m; ++i) {
    const char* from = static_cast<const char*>(rows[i]);
    char* to = static_cast<char*>(a) + i * kTileBytes;
    for (int64_t s = 0; s < k / kStep; ++s, from += kTileBytes, to += m * kTileBytes) std::memcpy(to, from, kTileBytes);
    if (const int64_t rest = k % kStep * 2) {
      std::memcpy(to, from, rest);
      std::memset(to + rest, 0, kTileBytes - rest);
    }
  }
}

// `col` and `width` are multiples of a panel's columns, and the columns lie in one tile.
void store_tile_block(const float* y, int width, int m, int64_t col, void* a) {
  uint16_t* to = static_cast<uint16_t*>(a) + col / kStep * m * kStep + col % kStep;
  for (int i = 0; i < m; ++i)
    for (int part = 0; part < width; part += kPanel)
      for (int j = 0; j < kPanel; ++j) to[i * kStep + part + j] = uint16_t(round_to_bf16(y[i * kWide + part + j]));
}

}  // namespace
}  // namespace ascend_moe::cpu
ASCEND_MOE_END

namespace ascend_moe::cpu {
namespace {

// The processor has the instructions, and the system lets this process use the tiles (Linux grants 8 KB more state a
// thread only to who asks).
bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & (kBf16 | kTile)) != (kBf16 | kTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const Kernels* kernels_amx_bf16(Weight weight) {
  const Kernels* base = weight == Weight::bf16 ? kernels_avx512(weight) : nullptr;
  if (base == nullptr) return nullptr;
  static const bool present = has_amx();
  static const Kernels kernels = [base] {
    Kernels tiles = *base;
    tiles.isa = "amx_bf16";
    tiles.max_rows = kRows;
    tiles.row_group = kTileRows;
    tiles.slot_values = 2;
    tiles.k_multiple = kStep;
    tiles.pack_rows = pack_tile_rows;
    tiles.multiply = multiply;
    tiles.release = release_tiles;
    tiles.store_block = store_tile_block;
    return tiles;
  }();
  return present ? &kernels : nullptr;
}
}  // namespace ascend_moe::cpu
#else
namespace ascend_moe::cpu {
const Kernels* kernels_amx_bf16(Weight) { return nullptr; }
}  // namespace ascend_moe::cpu
#endif
