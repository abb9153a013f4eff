/* Fetching ahead, for those who go through memory that lies in many places (copy.c, feed.c).

   Pages of a pool lie anywhere. A processor fetches ahead by itself along a row of lines, but not from one page to the
   next, and starts slowly in each: of pages of some KiB most of the time is waiting. So we fetch ahead along the list of
   what comes. Into the second cache, since of lines on their way to the first one few can be under way at a time; a good
   part of that cache is free for it. */

#ifndef KVFERRY_AHEAD_H
#define KVFERRY_AHEAD_H

#include <stdint.h>

/* Bytes: of a line; of the most that is handed over at once; of what is fetched before it is its turn. Measured: below
   1 KiB calls cost more than they hide, and more than 16 KiB ahead gains nothing. */
enum { LINE = 64, PIECE = 1024, AHEAD = 16 * 1024 };

/* Span i: the size[i] bytes from address start[i] on. */
struct spans {
    int64_t count;
    const uint64_t *start;
    const int64_t *size;
};

/* Byte `at` of span `span`, and how many bytes of the list come before it. */
struct place {
    int64_t span, at, before;
};

/* The piece that begins at this place, which moves behind it: its first byte, and its size. */
static inline const char *next_piece(const struct spans *spans, struct place *place, int64_t *size)
{
    const char *from = (const char *)(uintptr_t)spans->start[place->span] + place->at;
    const int64_t left = spans->size[place->span] - place->at;
    *size = left < PIECE ? left : PIECE;
    place->before += *size;
    place->at += *size;
    if (*size == left)
        place->span++, place->at = 0;
    return from;
}

static inline void fetch(const char *from, int64_t size)
{
    const char *line = (const char *)((uintptr_t)from & ~(uintptr_t)(LINE - 1));
    for (; line < from + size; line += LINE)
        __builtin_prefetch(line, 0, 2);
}

/* Fetches on from `fetched`, until that is AHEAD of `taken`. */
static inline void fetch_ahead(const struct spans *spans, struct place *fetched, const struct place *taken)
{
    int64_t size;
    while (fetched->span < spans->count && fetched->before < taken->before + AHEAD) {
        const char *coming = next_piece(spans, fetched, &size);
        fetch(coming, size);
    }
}

#endif
