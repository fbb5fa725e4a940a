// Vectors of floats and the storage types of a model: float, bfloat16, IEEE half.
//
// A vector is one register: 16 floats of AVX-512, 8 of AVX2, 4 of NEON. Compilers take longer ones,
// too, but keep them in memory where there are several (4 times as slow with AVX2). All sizes are
// multiples of 16. Everything is computed in float; loads widen, stores round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace xpyd {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct Float {
  float value;
};
struct Bfloat {
  uint16_t bits;
};
struct Half {
  _Float16 value;
};

// Less zero is x for all x: compilers leave it out, where plus zero would be an addition.
static inline Vec splat(float x) { return x - Vec{}; }

static inline Vec load(const Float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

static inline Vec load(const Bfloat* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Vec)(__builtin_convertvector(bits, Words) << 16);
}

static inline Vec load(const Half* from) {
  typedef _Float16 Narrow __attribute__((vector_size(2 * kLanes)));
  Narrow v;
  std::memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, Vec);
}

static inline void store(Float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

static inline void store(Bfloat* to, Vec v) {
  Words bits = (Words)v;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  // Rounding could turn a NaN into an infinity.
  rounded = (v == v) ? rounded : (Words{} + 0x7fc0u);
  Halves narrow = __builtin_convertvector(rounded, Halves);
  std::memcpy(to, &narrow, sizeof narrow);
}

static inline void store(Half* to, Vec v) {
  typedef _Float16 Narrow __attribute__((vector_size(2 * kLanes)));
  Narrow narrow = __builtin_convertvector(v, Narrow);
  std::memcpy(to, &narrow, sizeof narrow);
}

static inline float sum(Vec v) {
  float part[kLanes], total = 0;
  std::memcpy(part, &v, sizeof v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  total = part[0];
  return total;
}

static inline float largest(Vec v) {
  float part[kLanes];
  std::memcpy(part, &v, sizeof v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
  return part[0];
}

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e^x to 2 units in the last place for x in [-87, 0]; 0 below (the range that softmax and silu need).
static inline Vec exp_down(Vec x) {
  const Vec in_range = larger(x, splat(-87.0f));
  // 2^n * 2^f with n whole and f in [-0.5, 0.5].
  const Vec scaled = in_range * 1.44269504088896341f;
  const Ints whole = __builtin_convertvector(scaled - 0.5f, Ints);  // truncates: x <= 0
  const Vec n = __builtin_convertvector(whole, Vec);
  Vec f = in_range - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  // Cephes' expf.
  Vec p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  const Vec power = (Vec)((whole + 127) << 23);
  // A NaN stays one, so that what a broken weight gives is seen in the end.
  const Vec found = x == x ? p * power : x;
  return x < -87.0f ? Vec{} : found;
}

}  // namespace xpyd
