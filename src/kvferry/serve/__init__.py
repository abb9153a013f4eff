"""The front: an OpenAI-compatible HTTP API in front of the routers.

What lives here: request and reply schemas, the assembly of token streams, the Starlette application, its Ray Serve
deployment and the launcher of a local cluster. What must not: choosing instances, rooms, pages, models; sockets (links
come as a `kvferry.actors.ports.Network`), clocks and randomness of our own. Only `deployment.py` and `launcher.py`
import Ray.
"""
