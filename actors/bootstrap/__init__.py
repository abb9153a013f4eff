"""The registry: which ranks exist, where, and whether the instances are complete.

Here: registration with its checks, the roster, readiness. Not here: rooms or requests; live rooms go on when
the registry is gone.
"""
