/* The bytes of many spans, handed to a function in their order, in one call and without the GIL (feeding.py calls it). */

#include <stddef.h>

#include "ahead.h"

/* Calls take(state, bytes, size) for all of them, PIECE bytes at a time at most. Each span has some. */
void kvferry_feed(int64_t count, const uint64_t *start, const int64_t *size,
                  int (*take)(void *state, const void *bytes, size_t size), void *state)
{
    const struct spans spans = {count, start, size};
    struct place taken = {0, 0, 0}, fetched = {0, 0, 0};
    int64_t piece;
    while (taken.span < count) {
        fetch_ahead(&spans, &fetched, &taken);
        const char *from = next_piece(&spans, &taken, &piece);
        take(state, from, (size_t)piece);
    }
}
