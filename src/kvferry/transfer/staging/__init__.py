"""Staging: slices are gathered into one buffer, sent as one write into a ring at the target, and scattered there.

Here: a decorator around any endpoint, which both sides of a pair must have. Not here: which blocks there are (the
plan), how bytes cross (the endpoint within), how they are copied (kernels).
"""
