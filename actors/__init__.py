"""The roles: thin asyncio classes that own sockets, clocks and tasks.

What lives here: router, room, bootstrap (registry), prefill, decode, unified. What must not: imports of
Ray or of HTTP; the decisions themselves (they are in `kvferry.protocol` and `kvferry.memory`).
"""

if __name__ != "kvferry.actors":
    # The folder also lies at the top of the repository. Importing it as `actors` would make a second copy of
    # every class, unequal to the first.
    raise ImportError(f"import this package as kvferry.actors, not as {__name__!r}")
