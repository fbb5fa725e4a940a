// A matrix times a few rows, out of the layout that oneDNN packs it in: bound by memory.
//
// The layout: outputs in blocks of 64; in a block the inputs one after another, each with its 64
// outputs: [outputs / 64][inputs][64], in bfloat16 in pairs of inputs: [outputs / 64][inputs / 2]
// [64][2]. So each block is one stream of memory. The sums are oneDNN's to the last bit, so that a
// row gives the same whatever else is in the batch: chunks of inputs from zero, one by one (bfloat16:
// pair by pair), added up in order. packed.py finds out how long they are, and whether all this
// holds.
#include "vec.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace xpyd {

constexpr int kBlock = 64;

// --- float32

// Rows that a call takes, and those whose sums are in registers at once.
constexpr int kMostRows = 32, kTileRows = 5;
// Inputs in one go: 8 KiB of the matrix, which stay in the first cache for all rows. The next ones
// are asked for meanwhile, also over the end of a page.
constexpr int64_t kInputs = 32;

// Adds to `sums` what `count` inputs give, for `kRows` rows and `kVectors` vectors of outputs. All
// loops over these are unrolled: compilers keep sums in memory where one is not. Of what is asked for
// from `next` on each of `tiles` has a part, evenly: a burst would have to wait. One or two rows are
// read faster by the processor's own foresight.
template <int kRows, int kVectors>
static inline void add_tile(const float* w, const float* x, int64_t inputs, float* sums,
                            int64_t count, const float* next, int64_t tiles) {
  Vec sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++)
      sum[row][i] = load((const Float*)sums + row * kBlock + i * kLanes);
  // k / tiles, for k below kInputs.
  const int64_t part_of = (256 + tiles - 1) / tiles;
  for (int64_t k = 0; k < count; k++) {
    const float* asked = next + (k * part_of >> 8) * kBlock;
    Vec one[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; row++) one[row] = splat(x[row * inputs + k]);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
      const Vec part = load((const Float*)w + k * kBlock + i * kLanes);
      if (kRows > 2 && i * kLanes % 16 == 0) __builtin_prefetch(asked + i * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) sum[row][i] += one[row] * part;
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++)
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++)
      store((Float*)sums + row * kBlock + i * kLanes, sum[row][i]);
}

// The same for all outputs of the block.
template <int kRows>
static void add_rows(const float* w, const float* x, int64_t inputs, float* sums, int64_t count,
                     const float* next, int64_t tiles) {
  // Sums and the matrix's share of an input are in registers: 32 of AVX-512, 16 of AVX2.
  constexpr int kAtOnce = kLanes == 16 ? 64 : kRows == 1 ? 8 * kLanes : kRows <= 3 ? 32 : 16;
  for (int first = 0; first < kBlock; first += kAtOnce)
    add_tile<kRows, kAtOnce / kLanes>(w + first, x, inputs, sums + first, count, next + first,
                                      tiles);
}

// One block of outputs for `rows` rows of `x`.
static void float_block(const float* packed, const float* x, const float* bias, float* out,
                        int64_t rows, int64_t outputs, int64_t inputs, int64_t chunk) {
  alignas(64) float total[kMostRows * kBlock], sums[kMostRows * kBlock];
  constexpr decltype(&add_rows<1>) kAdd[] = {add_rows<1>, add_rows<2>, add_rows<3>, add_rows<4>,
                                             add_rows<5>};
  static_assert(sizeof kAdd / sizeof *kAdd == kTileRows);
  // As equal as they can be: one of a single row is slow.
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t begin = 0; begin < inputs; begin += chunk) {
    const int64_t end = begin + chunk < inputs ? begin + chunk : inputs;
    std::memset(sums, 0, rows * kBlock * sizeof(float));
    for (int64_t first = begin; first < end; first += kInputs) {
      const int64_t count = first + kInputs < end ? kInputs : end - first;
      const float* here = packed + first * kBlock;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, take = rows * (tile + 1) / tiles - row;
        kAdd[take - 1](here, x + row * inputs + first, inputs, sums + row * kBlock, count,
                       here + (kInputs + count * tile / tiles) * kBlock, tiles);
      }
    }
    for (int64_t i = 0; i < rows * kBlock; i++) total[i] = begin ? total[i] + sums[i] : sums[i];
  }
  for (int64_t row = 0; row < rows; row++)
    for (int i = 0; i < kBlock; i++)
      out[row * outputs + i] = bias ? total[row * kBlock + i] + bias[i] : total[row * kBlock + i];
}

}  // namespace xpyd

