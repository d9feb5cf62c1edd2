"""mlx-lm's server, with a cache store that maps caches between models.

:mod:`kvgraft.serve.server` starts it, :mod:`kvgraft.serve.store` is the store,
:mod:`kvgraft.serve.routes` knows which mappers there are, and
:mod:`kvgraft.serve.origin` keeps mapped caches apart from native ones.
"""

from kvgraft.serve.routes import Route, RouteTable, load_routes
from kvgraft.serve.server import Server, make_provider
from kvgraft.serve.store import MappingPromptCache

__all__ = [
    "MappingPromptCache",
    "Route",
    "RouteTable",
    "Server",
    "load_routes",
    "make_provider",
]
