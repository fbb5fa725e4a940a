// A bfloat16 matrix times a few rows, out of the layout that oneDNN packs it in: bound by memory.
//
// The layout (packed.py checks it, matrix by matrix): outputs in blocks of 64; in a block pairs of
// inputs one after another, each with its 64 outputs: [outputs / 64][inputs / 2][64][2]. So each
// block is one stream of memory. A pair is 32 bits; shifted and masked it is two floats.
#include "vec.h"

namespace xpyd {

constexpr int kBlock = 64, kVectors = kBlock / kLanes;
// Words of 32 bits: 1 KiB, some pairs ahead, also over the end of a page.
constexpr int kAhead = 256;

static inline Vec even(Words pair) { return (Vec)(pair << 16); }
static inline Vec odd(Words pair) { return (Vec)(pair & 0xffff0000u); }

static inline uint32_t word(const uint32_t* from) {
  uint32_t w;
  std::memcpy(&w, from, sizeof w);
  return w;
}

// One block of outputs for `kRows` rows of `x`, each of `pairs` pairs.
template <int kRows>
static void block(const uint32_t* packed, const uint32_t* x, const Bfloat* bias, Bfloat* out,
                  int64_t outputs, int64_t pairs) {
  // Two sums each: a sum waits for its last addition.
  Vec evens[kRows][kVectors] = {}, odds[kRows][kVectors] = {};
  for (int64_t pair = 0; pair < pairs; pair++, packed += kBlock) {
    for (int i = 0; i < kVectors; i++) {
      __builtin_prefetch(packed + kAhead + i * kLanes);
      Words w;
      std::memcpy(&w, packed + i * kLanes, sizeof w);
      for (int row = 0; row < kRows; row++) {
        const Words at = Words{} + word(x + row * pairs + pair);
        evens[row][i] = evens[row][i] + even(w) * even(at);
        odds[row][i] = odds[row][i] + odd(w) * odd(at);
      }
    }
  }
  for (int row = 0; row < kRows; row++)
    for (int i = 0; i < kVectors; i++) {
      const Vec sum = evens[row][i] + odds[row][i];
      store(out + row * outputs + i * kLanes, bias ? sum + load(bias + i * kLanes) : sum);
    }
}

}  // namespace xpyd

// `x` is [rows, inputs], `out` [rows, outputs]; `bias` [outputs] may be null. 1 to 4 rows, outputs a
// multiple of 64, inputs of 2; 1 for any other number of rows, and nothing done.
extern "C" int xpyd_matvec(const void* packed, const void* x, const void* bias, void* out,
                           int64_t rows, int64_t outputs, int64_t inputs, int threads) {
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
        pairs);
  return 0;
}
