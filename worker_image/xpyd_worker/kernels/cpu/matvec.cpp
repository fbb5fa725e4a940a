// A bfloat16 matrix times a few rows, out of the layout that oneDNN packs it in: bound by memory.
//
// The layout: outputs in blocks of 64; in a block pairs of inputs one after another, each with its
// 64 outputs: [outputs / 64][inputs / 2][64][2]. So each block is one stream of memory. The sums are
// oneDNN's to the last bit, so that a row gives the same whatever else is in the batch: chunks of
// inputs from zero, pair by pair, added up in order. packed.py finds out how long they are, and
// whether all this holds. The one place with a processor's own instruction: oneDNN sums by it.
#include "vec.h"

#ifdef __x86_64__
#include <immintrin.h>

namespace xpyd {

constexpr int kBlock = 64, kVectors = kBlock / kLanes;
// Words of 32 bits: 1 KiB, some pairs ahead, also over the end of a page.
constexpr int kAhead = 256;

// One block of outputs for `kRows` rows of `x`, each of `pairs` pairs.
template <int kRows>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) static void block(
    const uint32_t* packed, const uint32_t* x, const Bfloat* bias, Bfloat* out, int64_t outputs,
    int64_t pairs, int64_t chunk) {
  __m512 total[kRows][kVectors];
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
#endif

// `x` is [rows, inputs], `out` [rows, outputs]; `bias` [outputs] may be null. 1 to 4 rows, outputs a
// multiple of 64, inputs and `chunk` of 2. Only for processors with avx512_bf16. 1 where there is no
// such code, or for any other number of rows, and nothing done.
extern "C" int xpyd_matvec(const void* packed, const void* x, const void* bias, void* out,
                           int64_t rows, int64_t outputs, int64_t inputs, int64_t chunk,
                           int threads) {
#ifdef __x86_64__
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
#else
  return 1;
#endif
}
