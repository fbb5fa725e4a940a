// Collectives of the ranks of one host, over memory that all of them have mapped.
//
// Each rank has two places in it, used in turn. It copies its piece into one, meets the others, and
// reads theirs. The place is written again two meetings later: who is at the one between has read
// all of the one before. Sums are made in float, in the order of the ranks, and rounded once, so
// every rank has the same bits. In an all-to-all a place begins with how many bytes its rank has for
// each other one; who reads takes its own out of each. Called by shared_memory.py; knows nothing of Python.
#include <algorithm>
#include <cstring>

#include "../../kernels/cpu/vec.h"
#include "meeting.h"

namespace xpyd {

static inline char* place(const Member& m, int64_t rank, int which) {
  return (char*)m.shared + kHeadBytes + (rank * 2 + which) * m.piece_bytes;
}

// Meet the others over what stands in this rank's place `which`. They must be at the same call.
static Outcome meet_over(Member& m, int which, Ticket own) {
  m.shared->seats[m.rank].tickets[which] = own;
  if (const Outcome failed = meet(m)) return failed;
  uint64_t elsewhere = 0;
  for (int r = 0; r < m.ranks; r++)
    if (m.shared->seats[r].tickets[which] != own) elsewhere |= 1ull << r;
  return elsewhere ? give_up(m, kElsewhere, elsewhere) : kDone;
}

// to[i] = the sum of from[r][i] by r; `to` may be one of them. What is behind the last whole vector
// goes through one that is filled up.
template <typename T>
static void add_up(const T* const* from, int64_t ranks, T* to, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    Vec sum = load(from[0] + i);
    for (int64_t r = 1; r < ranks; r++) sum = sum + load(from[r] + i);
    store(to + i, sum);
  }
  if (whole == count) return;
  T rest[kLanes] = {};
  Vec sum{};
  for (int64_t r = 0; r < ranks; r++) {
    std::memcpy((void*)rest, from[r] + whole, (count - whole) * sizeof(T));
    sum = r ? sum + load(rest) : load(rest);
  }
  store(rest, sum);
  std::memcpy((void*)(to + whole), rest, (count - whole) * sizeof(T));
}

// Each adds up all of it: one meeting.
template <typename T>
static void add_all(const Member& m, int which, T* x, int64_t count) {
  const T* from[kMostRanks];
  for (int64_t r = 0; r < m.ranks; r++) from[r] = (const T*)place(m, r, which);
  from[m.rank] = x;  // the same, and nearer
  add_up(from, m.ranks, x, count);
}

// Each adds up its share, into its place, and takes the others' from theirs: a second meeting for
// less to read.
template <typename T>
static Outcome add_shares(Member& m, int which, T* x, int64_t count) {
  // Whole vectors of any level: all ranks must cut alike.
  const int64_t share = ((count + m.ranks - 1) / m.ranks + 15) / 16 * 16;
  const auto begin = [&](int64_t rank) { return std::min(rank * share, count); };
  const int64_t at = begin(m.rank);
  const T* from[kMostRanks];
  for (int64_t r = 0; r < m.ranks; r++) from[r] = (const T*)place(m, r, which) + at;
  add_up(from, m.ranks, (T*)place(m, m.rank, which) + at, begin(m.rank + 1) - at);
  if (const Outcome failed = meet(m)) return failed;
  for (int64_t r = 0; r < m.ranks; r++)
    std::memcpy((void*)(x + begin(r)), (const T*)place(m, r, which) + begin(r),
                (begin(r + 1) - begin(r)) * sizeof(T));
  return kDone;
}

template <typename T>
static Outcome all_reduce(Member& m, T* x, int64_t count, int64_t shares_from_bytes, Ticket own) {
  const int64_t most = m.piece_bytes / (int64_t)sizeof(T);
  for (int64_t at = 0; at < count; at += most) {
    const int64_t part = std::min(most, count - at);
    const int which = m.pieces++ & 1;
    std::memcpy(place(m, m.rank, which), x + at, part * sizeof(T));
    if (const Outcome failed = meet_over(m, which, own)) return failed;
    if (part * (int64_t)sizeof(T) < shares_from_bytes)
      add_all(m, which, x + at, part);
    else if (const Outcome failed = add_shares(m, which, x + at, part))
      return failed;
  }
  return kDone;
}

// Copies bytes [at, at + bytes) of a share between memory where they stand together and `out`, where
// each row of a share has `stride` bytes to the next.
static void put_rows(char* out, const char* from, int64_t at, int64_t bytes, int64_t row_bytes,
                     int64_t stride) {
  while (bytes) {
    const int64_t row = at / row_bytes, offset = at % row_bytes;
    const int64_t part = std::min(bytes, row_bytes - offset);
    std::memcpy(out + row * stride + offset, from, part);
    from += part;
    at += part;
    bytes -= part;
  }
}

static Outcome all_gather(Member& m, const char* x, char* out, int64_t rows, int64_t row_bytes,
                          Ticket own) {
  const int64_t all = rows * row_bytes;
  for (int64_t at = 0; at < all; at += m.piece_bytes) {
    const int64_t part = std::min(m.piece_bytes, all - at);
    const int which = m.pieces++ & 1;
    std::memcpy(place(m, m.rank, which), x + at, part);
    if (const Outcome failed = meet_over(m, which, own)) return failed;
    for (int64_t r = 0; r < m.ranks; r++)
      put_rows(out + r * row_bytes, place(m, r, which), at, part, row_bytes, m.ranks * row_bytes);
  }
  return kDone;
}

