// What the two forms of attention share: the step's sequences, and one piece of work for a thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vec.h"

namespace xpyd {

// One layer's attention. `cache` is [blocks, kv_heads, block_size, 2 * head_dim], K then V per token.
struct Attention {
  const void* query;      // [rows, heads, head_dim]
  const void* cache;
  void* out;              // [rows, heads, head_dim]
  const int32_t* tables;  // [sequences, table_width]: block ids
  const int64_t* starts;  // [sequences]: position of the first row
  const int64_t* counts;  // [sequences]: rows
  const int64_t* rows;    // [sequences]: first row in the flat batch
  int64_t sequences, table_width, heads, kv_heads, head_dim, block_size;
  int64_t window;  // positions that a token sees, its own included; 0: all
  float scale;
};

// Tokens of one sequence in the cache, as one KV head has them.
template <typename T>
struct Tokens {
  const T* cache;
  const int32_t* table;
  int64_t block_stride, head_offset, block_size, head_dim;

  Tokens(const Attention& a, int64_t sequence, int64_t kv_head)
      : cache((const T*)a.cache),
        table(a.tables + sequence * a.table_width),
        block_stride(a.kv_heads * a.block_size * 2 * a.head_dim),
        head_offset(kv_head * a.block_size * 2 * a.head_dim),
        block_size(a.block_size),
        head_dim(a.head_dim) {}

  // Where the keys of the tokens [first, first + count) stand; a value stands head_dim behind.
  void keys(int64_t first, int64_t count, const T** to) const {
    int64_t block = first / block_size, offset = first % block_size;
    for (int64_t i = 0; i < count; block++, offset = 0) {
      const T* from = cache + table[block] * block_stride + head_offset + offset * 2 * head_dim;
      for (; i < count && offset < block_size; i++, offset++, from += 2 * head_dim) to[i] = from;
    }
  }
};

// First position that the row at `position` sees.
static inline int64_t first_seen(const Attention& a, int64_t position) {
  return a.window && position >= a.window ? position - a.window + 1 : 0;
}

constexpr float kNever = -__builtin_inff();

}  // namespace xpyd
