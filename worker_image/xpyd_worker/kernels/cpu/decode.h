// Attention of one new token per sequence: bound by reading keys and values, so all is in float.
//
// A sequence's context is cut into pieces, so that threads share a long one; each leaves its largest
// score, its sum of exponentials and its weighted values, which `join` brings together (as in
// "Flash-Decoding", Dao et al. 2023).
#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"

namespace xpyd {

// Tokens whose scores are kept at a time: their keys and values (256 bytes each for a head of 64 in
// 16 bits) stay in the processor's own cache between the two passes.
constexpr int kTile = 256;
constexpr int kAhead = 16;
// Heads that go over keys and values together.
constexpr int kTogether = 2;

// Adds up each of 16 vectors: lane i of the result is the sum of v[i].
static inline Vec sums(Vec v[kLanes]) {
#define XPYD_MERGE(x, y, b)                                                                       \
  __builtin_shufflevector(x, y, XPYD_L(0, b), XPYD_L(1, b), XPYD_L(2, b), XPYD_L(3, b),           \
                          XPYD_L(4, b), XPYD_L(5, b), XPYD_L(6, b), XPYD_L(7, b), XPYD_L(8, b),   \
                          XPYD_L(9, b), XPYD_L(10, b), XPYD_L(11, b), XPYD_L(12, b),              \
                          XPYD_L(13, b), XPYD_L(14, b), XPYD_L(15, b)) +                          \
      __builtin_shufflevector(x, y, XPYD_M(0, b), XPYD_M(1, b), XPYD_M(2, b), XPYD_M(3, b),       \
                              XPYD_M(4, b), XPYD_M(5, b), XPYD_M(6, b), XPYD_M(7, b),             \
                              XPYD_M(8, b), XPYD_M(9, b), XPYD_M(10, b), XPYD_M(11, b),           \
                              XPYD_M(12, b), XPYD_M(13, b), XPYD_M(14, b), XPYD_M(15, b))
// Lane l comes from x where bit b of l is 0, else from y: once itself, once its partner in that bit.
#define XPYD_L(l, b) ((l) & (b) ? 16 + (l) : (l))
#define XPYD_M(l, b) ((l) & (b) ? 16 + ((l) ^ (b)) : ((l) ^ (b)))
  for (int i = 0; i < 8; i++) v[i] = XPYD_MERGE(v[i], v[i + 8], 8);
  for (int i = 0; i < 4; i++) v[i] = XPYD_MERGE(v[i], v[i + 4], 4);
  for (int i = 0; i < 2; i++) v[i] = XPYD_MERGE(v[i], v[i + 2], 2);
  return XPYD_MERGE(v[0], v[1], 1);
#undef XPYD_M
#undef XPYD_L
#undef XPYD_MERGE
}

// What is left of some of a head's context: values weighted by e^(score - largest).
template <int V>
struct Partial {
  Vec values[V];
  float largest, total;
};

// Scores of `count` <= kTile tokens for H heads; lanes behind the last are -inf. Memory is asked for
// what comes `kAhead` tokens later: blocks stand anywhere, so the processor cannot foresee it.
template <typename T, int V, int H>
static inline void score(const T* const* keys, int64_t count, const Vec (&query)[H][V],
                         float (&scores)[H][kTile]) {
  for (int64_t done = 0; done < count; done += kLanes) {
    Vec part[H][kLanes];
    const int here = (int)std::min<int64_t>(kLanes, count - done);
    for (int i = 0; i < kLanes; i++) {
      // Behind the last token the last one is scored again; what comes of it is masked.
      const int64_t at = done + std::min(i, here - 1);
      const T* key = keys[at];
      const char* later = (const char*)keys[at + kAhead];
      for (size_t line = 0; line < 2 * V * kLanes * sizeof(T); line += 64)
        __builtin_prefetch(later + line);
      Vec total[H]{};
      for (int v = 0; v < V; v++) {
        const Vec k = load(key + v * kLanes);
        for (int h = 0; h < H; h++) total[h] = total[h] + k * query[h][v];
      }
      for (int h = 0; h < H; h++) part[h][i] = total[h];
    }
    const Ints lane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int h = 0; h < H; h++) {
      const Vec all = sums(part[h]);
      const Vec kept = lane < here ? all : splat(kNever);
      std::memcpy(&scores[h][done], &kept, sizeof kept);
    }
  }
}

