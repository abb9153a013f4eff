/* Copies in one call and without the GIL (copying.py calls it): a list of spans, the `local` backend's inner loop; and
   slices to and from one packed buffer, which staging does.

   Stores go past the caches where the processor lets us: what is moved is read next by another core, much later, and a
   store that goes through the cache first reads the line that it is about to overwrite, half as much traffic again. Loads
   are fetched ahead: of scattered pages of some KiB that doubles the rate. */

#include <stddef.h>
#include <string.h>

#include "ahead.h"

#if defined(__x86_64__)
#include <emmintrin.h>

enum { LEAST = 256 };

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
    const struct spans spans = {count, from, size};
    struct place taken = {0, 0, 0}, fetched = {0, 0, 0};
    int64_t piece;
    while (taken.span < count && (taken.at > 0 || !*stop)) {
        fetch_ahead(&spans, &fetched, &taken);
        char *there = (char *)(uintptr_t)to[taken.span] + taken.at;
        const char *here = next_piece(&spans, &taken, &piece);
        copy_one(there, here, (size_t)piece);
    }
    placed();
    return taken.span;
}

/* Slices of areas (strided_copy.py says how they lie): of pair p, that of entry e is the width[p] bytes from address
   start[p] + stride[p] * e on. The runs are of entries [at, at + count), none of them empty. */
struct slices {
    int64_t pairs, runs;
    const uint64_t *start;
    const int64_t *stride, *width, *at, *count;
};

/* Byte `at` of a stretch that begins with this entry of this run, and how many bytes of all slices come before it. */
struct slice_place {
    int64_t pair, run, entry, at, before;
};

/* As next_piece. Entries that are neighbours are one stretch. */
static inline const char *next_slice(const struct slices *s, struct slice_place *place, int64_t *size)
{
    const int64_t width = s->width[place->pair], stride = s->stride[place->pair], count = s->count[place->run];
    const int64_t entries = width == stride ? count : 1;
    const int64_t entry = s->at[place->run] + place->entry, left = width * entries - place->at;
    const char *from = (const char *)(uintptr_t)s->start[place->pair] + stride * entry + place->at;
    *size = left < PIECE ? left : PIECE;
    place->before += *size;
    place->at += *size;
    if (*size < left)
        return from;
    place->at = 0;
    if ((place->entry += entries) < count)
        return from;
    place->entry = 0;
    if (++place->run < s->runs)
        return from;
    place->run = 0;
    place->pair++;
    return from;
}

/* To `packed`, pair by pair and run by run, each of some entries. It is read next, and soon, so short slices go through
   the caches; long stretches past them are nearly twice as fast even so. */
void kvferry_gather(char *packed, const struct slices *s)
{
    struct slice_place taken = {0, 0, 0, 0, 0}, fetched = {0, 0, 0, 0, 0};
    int64_t size;
    while (s->runs > 0 && taken.pair < s->pairs) {
        while (fetched.pair < s->pairs && fetched.before < taken.before + AHEAD) {
            const char *coming = next_slice(s, &fetched, &size);
            fetch(coming, size);
        }
        const char *from = next_slice(s, &taken, &size);
        if (size < PIECE)
            memcpy(packed, from, (size_t)size);
        else
            copy_one(packed, from, (size_t)size);
        packed += size;
    }
    placed();
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
