"""What operators see: metric names in one file, and how a room's journal and the status are shown.

What must not live here: anything that a decision depends on.
"""
