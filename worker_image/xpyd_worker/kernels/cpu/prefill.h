// Attention of several new tokens of one sequence: bound by arithmetic, so keys and values are
// widened once for many rows, and a few rows go over them together.
//
// Rows keep a running largest score and sum (as in "FlashAttention-2", Dao 2023).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "attention.h"

namespace xpyd {

// 6 rows x 4 vectors of sums, 4 of keys and one query fill the 32 registers of AVX-512 and NEON, 6 x
// 2, 2 and one the 16 of AVX2.
constexpr int kRows = 6, kAcross = kLanes == 8 ? 2 : 4;
// Tokens whose widened keys and values stay in the processor's own cache: 256 KiB for a head of 64.
constexpr int64_t kSpan = 512;
// Rows of one piece of work, all heads of a KV head together: many enough for what is widened for
// them, few enough for their queries and sums to stay in the cache, too.
constexpr int64_t kRowBlock = 192;

// Rows of a sequence in one piece of work, for so many heads of a KV head.
static inline int64_t block_rows(int64_t group) {
  return std::max<int64_t>(kRows, kRowBlock / group / kRows * kRows);
}

// A thread's own memory for keys [kSpan / kLanes][head_dim][kLanes], values [kSpan][head_dim], scores
// [kRows][kSpan], queries [rows][head_dim], and what rows gathered so far.
struct Scratch {
  float *keys, *values, *scores, *queries, *out, *largest, *total;

