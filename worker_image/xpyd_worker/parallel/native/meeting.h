// Where the ranks of one host meet in shared memory: all wait until all are there, and see then what
// each wrote before it came.
//
// A barrier of one counter and one word. Who comes last writes the step's number to the word; the
// others read it for a while and then sleep on it (futex). Its highest bit says that the group is
// given up: somebody waited too long, ended or left. No wait is longer than the group's limit, and
// who waits notices within a quarter of a second when a rank's process ends.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace xpyd {

constexpr int kMostRanks = 32;
constexpr uint32_t kGivenUp = 1u << 31, kSteps = kGivenUp - 1;
constexpr int64_t kLookNs = 250'000'000;
constexpr int64_t kLeastSpinNs = 1000;
constexpr uint32_t kTryEvery = 64;  // meetings

// What a rank is about to do, so that ranks that disagree notice before they read.
struct Ticket {
  uint64_t call, bytes;
  bool operator!=(const Ticket& other) const {
    return call != other.call || bytes != other.bytes;
  }
};

struct alignas(64) Seat {
  std::atomic<uint32_t> step;  // that this rank has come to
  Ticket tickets[2];
};

// In shared memory, all zeros at first. Data stand behind it.
struct Shared {
  char nonce[64];  // Python's
  alignas(64) std::atomic<uint32_t> arrived;  // in all steps, by all ranks
  alignas(64) std::atomic<uint32_t> word;  // the last step that all came to, and kGivenUp
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint64_t> verdict;  // why it was given up: whose fault, and the Outcome
  Seat seats[kMostRanks];
};
constexpr int64_t kHeadBytes = 4096;
static_assert(sizeof(Shared) <= kHeadBytes);
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

enum Outcome { kDone, kMissing, kEnded, kClosed, kElsewhere };

// One rank's own side. The layout is shared_memory.py's, too.
struct Member {
  Shared* shared;
  const int32_t* processes;  // pidfds of all ranks; -1: none
  int64_t rank, ranks, piece_bytes;
  int64_t most_spin_ns, within_ns;
  int64_t spin_ns;  // as long as it has been of use
  uint64_t blamed;  // bits of ranks: whose fault the outcome is
  uint32_t step, pieces;
};

static inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

static inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static inline void wake_all(Shared& shared) {
  // seq_cst: behind the change of the word, as the sleepers' count is before their look at it.
  if (shared.sleepers.load())
    syscall(SYS_futex, &shared.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

static inline uint64_t ended(const Member& m) {
  pollfd asked[kMostRanks];
  uint64_t found = 0;
  for (int r = 0; r < m.ranks; r++) asked[r] = {m.processes[r], POLLIN, 0};
  if (poll(asked, (nfds_t)m.ranks, 0) > 0)
    for (int r = 0; r < m.ranks; r++)
      if (asked[r].revents) found |= 1ull << r;
  return found;
}

// The group is over. What the first one says of it holds for all: who ends because of it would look
// like the cause to those who come later.
static inline Outcome give_up(Member& m, Outcome why, uint64_t whose) {
  Shared& shared = *m.shared;
  const uint64_t own = whose << 8 | why;
  uint64_t verdict = shared.verdict.load();
  if (!verdict && whose && shared.verdict.compare_exchange_strong(verdict, own)) verdict = own;
  shared.word.fetch_or(kGivenUp);
  wake_all(shared);
  m.blamed = verdict >> 8;
  return verdict ? (Outcome)(verdict & 0xff) : why;
}

static inline Outcome fail(Member& m) {
  if (const uint64_t dead = ended(m)) return give_up(m, kEnded, dead);
  uint64_t missing = 0;
  for (int r = 0; r < m.ranks; r++)
    if (m.shared->seats[r].step.load() != m.step) missing |= 1ull << r;
  return give_up(m, kMissing, missing);
}

static inline bool is_there(const Member& m, uint32_t word) {
  return (word & kSteps) == (m.step & kSteps);
}

// Look for a while whether all have come. Where that does not help, since the cores are taken and
// looking keeps the others from theirs, the time shrinks; now and then the whole of it is tried.
static inline bool spin_until_all(Member& m, int64_t begun_ns) {
  const int64_t least_ns = m.most_spin_ns < kLeastSpinNs ? m.most_spin_ns : kLeastSpinNs;
  const int64_t length_ns = m.step % kTryEvery ? m.spin_ns : m.most_spin_ns;
  do {
    for (int i = 0; i < 64; i++) {
      if (is_there(m, m.shared->word.load(std::memory_order_acquire))) {
        m.spin_ns = 2 * m.spin_ns < m.most_spin_ns ? 2 * m.spin_ns : m.most_spin_ns;
        return true;
      }
      pause_briefly();
    }
  } while (now_ns() - begun_ns < length_ns);
  m.spin_ns = m.spin_ns / 2 > least_ns ? m.spin_ns / 2 : least_ns;
  return false;
}

static inline Outcome sleep_until_all(Member& m, int64_t end_ns) {
  Shared& shared = *m.shared;
  for (;;) {
    uint32_t word = shared.word.load();
    if (is_there(m, word)) return kDone;
    if (word & kGivenUp) return fail(m);
    const int64_t left_ns = end_ns - now_ns();
    if (left_ns <= 0 || ended(m)) {
      // Unless the last one comes at this very moment.
      if (shared.word.compare_exchange_strong(word, word | kGivenUp)) return fail(m);
      continue;
    }
    const int64_t sleep_ns = left_ns < kLookNs ? left_ns : kLookNs;
    const timespec length = {0, (long)sleep_ns};
    syscall(SYS_futex, &shared.word, FUTEX_WAIT, word, &length, nullptr, 0);
  }
}

// Wait until all ranks have called it as often as this one. What they wrote before can be read.
static inline Outcome meet(Member& m) {
  Shared& shared = *m.shared;
  uint32_t before = m.step & kSteps;
  m.step++;
  shared.seats[m.rank].step.store(m.step, std::memory_order_relaxed);
  if (shared.arrived.fetch_add(1) + 1 == m.step * (uint32_t)m.ranks) {
    if (!shared.word.compare_exchange_strong(before, m.step & kSteps)) return fail(m);
    wake_all(shared);
    return kDone;
  }
  const int64_t begun_ns = now_ns();
  if (spin_until_all(m, begun_ns)) return kDone;
  shared.sleepers.fetch_add(1);
  const Outcome found = sleep_until_all(m, begun_ns + m.within_ns);
  shared.sleepers.fetch_sub(1);
  return found;
}

}  // namespace xpyd
