"""Prefill: bootstrap queue -> chunked prefill -> sending -> released.

Here: the leader, its rooms' records, its side of the data plane, what is written per chunk. Not here: what a page is
owned by (memory), which bytes go where (transfer.plan), how attention is computed (engine).
"""
