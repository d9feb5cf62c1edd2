"""The names under which other packages have the same things.

Code written for VeloxQuant-MLX or for the molt mappers finds here what it imports
there. Its names of a layer's arrays (``w_k``, ``b_v``, …) are properties of
:class:`kvgraft.mapper.layer_map.LayerMap`, see :mod:`kvgraft.mapper.veloxquant_names`.
"""

from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import apply
from kvgraft.mapper.veloxquant import export_veloxquant

__all__ = ["CrossModelMapper", "KVMapper", "apply", "export_veloxquant"]

CrossModelMapper = Mapper
"""VeloxQuant-MLX's name of :class:`kvgraft.Mapper`."""

KVMapper = Mapper
"""The molt mappers' name of :class:`kvgraft.Mapper`."""
