"""Virtual time and a simulated network: the same actors, deterministic, with faults on demand.

What lives here: the virtual-time loop, the simulated carrier and pid watch, faults, checkers, trace replay. What must
not: a second model of anything. The links, actors and machines that run here are the production ones.
"""
