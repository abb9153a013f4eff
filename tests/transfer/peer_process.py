"""A target in a process of its own: `python peer_process.py KIND INCARNATION SEED WRITER`.

Prints its descriptor for that writer in hex. At each notification, a JSON list [source pages, target pages], it
compares its memory, byte by byte, with what a source filled from SEED must have put there, and prints "right" or
"wrong". Ends when its standard input does.
"""

import asyncio
import json
import sys

import numpy as np
from conftest import Memory, endpoint_of, stdin_ends

from kvferry.transfer.contract import encode_descriptor


def verdict(memory, source, payload):
    source_pages, target_pages = json.loads(payload)
    for index in range(len(memory.regions) - 1):
        expected = np.zeros_like(memory.pages(index))
        expected[target_pages] = source.pages(index)[source_pages]
        if not np.array_equal(memory.pages(index), expected):
            return "wrong"
    return "right"


async def main(kind, incarnation, seed, writer):
    memory, source = Memory(), Memory(seed)
    endpoint = endpoint_of(
        kind, memory, incarnation, lambda agent, payload: print(verdict(memory, source, payload), agent, flush=True)
    )
    endpoint.expect(+1)
    print(encode_descriptor(await endpoint.accept(writer)).hex(), flush=True)
    await stdin_ends()
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