// Attends H heads to the tokens [first, end) of a sequence.
template <typename T, int V, int H>
static void attend(const Tokens<T>& tokens, int64_t first, int64_t end, const T* query, float scale,
                   Partial<V>* out) {
  Vec q[H][V];
  for (int h = 0; h < H; h++) {
    for (int v = 0; v < V; v++) q[h][v] = load(query + (h * V + v) * kLanes) * scale;
    out[h].largest = kNever;
    out[h].total = 0;
    for (int v = 0; v < V; v++) out[h].values[v] = Vec{};
  }
  alignas(64) float scores[H][kTile];
  const T* keys[kTile + kAhead];
  for (int64_t from = first; from < end; from += kTile) {
    const int64_t count = std::min<int64_t>(kTile, end - from);
    const int64_t known = std::min<int64_t>(kTile + kAhead, end - from);
    tokens.keys(from, known, keys);
    std::fill(keys + known, keys + std::max(known, count + kAhead), keys[known - 1]);
    score<T, V, H>(keys, count, q, scores);
    Vec values[H][V];
    for (int h = 0; h < H; h++) {
      Vec most = splat(out[h].largest), total{};
      for (int64_t i = 0; i < count; i += kLanes) most = larger(most, load((Float*)&scores[h][i]));
      const float largest_now = largest(most);
      for (int64_t i = 0; i < count; i += kLanes) {
        const Vec weight = exp_down(load((Float*)&scores[h][i]) - largest_now);
        total = total + weight;
        std::memcpy(&scores[h][i], &weight, sizeof weight);
      }
      const float before = std::exp(out[h].largest - largest_now);
      out[h].largest = largest_now;
      out[h].total = out[h].total * before + sum(total);
      for (int v = 0; v < V; v++) values[h][v] = out[h].values[v] * before;
    }
    for (int64_t i = 0; i < count; i++) {
      const T* value = keys[i] + V * kLanes;
      for (int v = 0; v < V; v++) {
        const Vec x = load(value + v * kLanes);
        for (int h = 0; h < H; h++) values[h][v] = values[h][v] + x * scores[h][i];
      }
    }
    for (int h = 0; h < H; h++)
      for (int v = 0; v < V; v++) out[h].values[v] = values[h][v];
  }
}

// All heads of one KV head over one piece of a sequence.
template <typename T, int V>
static void attend_piece(const Attention& a, int64_t sequence, int64_t kv_head, int64_t first,
                         int64_t end, Partial<V>* out) {
  const Tokens<T> tokens(a, sequence, kv_head);
  const int64_t group = a.heads / a.kv_heads;
  const T* query = (const T*)a.query + (a.rows[sequence] * a.heads + kv_head * group) * a.head_dim;
  int64_t head = 0;
  for (; head + kTogether <= group; head += kTogether)
    attend<T, V, kTogether>(tokens, first, end, query + head * a.head_dim, a.scale, out + head);
  for (; head < group; head++)
    attend<T, V, 1>(tokens, first, end, query + head * a.head_dim, a.scale, out + head);
}

// The pieces' results of one head, `stride` apart, into its output.
template <typename T, int V>
static void join(const Partial<V>* parts, int64_t count, int64_t stride, T* out) {
  float most = kNever, total = 0;
  for (int64_t i = 0; i < count; i++) most = std::max(most, parts[i * stride].largest);
  Vec values[V]{};
  for (int64_t i = 0; i < count; i++) {
    const Partial<V>& part = parts[i * stride];
    const float weight = std::exp(part.largest - most);
    total += part.total * weight;
    for (int v = 0; v < V; v++) values[v] = values[v] + part.values[v] * weight;
  }
  for (int v = 0; v < V; v++) store(out + v * kLanes, values[v] * (1.0f / total));
}

}  // namespace xpyd