// `x` is [rows, inputs], `out` [rows, outputs]; `bias` [outputs] may be null. 1 to 32 rows, outputs a
// multiple of 64. 1 for any other number of rows, and nothing done.
extern "C" int xpyd_matvec_float(const void* packed, const void* x, const void* bias, void* out,
                                 int64_t rows, int64_t outputs, int64_t inputs, int64_t chunk,
                                 int threads) {
  using namespace xpyd;
  if (rows < 1 || rows > kMostRows) return 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < outputs / kBlock; i++)
    float_block((const float*)packed + i * kBlock * inputs, (const float*)x,
                bias ? (const float*)bias + i * kBlock : nullptr, (float*)out + i * kBlock, rows,
                outputs, inputs, chunk);
  return 0;
}

// --- bfloat16

// Where the processor's own instruction is known; elsewhere oneDNN does it all.
#ifdef __AVX512F__
namespace xpyd {

constexpr int kVectors = kBlock / kLanes;
// Words of 32 bits: 1 KiB, some pairs ahead, also over the end of a page.
constexpr int kAhead = 256;

// One block of outputs for `kRows` rows of `x`, each of `pairs` pairs. The one place with a
// processor's own instruction: oneDNN sums by it.
template <int kRows>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static void block(
    const uint32_t* packed, const uint32_t* x, const Bfloat* bias, Bfloat* out, int64_t outputs,
    int64_t pairs, int64_t chunk) {
  __m512 total[kRows][kVectors]{};
  for (int64_t first = 0; first < pairs; first += chunk) {
    const int64_t end = first + chunk < pairs ? first + chunk : pairs;
    __m512 sum[kRows][kVectors];
    for (int row = 0; row < kRows; row++)
      for (int i = 0; i < kVectors; i++) sum[row][i] = _mm512_setzero_ps();
    for (int64_t pair = first; pair < end; pair++, packed += kBlock) {
      for (int i = 0; i < kVectors; i++) {
        __builtin_prefetch(packed + kAhead + i * kLanes);
        const __m512bh w = (__m512bh)_mm512_loadu_si512(packed + i * kLanes);
        for (int row = 0; row < kRows; row++) {
          int at;
          std::memcpy(&at, x + row * pairs + pair, sizeof at);
          sum[row][i] = _mm512_dpbf16_ps(sum[row][i], (__m512bh)_mm512_set1_epi32(at), w);
        }
      }
    }
    for (int row = 0; row < kRows; row++)
      for (int i = 0; i < kVectors; i++)
        total[row][i] = first ? _mm512_add_ps(total[row][i], sum[row][i]) : sum[row][i];
  }
  for (int row = 0; row < kRows; row++)
    for (int i = 0; i < kVectors; i++) {
      Vec v;
      std::memcpy(&v, &total[row][i], sizeof v);
      store(out + row * outputs + i * kLanes, bias ? v + load(bias + i * kLanes) : v);
    }
}

}  // namespace xpyd

// The same in bfloat16: 1 to 4 rows, inputs and `chunk` multiples of 2. Only for processors with
// avx512_bf16.
extern "C" int xpyd_matvec_bfloat(const void* packed, const void* x, const void* bias, void* out,
                                  int64_t rows, int64_t outputs, int64_t inputs, int64_t chunk,
                                  int threads) {
  using namespace xpyd;
  const auto run = rows == 1   ? block<1>
                   : rows == 2 ? block<2>
                   : rows == 3 ? block<3>
                   : rows == 4 ? block<4>
                               : nullptr;
  if (!run) return 1;
  const int64_t pairs = inputs / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < outputs / kBlock; i++)
    run((const uint32_t*)packed + i * kBlock * pairs, (const uint32_t*)x,
        bias ? (const Bfloat*)bias + i * kBlock : nullptr, (Bfloat*)out + i * kBlock, outputs,
        pairs, chunk / 2);
  return 0;
}
#endif
