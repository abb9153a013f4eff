"""Decode: admission -> receiving -> running batch -> retracted or released.

Here: the leader and its rooms' records. Not here: what commits a room (protocol.receiver), who owns a page
(memory), how a token is drawn (engine).
"""
