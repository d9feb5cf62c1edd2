"""Mappers: in memory, on disk, and applied to arrays."""
