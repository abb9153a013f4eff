"""Exhaustive exploration: every order of events of a few production actors, within stated bounds.

What lives here: the world between the actors (links that break, a data plane whose writes end when the explorer says
so), snapshots of live actors, the breadth-first search, checkers, and the models with their bounds. What must not: a
second model of a machine, a leader, a room or the ledger. Those are the production classes, run event by event.

An actor sees nothing but its own state and what is handed to it, so its turn is a function of (state, event). The
explorer runs each such turn once, keeps what came of it, and explores the product of all actors on these tables.
"""
