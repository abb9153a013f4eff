"""KVFerry: prefill and decode on different machines, as asyncio actors hosted by Ray.

The package order, and the direction of every import, is
protocol <- memory <- transfer <- engine <- actors <- cluster <- serve; `docs/architecture.md` has the map.
"""

__version__ = "0.1.0"