  Scratch(int64_t head_dim, int64_t rows) {
    const int64_t sizes[] = {kSpan * head_dim, kSpan * head_dim, kRows * kSpan, rows * head_dim,
                             rows * head_dim,  rows,             rows};
    float** parts[] = {&keys, &values, &scores, &queries, &out, &largest, &total};
    int64_t all = 0;
    for (int64_t size : sizes) all += (size + 15) / 16 * 16;
    memory_.reset(static_cast<float*>(::operator new(all * sizeof(float), std::align_val_t{64})));
    float* next = memory_.get();
    for (int i = 0; i < 7; i++) {
      *parts[i] = next;
      next += (sizes[i] + 15) / 16 * 16;
    }
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> memory_;
};

// Widens the tokens [first, end) into the scratch; lanes behind the last are zeros.
template <typename T, int V>
static void widen(const Tokens<T>& tokens, int64_t first, int64_t end, Scratch& s) {
  constexpr int64_t size = V * kLanes;
  const T* keys[kSpan];
  tokens.keys(first, end - first, keys);
  for (int64_t i = 0; i < end - first; i++) {
    const T* key = keys[i];
    float* to = s.keys + i / kLanes * size * kLanes + i % kLanes;
    for (int v = 0; v < V; v++) {
      const Vec x = load(key + v * kLanes);
      for (int j = 0; j < kLanes; j++) to[(v * kLanes + j) * kLanes] = x[j];
      store((Float*)s.values + i * size + v * kLanes, load(key + size + v * kLanes));
    }
  }
  for (int64_t i = end - first; i % kLanes; i++)
    for (int64_t d = 0; d < size; d++)
      s.keys[i / kLanes * size * kLanes + d * kLanes + i % kLanes] = 0;
}

// Scores of R rows and A groups of kLanes tokens.
template <int V, int R, int A>
static inline void multiply(const float* queries, const float* keys, float* scores) {
  constexpr int64_t size = V * kLanes;
  Vec sums[R][A]{};
  for (int64_t d = 0; d < size; d++) {
    Vec key[A];
    for (int a = 0; a < A; a++) key[a] = load((const Float*)keys + (a * size + d) * kLanes);
    for (int r = 0; r < R; r++)
      for (int a = 0; a < A; a++) sums[r][a] = sums[r][a] + key[a] * queries[r * size + d];
  }
  for (int r = 0; r < R; r++)
    for (int a = 0; a < A; a++) store((Float*)scores + r * kSpan + a * kLanes, sums[r][a]);
}

// Adds R rows' weighted values, `count` tokens, to `out` [R][head_dim].
template <int V, int R>
static inline void weigh(const float* scores, const float* values, int64_t count, float* out) {
  constexpr int64_t size = V * kLanes;
  int v = 0;
  const auto some = [&]<int A>(std::integral_constant<int, A>) {
    Vec sums[R][A];
    for (int r = 0; r < R; r++)
      for (int a = 0; a < A; a++) sums[r][a] = load((Float*)out + r * size + (v + a) * kLanes);
    for (int64_t t = 0; t < count; t++) {
      Vec x[A];
      for (int a = 0; a < A; a++) x[a] = load((const Float*)values + t * size + (v + a) * kLanes);
      for (int r = 0; r < R; r++)
        for (int a = 0; a < A; a++) sums[r][a] = sums[r][a] + x[a] * scores[r * kSpan + t];
    }
    for (int r = 0; r < R; r++)
      for (int a = 0; a < A; a++) store((Float*)out + r * size + (v + a) * kLanes, sums[r][a]);
  };
  for (; v + kAcross <= V; v += kAcross) some(std::integral_constant<int, kAcross>{});
  for (; v < V; v++) some(std::integral_constant<int, 1>{});
}

// R rows, the first at `position`, against the tokens [first, end) in the scratch. `at` is the
// rows' place in the piece.
template <int V, int R>
static void attend_rows(const Attention& a, Scratch& s, int64_t at, int64_t position, int64_t first,
                        int64_t end) {
  constexpr int64_t size = V * kLanes;
  const int64_t last = std::min(end, position + R) - first;  // tokens that any of the rows sees
  if (last <= 0) return;
  const int64_t groups = (last + kLanes - 1) / kLanes;
  int64_t g = 0;
  for (; g + kAcross <= groups; g += kAcross)
    multiply<V, R, kAcross>(s.queries + at * size, s.keys + g * size * kLanes,
                            s.scores + g * kLanes);
  for (; g < groups; g++)
    multiply<V, R, 1>(s.queries + at * size, s.keys + g * size * kLanes, s.scores + g * kLanes);
  for (int r = 0; r < R; r++) {
    float* scores = s.scores + r * kSpan;
    const int64_t own = position + r;
    const int64_t low = std::max<int64_t>(0, std::min(groups * kLanes, first_seen(a, own) - first));
    const int64_t high = std::max(low, std::min(groups * kLanes, own + 1 - first));
    std::fill(scores, scores + low, kNever);
    std::fill(scores + high, scores + groups * kLanes, kNever);
    Vec most = splat(s.largest[at + r]), total{};
    for (int64_t i = 0; i < groups * kLanes; i += kLanes)
      most = larger(most, load((Float*)scores + i));
    const float largest_now = largest(most);
    // A row may see none of these tokens: the windows of earlier rows reach further back.
    const float base = largest_now == kNever ? 0 : largest_now;
    for (int64_t i = 0; i < groups * kLanes; i += kLanes) {
      const Vec weight = exp_down(load((Float*)scores + i) - base);
      total = total + weight;
      store((Float*)scores + i, weight);
    }
    const float before = std::exp(s.largest[at + r] - base);
    s.largest[at + r] = largest_now;
    s.total[at + r] = s.total[at + r] * before + sum(total);
    float* out = s.out + (at + r) * size;
    for (int v = 0; v < V; v++)
      store((Float*)out + v * kLanes, load((Float*)out + v * kLanes) * before);
  }
  weigh<V, R>(s.scores, s.values, last, s.out + at * size);
}

// Rows [row, row + count) of a sequence, block_rows at most, for all heads of a KV head.
template <typename T, int V>
static void attend_block(const Attention& a, int64_t sequence, int64_t kv_head, int64_t row,
                         int64_t count, Scratch& s) {
  constexpr int64_t size = V * kLanes;
  const Tokens<T> tokens(a, sequence, kv_head);
  const int64_t group = a.heads / a.kv_heads, start = a.starts[sequence] + row;
  const int64_t end = start + count, stride = a.heads * size;
  // The scratch has one head's rows after another's.
  const int64_t base = (a.rows[sequence] + row) * stride + kv_head * group * size;
  for (int64_t i = 0; i < group * count; i++) {
    const T* query = (const T*)a.query + base + i / count * size + i % count * stride;
    for (int v = 0; v < V; v++) {
      store((Float*)s.queries + i * size + v * kLanes, load(query + v * kLanes) * a.scale);
      store((Float*)s.out + i * size + v * kLanes, Vec{});
    }
    s.largest[i] = kNever;
    s.total[i] = 0;
  }
  for (int64_t first = first_seen(a, start); first < end; first += kSpan) {
    const int64_t here = std::min(end, first + kSpan);
    widen<T, V>(tokens, first, here, s);
    for (int64_t head = 0; head < group; head++) {
      int64_t i = 0;
      for (; i + kRows <= count; i += kRows)
        attend_rows<V, kRows>(a, s, head * count + i, start + i, first, here);
      for (; i < count; i++) attend_rows<V, 1>(a, s, head * count + i, start + i, first, here);
    }
  }
  for (int64_t i = 0; i < group * count; i++) {
    T* to = (T*)a.out + base + i / count * size + i % count * stride;
    const float scale = 1.0f / s.total[i];
    for (int v = 0; v < V; v++)
      store(to + v * kLanes, load((Float*)s.out + i * size + v * kLanes) * scale);
  }
}

}  // namespace xpyd
