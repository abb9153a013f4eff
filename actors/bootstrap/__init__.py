"""The registry: which ranks exist, where, and whether the instances are complete.

Here: registration with its checks, the roster, readiness, and for a while the DP ranks of rooms. Not here: rooms
themselves, or requests; live rooms go on when the registry is gone. Its HTTP routes are in `kvferry.cluster`.
"""
