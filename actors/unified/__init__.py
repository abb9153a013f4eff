"""Unified: both roles in one process, one pool. The handoff changes what a holding is used for and copies nothing.

Here: the one loop that mixes prefill chunks with the running batch. Not here: rooms, links, the data plane.
"""
