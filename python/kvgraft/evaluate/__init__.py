"""Evaluation: what the target loses with a mapped cache, on held-out text.

:func:`evaluate_mapper` measures a mapper against its target's own caches and against
controls, judges it by the rules of ``docs/quality.md``, and stores or reports the result.
"""

from kvgraft.evaluate.results import EvalConfig
from kvgraft.evaluate.run import Evaluation, evaluate_mapper

__all__ = ["EvalConfig", "Evaluation", "evaluate_mapper"]
