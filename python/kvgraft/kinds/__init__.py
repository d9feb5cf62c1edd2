"""The kinds of cache that mlx-lm has; :mod:`kvgraft.caches` is the way in."""
