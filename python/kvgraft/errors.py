"""Every error that kvgraft raises on purpose, and its one warning.

Each message names what was wrong and what to do about it. All errors derive
from :class:`KvgraftError`; where a built-in exception says the same thing, the
class derives from that too, so that callers written for it keep working.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArtifactWriteError",
    "CacheError",
    "CacheFileNotFoundError",
    "ChecksumError",
    "EvaluationError",
    "FitError",
    "FormatError",
    "GeometryError",
    "HandoffError",
    "KvgraftError",
    "MemoryLimitError",
    "MapperNotFoundError",
    "ModelNotFoundError",
    "NothingToMapError",
    "PairMismatchError",
    "QualityWarning",
    "ServerError",
    "TextError",
    "TokenIdError",
    "TokenizerMismatchError",
    "TruncatedFileError",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "VersionError",
]


class KvgraftError(Exception):
    """Base class of all errors raised by kvgraft."""


class ArgumentError(KvgraftError, TypeError):
    """An argument of another kind than the function takes, such as a path for a mapper."""


class GeometryError(KvgraftError, ValueError):
    """Shapes, dtypes or positions that do not fit the mapper or each other."""


class UnsupportedModelError(KvgraftError, ValueError):
    """A model whose cache has no per-token keys and values that can be mapped."""


class CacheError(KvgraftError, ValueError):
    """A cache object that is empty, inconsistent or not what its counters say."""


class NothingToMapError(CacheError):
    """A prompt of which the target reads every token itself, so that nothing is left to map."""


class UnsupportedCacheError(CacheError, TypeError):
    """A cache class that kvgraft does not read or build."""


class FormatError(KvgraftError, ValueError):
    """A file that is not the artifact it should be."""


class MapperNotFoundError(FormatError, FileNotFoundError):
    """No artifact at the given path."""


class CacheFileNotFoundError(FormatError, FileNotFoundError):
    """No prompt-cache file at the given path."""


class ModelNotFoundError(KvgraftError, FileNotFoundError):
    """No model at the given path or under the given name."""


class TruncatedFileError(FormatError):
    """An artifact file shorter than its own header says."""


class ChecksumError(FormatError):
    """An artifact file whose SHA-256 is not the one in ``index.json``."""


class VersionError(FormatError):
    """An artifact of a format version that this release does not read."""


class ArtifactWriteError(KvgraftError, OSError):
    """An artifact that could not be written; what was there before is unchanged."""


class PairMismatchError(KvgraftError, ValueError):
    """A mapper applied to a model or cache other than those it was fitted for."""


class TokenizerMismatchError(KvgraftError, ValueError):
    """Two models that do not turn the same text into the same token ids."""


class TokenIdError(KvgraftError, ValueError):
    """Token ids that a model has no embedding for."""


class FitError(KvgraftError, ValueError):
    """A fit that cannot give a usable map from the data it was given."""


class HandoffError(KvgraftError, RuntimeError):
    """A hand-off that could not be made; the conversation is where it was."""


class MemoryLimitError(HandoffError, MemoryError):
    """Work that does not fit the memory limit given for it."""


class ServerError(KvgraftError, RuntimeError):
    """A server that this mlx-lm or this machine does not let us start."""


class EvaluationError(KvgraftError, ValueError):
    """An evaluation that could not tell anything from the text it was given."""


class TextError(FitError, EvaluationError):
    """Calibration or held-out text that cannot be read."""


class QualityWarning(UserWarning):
    """A mapper that was never evaluated, or whose evaluation speaks against using it."""
