"""The room: the coordinator of one attempt's handoff, and its journal.

Here: the actor around the room machine, and what it writes down. Not here: the decisions (protocol.room), the
choice of a pair (router), tokens and KV bytes, which never pass through a room.
"""
