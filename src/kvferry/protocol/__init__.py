"""What is said between actors, and the machines that decide: pure values and tables, no I/O.

Here: messages, KVPoll, the link session, the room / sender / receiver machines, clocks, errors.
Not here: sockets, asyncio, Ray, time, randomness. Imports: the standard library and msgspec, nothing else.
"""
