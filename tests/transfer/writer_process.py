"""A writer in a process of its own: `python writer_process.py KIND INCARNATION SEED`.

Reads descriptors in hex, one a line. To the target of each it writes its first region, again and again, and prints
"writing" once the first round is flushed; when a write breaks it prints "broken" and reads the next line.
"""

import asyncio
import sys

from conftest import Memory, Outcome, endpoint_of

from kvferry.transfer.contract import WriteOutcome, decode_descriptor
from kvferry.transfer.spans import make_spans, region_bytes


async def main(kind, incarnation, seed):
    memory = Memory(seed)
    endpoint = endpoint_of(kind, memory, incarnation, lambda agent, payload: None)
    size_bytes = region_bytes(memory.regions)[0]
    while line := await asyncio.to_thread(sys.stdin.readline):
        peer = await endpoint.connect(decode_descriptor(bytes.fromhex(line)))
        rounds, outcome = 1, WriteOutcome.FLUSHED
        while outcome is WriteOutcome.FLUSHED:
            ended = Outcome()
            endpoint.write(peer, make_spans(0, 0, 0, 0, [size_bytes] * rounds), ended)
            outcome = (await ended).outcome
            if outcome is WriteOutcome.FLUSHED and rounds == 1:
                print("writing", flush=True)
            rounds = 4096
        print("broken", flush=True)
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
