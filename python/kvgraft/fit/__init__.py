"""Fitting: two models and text in, a mapper out.

text → capture → moments → solve or search → tune → :class:`kvgraft.Mapper`
"""

from kvgraft.fit.arrays import fit_arrays
from kvgraft.fit.config import FitConfig
from kvgraft.fit.features import FeatureRows
from kvgraft.fit.gather import GatheredMoments
from kvgraft.fit.layer_ranking import LayerScores, score_layers
from kvgraft.fit.memory_plan import FitMemoryPlan, plan_fit_memory
from kvgraft.fit.moment_set import MomentSet
from kvgraft.fit.moments import Moments
from kvgraft.fit.pipeline import (
    Forecast,
    fit,
    fit_mapper,
    forecast,
    gather_moments,
)
from kvgraft.fit.solve import solve_mapper
from kvgraft.text.corpus import CalibrationText, read_text
from kvgraft.text.sources import TextSource, parse_source

__all__ = [
    "CalibrationText",
    "FeatureRows",
    "FitConfig",
    "FitMemoryPlan",
    "Forecast",
    "GatheredMoments",
    "LayerScores",
    "MomentSet",
    "Moments",
    "TextSource",
    "fit",
    "fit_arrays",
    "fit_mapper",
    "forecast",
    "gather_moments",
    "parse_source",
    "plan_fit_memory",
    "read_text",
    "score_layers",
    "solve_mapper",
]
