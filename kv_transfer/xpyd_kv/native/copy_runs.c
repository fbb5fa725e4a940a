/* D's copy out of a P's shared memory: one call for a whole frame, in which Python's other threads
 * run. Called through ctypes by xpyd_kv.transport.host.shared_memory; knows nothing of Python. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define STREAMS 1

/* Below this the stores that go around the caches gain nothing (docs/adr/0020). */
#define STREAM_FROM 16384

/* memcpy around the processor's caches: nobody reads what has landed before the last of it is
 * there, and by then it would have left them again. A fence must follow. */
__attribute__((target("avx2"))) static void stream(char *to, const char *from, uint64_t length)
{
    /* The stores want their addresses aligned, the loads do not care. */
    uint64_t head = -(uintptr_t)to & 31;
    memcpy(to, from, head);
    to += head;
    from += head;
    length -= head;
    for (; length >= 128; to += 128, from += 128, length -= 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    memcpy(to, from, length);
}
#endif

/* The bytes of `runs` runs of `source`, one after another, go to `targets` targets, one after
 * another; both may be cut as they like. Nothing outside of the source is read and nothing outside
 * of the targets is written, whatever the numbers say: -1, and nothing is copied, where a run does
 * not lie in the source's `size` bytes, or the two sides' lengths differ in all. Else 0. Source and
 * targets do not overlap. */
int xpyd_copy_runs(const char *source, uint64_t size, const uint64_t *offsets,
                   const uint64_t *lengths, size_t runs, char *const *addresses,
                   const uint64_t *rooms, size_t targets)
{
    uint64_t left = 0;
    for (size_t i = 0; i < targets; i++)
        left += rooms[i];
    for (size_t i = 0; i < runs; i++) {
        if (offsets[i] > size || lengths[i] > size - offsets[i] || lengths[i] > left)
            return -1;
        left -= lengths[i];
    }
    if (left)
        return -1;

#ifdef STREAMS
    int streams = __builtin_cpu_supports("avx2");
#endif
    size_t target = 0;
    uint64_t filled = 0; /* of that target */
    for (size_t i = 0; i < runs; i++) {
        const char *from = source + offsets[i];
        uint64_t length = lengths[i];
        while (length) { /* so there is room left: both sides are as long */
            uint64_t part = rooms[target] - filled;
            if (part > length)
                part = length;
            char *to = addresses[target] + filled;
#ifdef STREAMS
            if (streams && part >= STREAM_FROM)
                stream(to, from, part);
            else
#endif
                memcpy(to, from, part);
            from += part;
            length -= part;
            filled += part;
            if (filled == rooms[target]) {
                target++;
                filled = 0;
            }
        }
    }
#ifdef STREAMS
    if (streams)
        _mm_sfence();
#endif
    return 0;
}
