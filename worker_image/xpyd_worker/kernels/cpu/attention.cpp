// Paged attention of one layer for a flat batch: cuts it into pieces of work for OpenMP's threads.
#include <vector>

#include "attention.h"
#include "decode.h"
#include "prefill.h"

namespace xpyd {

// A piece of a decoding sequence's context is no shorter: joining pieces costs, too.
constexpr int64_t kLeastPiece = 512;
// Pieces of work for each thread, so that they end at about the same time.
constexpr int64_t kPiecesPerThread = 4;

// Bytes of keys and values below which a second thread costs more than it does.
constexpr int64_t kWorthThreads = 256 * 1024;

// Work for one thread: tokens [first, end) of a decoding sequence, or its rows [first, end).
struct Piece {
  int64_t sequence, kv_head, first, end, partial;
};

template <typename T, int V>
static void run(const Attention& a, int threads) {
  const int64_t group = a.heads / a.kv_heads, rows = block_rows(group);
  int64_t decoding = 0;
  for (int64_t s = 0; s < a.sequences; s++) decoding += a.counts[s] == 1;
  // Pieces of each decoding sequence's KV head.
  const int64_t wanted =
      decoding ? std::max<int64_t>(1, threads * kPiecesPerThread / (decoding * a.kv_heads)) : 1;
  std::vector<Piece> decode, prefill;
  std::vector<int64_t> pieces(a.sequences, 0), partials(a.sequences, 0);
  int64_t partial = 0;
  for (int64_t s = 0; s < a.sequences; s++) {
    if (a.counts[s] == 1) {
      const int64_t first = first_seen(a, a.starts[s]), end = a.starts[s] + 1;
      const int64_t most = std::max<int64_t>(1, (end - first) / kLeastPiece);
      pieces[s] = std::min(wanted, most);
      partials[s] = partial;
      const int64_t length = (end - first + pieces[s] - 1) / pieces[s];
      for (int64_t i = 0; i < pieces[s]; i++)
        for (int64_t head = 0; head < a.kv_heads; head++) {
          decode.push_back({s, head, first + i * length, std::min(end, first + (i + 1) * length),
                            partial});
          partial += group;
        }
    } else {
      // The last rows see the most: they come first, so that no thread is left with a long piece.
      for (int64_t row = (a.counts[s] - 1) / rows * rows; row >= 0; row -= rows)
        for (int64_t head = 0; head < a.kv_heads; head++)
          prefill.push_back({s, head, row, std::min(a.counts[s], row + rows), 0});
    }
  }
  std::vector<Partial<V>> results(partial);
  const int64_t all = prefill.size() + decode.size();
  int64_t tokens = 0;
  for (const Piece& piece : decode) tokens += piece.end - piece.first;
  const bool is_worth = !prefill.empty() || tokens * 2 * a.head_dim * (int64_t)sizeof(T) > kWorthThreads;
#pragma omp parallel num_threads(threads) if (all > 1 && is_worth)
  {
    std::unique_ptr<Scratch> scratch;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < all; i++) {
      if (i < (int64_t)prefill.size()) {
        const Piece& p = prefill[i];
        if (!scratch) scratch.reset(new Scratch(a.head_dim, group * rows));
        attend_block<T, V>(a, p.sequence, p.kv_head, p.first, p.end - p.first, *scratch);
      } else {
        const Piece& p = decode[i - prefill.size()];
        attend_piece<T, V>(a, p.sequence, p.kv_head, p.first, p.end, &results[p.partial]);
      }
    }
#pragma omp for
    for (int64_t s = 0; s < a.sequences; s++)
      if (a.counts[s] == 1)
        for (int64_t head = 0; head < a.heads; head++)
          join<T, V>(&results[partials[s] + head], pieces[s], a.heads,
                     (T*)a.out + (a.rows[s] * a.heads + head) * a.head_dim);
  }
}

template <typename T>
static int run_any(const Attention& a, int threads) {
  switch (a.head_dim) {
#define XPYD_CASE(size)              \
  case size:                         \
    run<T, size / kLanes>(a, threads); \
    return 0;
    XPYD_CASE(16)
    XPYD_CASE(32)
    XPYD_CASE(64)
    XPYD_CASE(80)
    XPYD_CASE(96)
    XPYD_CASE(128)
    XPYD_CASE(256)
#undef XPYD_CASE
  }
  return 1;
}

}  // namespace xpyd

// What crosses over by layout must be the same on both sides.
extern "C" int64_t xpyd_attention_bytes() { return sizeof(xpyd::Attention); }

// `type`: 0 float, 1 bfloat16, 2 half. 1: no code for this head_dim.
extern "C" int xpyd_attention(int type, const xpyd::Attention* a, int threads) {
  using namespace xpyd;
  return type == 0   ? run_any<Float>(*a, threads)
         : type == 1 ? run_any<Bfloat>(*a, threads)
                     : run_any<Half>(*a, threads);
}
