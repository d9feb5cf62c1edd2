"""Rotary position embeddings: what a model does to its keys, and how to undo it.

A cache holds keys *after* RoPE. kvgraft maps content, so it takes the source's
rotation off, maps, and puts the target's on (Heo et al., arXiv:2608.03893,
section 3.3). :class:`RopeSpec` describes one layer's rotation completely;
:class:`RopeTable` holds its cosines and sines at given positions.

The tables come out of ``mx.fast.rope`` itself, by rotating unit vectors. MLX
computes angles differently on each device, and float32 inverse frequencies that
differ in the last bit are 1e-2 apart at position 100,000; going through the
primitive gives the angles the model saw, whatever the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvgraft.errors import GeometryError

__all__ = ["NO_ROPE", "RopeSpec", "RopeTable", "apply_rope", "strip_rope"]


@dataclass(frozen=True)
class RopeSpec:
    """One layer's rotary embedding.

    Attributes:
        dims: Leading dimensions of a head that are rotated; 0 means none.
        traditional: Pairs are ``(2i, 2i+1)`` if true, ``(i, i + dims/2)`` if not.
        base: ``rope_theta``. Exactly one of ``base`` and ``freqs`` is given
            when ``dims > 0``.
        freqs: ``dims/2`` reciprocal inverse frequencies, as ``mx.fast.rope``
            takes them; ``inf`` leaves a pair unrotated.
        scale: Multiplies positions (linear scaling is ``1/factor``).
        magnitude: Multiplies the rotated dimensions of a key (YaRN, longrope).
        max_position: Positions from here on are not described by this spec
            (dynamic NTK changes its base there); ``None`` means no limit.
    """

    dims: int
    traditional: bool = False
    base: float | None = None
    freqs: tuple[float, ...] | None = None
    scale: float = 1.0
    magnitude: float = 1.0
    max_position: int | None = None

    def __post_init__(self) -> None:
        if self.dims < 0 or self.dims % 2:
            raise GeometryError(f"RopeSpec: dims must be even and >= 0, got {self.dims}.")
        if self.dims == 0:
            return
        if (self.base is None) == (self.freqs is None):
            raise GeometryError("RopeSpec: give exactly one of base and freqs.")
        if self.freqs is not None and len(self.freqs) != self.dims // 2:
            raise GeometryError(
                f"RopeSpec: {self.dims} dims need {self.dims // 2} freqs, got {len(self.freqs)}."
            )
        if not (math.isfinite(self.magnitude) and self.magnitude > 0):
            raise GeometryError(f"RopeSpec: magnitude must be positive, got {self.magnitude}.")

    def check_positions(self, last: int) -> None:
        """Raise :class:`GeometryError` if position ``last`` is past ``max_position``."""
        if self.max_position is not None and last >= self.max_position:
            raise GeometryError(
                f"Position {last} is beyond {self.max_position}, where this model's RoPE "
                "changes with the length of the text. Keys past it cannot be un-rotated: "
                "re-prefill, or hand over a shorter context."
            )

    def rotate(self, x: mx.array, positions: mx.array, *, inverse: bool = False) -> mx.array:
        """Rotate (or un-rotate) through ``mx.fast.rope``, without magnitude.

        Args:
            x: ``[M, ..., dims']`` float32, one leading row per position.
            positions: ``[M]`` int32.
            inverse: Rotate by the negated angle.
        """
        # The row goes on the batch axis and the sequence axis is one long: only
        # the batch axis takes arbitrary offsets.
        if x.size == 0:
            return x
        rows = x.reshape(x.shape[0], -1, 1, x.shape[-1])
        out = mx.fast.rope(
            rows,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=-self.scale if inverse else self.scale,
            offset=positions,
            freqs=None if self.freqs is None else mx.array(self.freqs, dtype=mx.float32),
        )
        return out.reshape(x.shape)

    def table(self, positions: mx.array, *, inverse: bool = False) -> RopeTable | None:
        """Cosines and sines at ``positions``.

        Args:
            positions: ``[N]`` or ``[B, N]`` integer positions.
            inverse: Make a table that *strips*: the magnitude is divided out
                and the sines are negated.

        Returns:
            A :class:`RopeTable`, or ``None`` when nothing is rotated.
        """
        if self.dims == 0:
            return None
        half = self.dims // 2
        flat = positions.reshape(-1).astype(mx.int32)
        # A vector with 1 in the first and 0 in the second member of every pair
        # turns into (cos, sin).
        if self.traditional:
            unit = mx.tile(mx.array([1.0, 0.0], dtype=mx.float32), half)[None]
        else:
            unit = mx.concatenate([mx.ones((1, half)), mx.zeros((1, half))], axis=-1)
        turned = self.rotate(mx.broadcast_to(unit, (flat.size, self.dims)), flat)
        if self.traditional:
            cos, sin = turned[:, 0::2], turned[:, 1::2]
        else:
            cos, sin = turned[:, :half], turned[:, half:]
        if inverse:
            cos, sin = cos / self.magnitude, -sin / self.magnitude
        elif self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        shape = (*positions.shape, half)
        return RopeTable(
            mx.contiguous(cos.reshape(shape)), mx.contiguous(sin.reshape(shape)), self.traditional
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description; :meth:`from_dict` reads it back exactly."""
        out: dict[str, Any] = {"dims": self.dims}
        if self.dims == 0:
            return out
        out["traditional"] = self.traditional
        if self.base is not None:
            out["base"] = self.base
        if self.freqs is not None:
            out["freqs"] = [f if math.isfinite(f) else "inf" for f in self.freqs]
        out["scale"] = self.scale
        out["magnitude"] = self.magnitude
        if self.max_position is not None:
            out["max_position"] = self.max_position
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RopeSpec:
        """Inverse of :meth:`to_dict`."""
        freqs: Sequence[Any] | None = data.get("freqs")
        return cls(
            dims=int(data["dims"]),
            traditional=bool(data.get("traditional", False)),
            base=None if data.get("base") is None else float(data["base"]),
            freqs=None if freqs is None else tuple(float(f) for f in freqs),
            scale=float(data.get("scale", 1.0)),
            magnitude=float(data.get("magnitude", 1.0)),
            max_position=data.get("max_position"),
        )


NO_ROPE = RopeSpec(0)
"""Keys that carry no rotation."""


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of one rotation, magnitude folded in.

    Attributes:
        cos: ``[N, dims/2]`` or ``[B, N, dims/2]`` float32.
        sin: Same shape. Negated in a table that strips.
        traditional: How the pairs lie; see :class:`RopeSpec`.
    """

    cos: mx.array
    sin: mx.array
    traditional: bool = False

    @property
    def dims(self) -> int:
        """Number of rotated dimensions."""
        return 2 * self.cos.shape[-1]


def rotate_pairs(x: mx.array, table: RopeTable | None) -> mx.array:
    """Rotate the first ``table.dims`` dimensions of ``x``; the rest pass through.

    Args:
        x: ``[H, N, D]`` or ``[B, H, N, D]``, any float dtype.
        table: Table for the ``N`` positions; ``None`` rotates nothing.

    Returns:
        float32 array of the same shape.
    """
    x = x.astype(mx.float32)
    if table is None:
        return x
    cos, sin = table.cos, table.sin
    if cos.ndim == 3:  # one row of positions per batch entry
        cos, sin = cos[:, None], sin[:, None]
    dims = table.dims
    rot, rest = x[..., :dims], x[..., dims:]
    if table.traditional:
        a, b = rot[..., 0::2], rot[..., 1::2]
        out = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rot.shape)
    else:
        a, b = rot[..., : dims // 2], rot[..., dims // 2 :]
        out = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return mx.concatenate([out, rest], axis=-1) if rest.shape[-1] else out


def strip_rope(keys: mx.array, positions: mx.array, spec: RopeSpec) -> mx.array:
    """Take the rotation (and magnitude) off cached keys.

    Args:
        keys: ``[..., H, N, D]`` post-RoPE keys, at most one batch axis.
        positions: ``[N]`` or ``[B, N]`` absolute positions of the keys.
        spec: The rotation the keys carry.

    Returns:
        float32 content-space keys of the same shape.
    """
    return rotate_pairs(keys, spec.table(positions, inverse=True))


def apply_rope(keys: mx.array, positions: mx.array, spec: RopeSpec) -> mx.array:
    """Rotate content-space keys to ``positions``; inverse of :func:`strip_rope`."""
    return rotate_pairs(keys, spec.table(positions))
