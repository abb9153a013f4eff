"""Hosting on Ray: where the actors run, how they are found and stopped; configuration; real clocks and sockets.

Here: the Ray host of a role, the controller that places them, the client of the front, the local launcher, ZMQ, pidfd.
Not here: decisions about rooms or pages; nothing below this package imports Ray.
"""
