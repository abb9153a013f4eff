"""Hosting on Ray: where the actors run, how they are found and stopped; configuration; real clocks and sockets.

Here: the Ray host of a role, the controller that places them, the front's client of both, carriers of links by ZMQ and
by Ray calls, pidfd, and what stands in front of the front.
Not here: decisions about rooms or pages; nothing below this package imports Ray.
"""
