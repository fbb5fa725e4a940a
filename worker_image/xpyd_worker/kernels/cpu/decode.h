// Attention of one new token per sequence: bound by reading keys and values, so all is in float.
//
// A sequence's context is cut into pieces, so that threads share a long one; each leaves its largest
// score, its sum of exponentials and its weighted values, which `join` brings together (as in
// "Flash-Decoding", Dao et al. 2023).
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention.h"

namespace xpyd {

// Tokens whose scores are kept at a time: their keys and values (256 bytes each for a head of 64 in
// 16 bits) stay in the processor's own cache between the two passes.
constexpr int kTile = 256;
constexpr int kAhead = 16;
// Heads that go over keys and values together.
constexpr int kTogether = 2;
// Vectors of values whose sums, one for each of these heads, are in registers at a time.
constexpr int kColumns = kLanes == 8 ? 4 : 8;

// Vectors in which each lane is what it has in bit `kBit` of its number: where it is 0 of x, else of
// y; once itself, once its partner in that bit. Added up.
template <int kBit, int... kLane>
static inline Vec merge(Vec x, Vec y, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, y, (kLane & kBit ? kLanes + kLane : kLane)...) +
         __builtin_shufflevector(x, y, (kLane & kBit ? kLanes + (kLane ^ kBit) : kLane ^ kBit)...);
}

// Adds up each of as many vectors as they have lanes: lane i of the result is the sum of v[i].
template <int kBit = kLanes / 2>
static inline Vec sums(Vec v[kLanes]) {
  constexpr std::make_integer_sequence<int, kLanes> lanes{};
  for (int i = 0; i < kBit; i++) v[i] = merge<kBit>(v[i], v[i + kBit], lanes);
  if constexpr (kBit > 1) return sums<kBit / 2>(v);
  return v[0];
}

// Each lane its number.
template <int... kLane>
static constexpr Ints numbered(std::integer_sequence<int, kLane...>) {
  return Ints{kLane...};
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
    const Ints lane = numbered(std::make_integer_sequence<int, kLanes>{});
    for (int h = 0; h < H; h++) {
      const Vec all = sums(part[h]);
      const Vec kept = lane < here ? all : splat(kNever);
      std::memcpy(&scores[h][done], &kept, sizeof kept);
    }
  }
}

// Adds `count` tokens' values, weighted, to C vectors of the heads' values, from vector `first` on.
template <typename T, int V, int H, int C>
static inline void weigh(const T* const* keys, int64_t count, const float (&weights)[H][kTile],
                         int first, Partial<V>* out) {
  Vec values[H][C];
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) values[h][c] = out[h].values[first + c];
  for (int64_t i = 0; i < count; i++) {
    const T* value = keys[i] + (V + first) * kLanes;
    for (int c = 0; c < C; c++) {
      const Vec x = load(value + c * kLanes);
      for (int h = 0; h < H; h++) values[h][c] = values[h][c] + x * weights[h][i];
    }
  }
  for (int h = 0; h < H; h++)
    for (int c = 0; c < C; c++) out[h].values[first + c] = values[h][c];
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
      for (int v = 0; v < V; v++) out[h].values[v] = out[h].values[v] * before;
    }
    constexpr int kWhole = V / kColumns * kColumns;
    if constexpr (kWhole > 0)
      for (int v = 0; v < kWhole; v += kColumns)
        weigh<T, V, H, kColumns>(keys, count, scores, v, out);
    if constexpr (kWhole < V) weigh<T, V, H, V - kWhole>(keys, count, scores, kWhole, out);
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
