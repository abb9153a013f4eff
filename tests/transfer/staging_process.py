"""One end of staging in a process of its own: `python staging_process.py ROLE KIND`.

A target (ROLE target) of 8 heads prints its descriptor for the writer 0x51. A source of 2 heads reads a descriptor and
writes all of its pages there, again and again; it prints "writing" after the first round. Either ends when its standard
input does.
"""

import asyncio
import sys

import numpy as np
from conftest import Heads, Outcome, open_staging, stdin_ends

from kvferry.transfer.contract import WriteOutcome, decode_descriptor, encode_descriptor
from kvferry.transfer.page_plan import page_blocks
from kvferry.transfer.pairing import pair_common

SOURCE, TARGET = 0x51, 0x52


async def main(role, kind):
    memory, incarnation = (Heads(), TARGET) if role == "target" else (Heads(2, 2, seed=1), SOURCE)
    site = await open_staging(kind, None, incarnation, memory)
    site.endpoint.expect(+1)
    if role == "target":
        print(encode_descriptor(await site.endpoint.accept(SOURCE)).hex(), flush=True)
        await stdin_ends()
    else:
        line = await asyncio.to_thread(sys.stdin.readline)
        peer = await site.endpoint.connect(decode_descriptor(bytes.fromhex(line)))
        pages = np.arange(memory.PAGES)
        blocks = page_blocks(pair_common(memory.regions, peer.descriptor.regions), pages, pages)
        outcome, rounds = WriteOutcome.FLUSHED, 0
        while outcome is WriteOutcome.FLUSHED:
            ended = Outcome()
            site.endpoint.write(peer, blocks, ended)
            outcome = (await ended).outcome
            rounds += 1
            if rounds == 1:
                print("writing", flush=True)
        print("broken", flush=True)
    await site.endpoint.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