// What a rank has for the others: the parts of each but its own, one behind the other. `sizes`: bytes
// for each rank, in memory behind each other with its own among them. Calls `with(in memory, in the
// stream, bytes)` for what of bytes [at, at + bytes) of the stream each part has.
template <typename With>
static void each_part(const int64_t* sizes, const Member& m, int64_t at, int64_t bytes, With with) {
  int64_t memory = 0, stream = 0;
  for (int64_t r = 0; r < m.ranks; memory += sizes[r++]) {
    if (r == m.rank) continue;
    const int64_t begin = std::max(at, stream), end = std::min(at + bytes, stream + sizes[r]);
    if (begin < end) with(memory + begin - stream, begin, end - begin);
    stream += sizes[r];
  }
}

// Where a rank's part for `reader` begins in its stream.
static int64_t stream_begin(const int64_t* sizes, int64_t sender, int64_t reader) {
  int64_t found = 0;
  for (int64_t r = 0; r < reader; r++) found += r == sender ? 0 : sizes[r];
  return found;
}

static Outcome all_to_all(Member& m, const char* x, char* out, const int64_t* send,
                          const int64_t* receive, Ticket own) {
  const int64_t head = kMostRanks * (int64_t)sizeof(int64_t), most = m.piece_bytes - head;
  int64_t longest = 0, before = 0, behind = 0;
  for (int64_t r = 0; r < m.rank; r++) before += send[r], behind += receive[r];
  if (send[m.rank]) std::memcpy(out + behind, x + before, send[m.rank]);
  const int64_t length = stream_begin(send, m.rank, m.ranks);
  int64_t at = 0;
  do {
    const int which = m.pieces++ & 1;
    char* const mine = place(m, m.rank, which);
    std::memcpy(mine, send, m.ranks * sizeof(int64_t));
    each_part(send, m, at, most, [&](int64_t from, int64_t to, int64_t bytes) {
      std::memcpy(mine + head + to - at, x + from, bytes);
    });
    if (const Outcome failed = meet_over(m, which, own)) return failed;
    uint64_t unlike = 0;
    int64_t to = 0;
    for (int64_t r = 0; r < m.ranks; to += receive[r++]) {
      if (r == m.rank) continue;
      const char* const theirs = place(m, r, which);
      const int64_t* const sizes = (const int64_t*)theirs;
      if (sizes[m.rank] != receive[r]) {
        unlike |= 1ull << r;
        continue;
      }
      longest = std::max(longest, stream_begin(sizes, r, m.ranks));
      const int64_t first = stream_begin(sizes, r, m.rank);
      const int64_t begin = std::max(at, first), end = std::min(at + most, first + receive[r]);
      if (begin < end) std::memcpy(out + to + begin - first, theirs + head + begin - at, end - begin);
    }
    if (unlike) return give_up(m, kElsewhere, unlike);
    longest = std::max(longest, length);
    at += most;
  } while (at < longest);
  return kDone;
}

}  // namespace xpyd

// What crosses over by layout must be the same on both sides.
extern "C" int xpyd_member_bytes() { return sizeof(xpyd::Member); }
extern "C" int xpyd_head_bytes() { return xpyd::kHeadBytes; }
extern "C" int xpyd_most_ranks() { return xpyd::kMostRanks; }

// Adds up all ranks' `x`, in place. `type`: 0 float, 1 bfloat16, 2 half. Pieces of
// `shares_from_bytes` and more are added up in shares. An Outcome.
extern "C" int xpyd_all_reduce(xpyd::Member* m, int type, void* x, int64_t count,
                               int64_t shares_from_bytes) {
  using namespace xpyd;
  const Ticket own = {1u + (uint64_t)type, (uint64_t)count};
  return type == 0   ? all_reduce(*m, (Float*)x, count, shares_from_bytes, own)
         : type == 1 ? all_reduce(*m, (Bfloat*)x, count, shares_from_bytes, own)
                     : all_reduce(*m, (Half*)x, count, shares_from_bytes, own);
}

// out[row, rank] = rank's x[row]; a row of a share has `row_bytes`. `x` may be this rank's share of
// `out` where there is one row. An Outcome.
extern "C" int xpyd_all_gather(xpyd::Member* m, const void* x, void* out, int64_t rows,
                               int64_t row_bytes) {
  using namespace xpyd;
  return all_gather(*m, (const char*)x, (char*)out, rows, row_bytes,
                    {16u + ((uint64_t)rows << 8), (uint64_t)(rows * row_bytes)});
}

// Gives each rank its `send` rows of x, which are by rank, and takes `receive` rows of each into `out`,
// by rank. An Outcome; kElsewhere also where a rank sends another number of rows.
extern "C" int xpyd_all_to_all(xpyd::Member* m, const void* x, void* out, const int64_t* send,
                               const int64_t* receive, int64_t row_bytes) {
  using namespace xpyd;
  int64_t sent[kMostRanks], received[kMostRanks];
  for (int64_t r = 0; r < m->ranks; r++) {
    sent[r] = send[r] * row_bytes;
    received[r] = receive[r] * row_bytes;
  }
  return all_to_all(*m, (const char*)x, (char*)out, sent, received, {17u, (uint64_t)row_bytes});
}

// This rank will not come again: who waits for it fails.
extern "C" void xpyd_leave(xpyd::Member* m) { xpyd::give_up(*m, xpyd::kClosed, 1ull << m->rank); }
