// What a decoder layer does besides matrices and attention: norms, rotation with the write to the
// paged cache, and the gated activation. One call for all rows of a step.
//
// Rows are spread over OpenMP's threads when there is enough work for a second one. Sizes are in
// elements; every size is a multiple of 16, but for the rotation's half (any size).
#include <cmath>
#include <cstddef>

#include "vec.h"

namespace xpyd {

// Elements of work below which a second thread costs more than it does.
constexpr int64_t kWorthThread = 32768;

static inline int threads_for(int64_t elements, int threads) {
  const int64_t useful = elements / kWorthThread;
  return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}

// residual += x where there is an x; out = residual / rms(residual) * weight.
template <typename T>
static void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t size, float eps) {
  Vec squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    Vec v = load(residual + i);
    if (x) {
      v = v + load(x + i);
      store(residual + i, v);
      v = load(residual + i);
    }
    squares = squares + v * v;
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
  for (int64_t i = 0; i < size; i += kLanes)
    store(out + i, load(residual + i) * scale * load(weight + i));
}

template <typename T>
static void norm_rows(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                      int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads_for(rows* size, threads)) if (rows * size > kWorthThread)
  for (int64_t row = 0; row < rows; row++)
    norm_row(x ? (const T*)x + row * size : nullptr, (T*)residual + row * size, (const T*)weight,
             (T*)out + row * size, size, eps);
}

template <typename T>
static void silu_mul_rows(const void* gate_up, void* out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads_for(rows* size, threads)) if (rows * size > kWorthThread)
  for (int64_t row = 0; row < rows; row++) {
    const T* gate = (const T*)gate_up + row * 2 * size;
    const T* up = gate + size;
    T* to = (T*)out + row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec x = load(gate + i);
      // x * sigmoid(x), with an exponential that never overflows.
      const Vec small = exp_down(x < 0.0f ? x : -x);
      const Vec sigmoid = (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
      store(to + i, x * sigmoid * load(up + i));
    }
  }
}

static inline float widen(Float x) { return x.value; }
static inline float widen(Half x) { return (float)x.value; }
static inline float widen(Bfloat x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline void narrow(Float* to, float x) { to->value = x; }
static inline void narrow(Half* to, float x) { to->value = (_Float16)x; }
static inline void narrow(Bfloat* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = x == x ? (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : (uint16_t)0x7fc0;
}

// One head: norm (where there is a weight) and rotation of `from` into `to`.
template <typename T>
static void turn_head(const T* from, const T* weight, float eps, const float* cos, const float* sin,
                      T* to, int64_t size) {
  const int64_t half = size / 2, whole = half / kLanes * kLanes;
  float scale = 1.0f;
  if (weight) {
    Vec squares{};
    for (int64_t i = 0; i < size; i += kLanes) squares = squares + load(from + i) * load(from + i);
    scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
  }
  for (int64_t i = 0; i < whole; i += kLanes) {
    Vec first = load(from + i), second = load(from + i + half);
    if (weight) {
      first = first * scale * load(weight + i);
      second = second * scale * load(weight + i + half);
    }
    const Vec c = load((const Float*)cos + i), s = load((const Float*)sin + i);
    store(to + i, first * c - second * s);
    store(to + i + half, second * c + first * s);
  }
  for (int64_t i = whole; i < half; i++) {
    const float first = widen(from[i]) * scale * (weight ? widen(weight[i]) : 1.0f);
    const float second = widen(from[i + half]) * scale * (weight ? widen(weight[i + half]) : 1.0f);
    narrow(to + i, first * cos[i] - second * sin[i]);
    narrow(to + i + half, second * cos[i] + first * sin[i]);
  }
}

struct Turn {
  const void* qkv;  // [rows, heads + 2 * kv_heads, head_dim]
  const float* cos;  // [rows, head_dim / 2]
  const float* sin;
  const void* query_weight;  // [head_dim], or null
  const void* key_weight;
  void* query;  // [rows, heads, head_dim]
  void* cache;  // [blocks, kv_heads, block_size, 2 * head_dim]
  const int64_t* slots;  // [rows]: block * block_size + offset
  int64_t rows, heads, kv_heads, head_dim, block_size;
  float eps;
};

template <typename T>
static void rotate_rows(const Turn& t, int threads) {
  const int64_t size = t.head_dim, all = t.heads + 2 * t.kv_heads;
#pragma omp parallel for num_threads(threads_for(t.rows* all* size, threads)) if (t.rows * all * size > kWorthThread)
  for (int64_t row = 0; row < t.rows; row++) {
    const T* from = (const T*)t.qkv + row * all * size;
    const float *cos = t.cos + row * (size / 2), *sin = t.sin + row * (size / 2);
    T* query = (T*)t.query + row * t.heads * size;
    for (int64_t head = 0; head < t.heads; head++)
      turn_head(from + head * size, (const T*)t.query_weight, t.eps, cos, sin, query + head * size,
                size);
    const int64_t block = t.slots[row] / t.block_size, offset = t.slots[row] % t.block_size;
    for (int64_t head = 0; head < t.kv_heads; head++) {
      T* to = (T*)t.cache + ((block * t.kv_heads + head) * t.block_size + offset) * 2 * size;
      turn_head(from + (t.heads + head) * size, (const T*)t.key_weight, t.eps, cos, sin, to, size);
      std::memcpy(to + size, from + (t.heads + t.kv_heads + head) * size, size * sizeof(T));
    }
  }
}

}  // namespace xpyd

// `type`: 0 float, 1 bfloat16, 2 half. `x` may be null.
extern "C" void xpyd_norm(int type, const void* x, void* residual, const void* weight, void* out,
                          int64_t rows, int64_t size, float eps, int threads) {
  using namespace xpyd;
  const auto run = type == 0 ? norm_rows<Float> : type == 1 ? norm_rows<Bfloat> : norm_rows<Half>;
  run(x, residual, weight, out, rows, size, eps, threads);
}

extern "C" void xpyd_silu_mul(int type, const void* gate_up, void* out, int64_t rows, int64_t size,
                              int threads) {
  using namespace xpyd;
  const auto run = type == 0   ? silu_mul_rows<Float>
                   : type == 1 ? silu_mul_rows<Bfloat>
                               : silu_mul_rows<Half>;
  run(gate_up, out, rows, size, threads);
}

// What crosses over by layout must be the same on both sides.
extern "C" int64_t xpyd_turn_bytes() { return sizeof(xpyd::Turn); }

extern "C" void xpyd_rotate(int type, const xpyd::Turn* turn, int threads) {
  using namespace xpyd;
  const auto run = type == 0   ? rotate_rows<Float>
                   : type == 1 ? rotate_rows<Bfloat>
                               : rotate_rows<Half>;
  run(*turn, threads);
}
