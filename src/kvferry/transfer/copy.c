/* Copies in one call and without the GIL (copying.py calls it): a list of spans, the `local` backend's inner loop; and
   slices to and from one packed buffer, which staging does.

   Stores go past the caches where the processor lets us: what is moved is read next by another core, much later, and a
   store that goes through the cache first reads the line that it is about to overwrite, half as much traffic again. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

enum { LINE = 64, LEAST = 256 };

static void copy_one(char *to, const char *from, size_t size)
{
    if (size < LEAST) {
        memcpy(to, from, size);
        return;
    }
    size_t head = (size_t)(-(uintptr_t)to & (LINE - 1));
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, size);
}

static void placed(void) { _mm_sfence(); }
#else
static void copy_one(char *to, const char *from, size_t size) { memcpy(to, from, size); }
static void placed(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

/* Span i: size[i] bytes from address from[i] to address to[i]. Looks at *stop before each span, and ends early once it is
   not 0. Gives the number of spans that lie at their place. */
int64_t kvferry_copy(int64_t count, const uint64_t *to, const uint64_t *from, const int64_t *size,
                     const volatile int32_t *stop)
{
    int64_t done = 0;
    for (; done < count && !*stop; done++)
        copy_one((char *)(uintptr_t)to[done], (const char *)(uintptr_t)from[done], (size_t)size[done]);
    placed();
    return done;
}

/* Slices of areas (strided_copy.py says how they lie): of pair p, that of entry e is the width[p] bytes from address
   start[p] + stride[p] * e on. The runs are of entries [at, at + count). */
struct slices {
    int64_t pairs, runs;
    const uint64_t *start;
    const int64_t *stride, *width, *at, *count;
};

/* To `packed`, pair by pair and run by run. It is read next, and soon: so through the caches. */
void kvferry_gather(char *packed, const struct slices *s)
{
    for (int64_t p = 0; p < s->pairs; p++) {
        const size_t width = (size_t)s->width[p];
        for (int64_t r = 0; r < s->runs; r++) {
            const char *from = (const char *)(uintptr_t)s->start[p] + s->stride[p] * s->at[r];
            for (int64_t e = 0; e < s->count[r]; e++, packed += width, from += s->stride[p])
                memcpy(packed, from, width);
        }
    }
}

/* From `packed`, to where the model will read it much later. */
void kvferry_scatter(const char *packed, const struct slices *s)
{
    for (int64_t p = 0; p < s->pairs; p++) {
        const size_t width = (size_t)s->width[p];
        for (int64_t r = 0; r < s->runs; r++) {
            char *to = (char *)(uintptr_t)s->start[p] + s->stride[p] * s->at[r];
            for (int64_t e = 0; e < s->count[r]; e++, packed += width, to += s->stride[p])
                copy_one(to, packed, width);
        }
    }
    placed();
}
