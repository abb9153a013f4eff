/* The bytes of many spans, handed to a function in their order, in one call and without the GIL (feeding.py calls it).

   Pages of a pool lie anywhere. A processor fetches ahead by itself along a row of lines, but not from one page to the
   next, and starts slowly in each: of pages of some KiB most of the time is waiting. So we fetch ahead along the list of
   spans. Into the second cache, since of lines on their way to the first one few can be under way at a time; a good part
   of that cache is free for it. */

#include <stddef.h>
#include <stdint.h>

/* Bytes: of a line; of the most that is handed over at once; of what is fetched before it is its turn. Measured: below
   1 KiB calls cost more than they hide, and more than 16 KiB ahead gains nothing. */
enum { LINE = 64, PIECE = 1024, AHEAD = 16 * 1024 };

/* Span i: the size[i] > 0 bytes from address start[i] on. */
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
static const char *next_piece(const struct spans *spans, struct place *place, int64_t *size)
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

static void fetch(const char *from, int64_t size)
{
    const char *line = (const char *)((uintptr_t)from & ~(uintptr_t)(LINE - 1));
    for (; line < from + size; line += LINE)
        __builtin_prefetch(line, 0, 2);
}

/* Calls take(state, bytes, size) for all of them, PIECE bytes at a time at most. */
void kvferry_feed(int64_t count, const uint64_t *start, const int64_t *size,
                  int (*take)(void *state, const void *bytes, size_t size), void *state)
{
    const struct spans spans = {count, start, size};
    struct place taken = {0, 0, 0}, fetched = {0, 0, 0};
    int64_t piece;
    while (taken.span < count) {
        while (fetched.span < count && fetched.before < taken.before + AHEAD) {
            const char *coming = next_piece(&spans, &fetched, &piece);
            fetch(coming, piece);
        }
        const char *from = next_piece(&spans, &taken, &piece);
        take(state, from, (size_t)piece);
    }
}
