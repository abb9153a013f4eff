"""The router: chooses a (prefill, decode) pair, admits or refuses, spawns and supervises rooms.

Here: admission, the choice of a pair, the rooms' supervisor. Not here: what happens inside a room
(actors.room, protocol.room), tokens, KV bytes.
"""
