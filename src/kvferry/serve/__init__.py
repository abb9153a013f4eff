"""The front: an OpenAI-compatible HTTP API in front of the routers.

What lives here: request and reply schemas, the assembly of token streams, the Starlette application and its
Ray Serve deployment. What must not: choosing instances, rooms, pages, models; sockets (links come as a
`kvferry.actors.ports.Network`), clocks and randomness of our own. Only `deployment.py` imports Ray.
"""
