"""What a fit is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvgraft.errors import FitError
from kvgraft.mapper.save import WEIGHT_FORMATS
from kvgraft.option_names import named

__all__ = ["STORED_KEYS", "FitConfig"]

STORED_KEYS = {
    "head_mapping": "plan",
    "layer_ranking": "selection",
    "source_layers": "layers",
    "weight_format": "weights",
}
"""Keys of settings in stored JSON, where they are not the field's name."""


def _one_of(*choices: str, default: str | None = None) -> Any:
    """A field that takes one of a few strings, by default the first."""
    return field(default=default or choices[0], metadata={"choices": choices})


def _or(default: Any, *words: str) -> Any:
    """A field that takes a number or one of a few words."""
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class FitConfig:
    """Settings of a fit.

    Defaults follow the paper, except for ``layer_ranking`` and ``token_weights``.

    Attributes:
        k: Source layers per target layer (all, with a remark, if the source has
            fewer), ``"all"``, or ``"auto"``: chosen by the
            target's loss on held-out text; see :mod:`kvgraft.fit.search`.
        k_values: The same for values only; ``None`` takes ``k``.
        ridge_lambda: λ of the ridge, or ``"auto"``: for each layer, keys and values
            apart, the one that explains held-out text best; see
            :func:`kvgraft.fit.solve.best_lambda`.
        lambda_convention: ``"gram"``: added to the centred Gram matrix, as in
            the paper and VeloxQuant-MLX. ``"covariance"``: added to the centred
            covariance, as in the molt mappers; stronger by the number of rows.
        layer_ranking: How source layers are ranked: ``"heldout"`` or ``"paper"``
            (in-sample); see :func:`kvgraft.fit.layer_ranking.score_layers`.
        source_layers: ``"shared"``: keys and values take the same source layers, ranked
            by the mean of their scores (the paper). ``"separate"``: each by its
            own.
        head_mapping: Source KV heads per target head: ``"full"`` (all of them, the paper),
            ``"local"`` (the one of the same index), ``"grouped"``, or ``"auto"``:
            chosen like ``k``.
        groups: The ``"grouped"`` mapping: one list of source heads per target head,
            all of one length; ``None`` splits the source heads evenly.
        sequences: Calibration sequences.
        seq_len: Tokens per sequence.
        stride: Every how many tokens a row is taken.
        skip: Leave out this many tokens at the start of each sequence, whose
            keys are attention sinks.
        token_weights: ``"attention"``: rows count by how much the target's attention
            makes of them; see :mod:`kvgraft.fit.token_weights`. ``"uniform"``: all alike (the
            paper). ``"auto"``: by attention where it can be instrumented.
        effective_rows: Share of the rows that must still count (Kish) when they
            are weighted.
        heldout: Share of the sequences that is held out.
        chat: Apply the tokenizer's chat template to JSONL ``messages``.
        documents: Held-out sequences that ``"auto"`` compares losses on.
        prefix: Tokens of each that the target has as a mapped cache; the rest is
            scored. ``None``: 768, or three quarters of a shorter sequence.
        tune_steps: Steps of tuning after the closed form; 0 for none. See
            :mod:`kvgraft.fit.tune`.
        tune_batch: Documents per step.
        tune_rate: Size of a step, as a share of the features' spread.
        content_space: Take RoPE off the keys before fitting (section 3.3 of the
            paper).
        weight_format: How the weights are stored: ``"float32"``, ``"float16"``,
            ``"bfloat16"``, ``"8bit"`` or ``"4bit"``.
        group_size: Group size of quantised weights.
        structure: Which moments are gathered: ``"full"`` serves every plan,
            ``"heads"`` only ``"local"`` at a fraction of the memory; ``"auto"``
            gathers what the plan needs.
        memory_limit: Bytes that the fit may use, models included; ``None`` for
            no limit. What does not fit at once is done in several passes over
            the text.
        sequential: Run the models one after the other, the source's rows waiting
            on disk, so that both are never in memory together.
    """

    k: int | str = _or(8, "all", "auto")
    k_values: int | str | None = _or(None, "all")
    ridge_lambda: float | str = _or(0.01, "auto")
    lambda_convention: str = _one_of("gram", "covariance")
    layer_ranking: str = _one_of("heldout", "paper")
    source_layers: str = _one_of("shared", "separate")
    head_mapping: str = _one_of("full", "local", "grouped", "auto")
    groups: tuple[tuple[int, ...], ...] | None = None
    sequences: int = 500
    seq_len: int = 1024
    stride: int = 4
    skip: int = 0
    token_weights: str = _one_of("auto", "attention", "uniform")
    effective_rows: float = 0.5
    heldout: float = 0.1
    chat: bool = False
    documents: int = 8
    prefix: int | None = None
    tune_steps: int = 0
    tune_batch: int = 8
    tune_rate: float = 0.003
    content_space: bool = True
    weight_format: str = _one_of(*WEIGHT_FORMATS, default="float16")
    group_size: int = 64
    structure: str = _one_of("auto", "full", "heads")
    memory_limit: int | None = None
    sequential: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            choices, value = f.metadata.get("choices"), getattr(self, f.name)
            if choices and value not in choices:
                raise FitError(
                    f"{named(f.name)} must be one of {', '.join(choices)}; got {value!r}."
                )
        for name in ("k", "k_values"):
            value = getattr(self, name)
            words = ("all", "auto") if name == "k" else ("all", None)
            if value not in words and not (isinstance(value, int) and value >= 1):
                raise FitError(f"{named(name)} must be 1 or more, or 'all'; got {value!r}.")
        if self.k == "auto" and self.k_values is not None:
            raise FitError(
                f"{named('k', 'auto')} selects {named('k_values')} too. Leave it out, or give "
                f"{named('k')} a number."
            )
        if self.ridge_lambda != "auto" and not (
            isinstance(self.ridge_lambda, int | float) and 0 <= self.ridge_lambda < float("inf")
        ):
            raise FitError(
                f"{named('ridge_lambda')} must be 0 or more, or 'auto'; got {self.ridge_lambda}."
            )
        if self.sequences < 2 or self.seq_len < 2 or self.stride < 1 or self.skip < 0:
            raise FitError(
                f"{named('sequences')} and {named('seq_len')} must be at least 2, "
                f"{named('stride')} at least 1, {named('skip')} not negative; got "
                f"{self.sequences}, {self.seq_len}, {self.stride}, {self.skip}."
            )
        if self.skip >= self.seq_len:
            raise FitError(f"{named('skip')} {self.skip} leaves none of {self.seq_len} tokens.")
        if not 0 < self.heldout < 1:
            raise FitError(f"{named('heldout')} must lie between 0 and 1, got {self.heldout}.")
        if self.tune_steps < 0 or self.tune_batch < 1 or not 0 < self.tune_rate < 1:
            raise FitError(
                f"{named('tune_steps')} must be 0 or more, {named('tune_batch')} 1 or more, "
                f"{named('tune_rate')} between 0 and 1."
            )
        if not 0 < self.effective_rows <= 1:
            raise FitError(f"{named('effective_rows')} must lie between 0 and 1.")
        if self.groups is not None:
            if self.head_mapping != "grouped":
                raise FitError(f"{named('groups')} go with {named('head_mapping', 'grouped')}.")
            if len({len(g) for g in self.groups}) != 1 or not self.groups[0]:
                raise FitError("Every group must list the same number of heads.")
        if self.documents < 1 or (self.prefix is not None and self.prefix < 2):
            raise FitError(
                f"{named('documents')} must be at least 1, {named('prefix')} at least 2."
            )
        if self.structure == "heads" and self.head_mapping not in ("local", "auto"):
            raise FitError(
                f"{named('structure', 'heads')} serves {named('head_mapping', 'local')} only."
            )
        if self.group_size not in (32, 64, 128):
            raise FitError(f"{named('group_size')} must be 32, 64 or 128; got {self.group_size}.")
        if self.memory_limit is not None and self.memory_limit <= 0:
            raise FitError(f"{named('memory_limit')} must be positive.")

    def within(self, n_layers: int) -> tuple[FitConfig, list[str]]:
        """The same with no more source layers than there are.

        VeloxQuant-MLX takes all of them too where more are asked for, so that is no
        error; but it is another map than was asked for.

        Args:
            n_layers: Layers of the source.

        Returns:
            The settings, and a line for the user for each that was too large.
        """
        changes: dict[str, Any] = {}
        remarks = []
        for name in ("k", "k_values"):
            value = getattr(self, name)
            if isinstance(value, int) and value > n_layers:
                changes[name] = n_layers
                remarks.append(
                    f"{named(name)} is {value}, and the source has {n_layers} layers; all of them "
                    "are used."
                )
        return replace(self, **changes), remarks

    def penalty(self, count: float) -> float:
        """What λ adds to the diagonal of a Gram matrix of ``count`` rows.

        Where λ is chosen layer by layer, this is the paper's.
        """
        if isinstance(self.ridge_lambda, str):
            return 0.01
        return self.ridge_lambda * (count if self.lambda_convention == "covariance" else 1)

    @property
    def is_auto(self) -> bool:
        """Whether something is to be chosen by loss."""
        return "auto" in (self.k, self.head_mapping)

    @property
    def needs_models(self) -> bool:
        """Whether the moments alone do not make the mapper."""
        return self.is_auto or self.tune_steps > 0

    @property
    def k_of_values(self) -> int | str:
        """``k`` of the values."""
        return self.k if self.k_values is None else self.k_values

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, with the keys that records of a fit have."""
        return {STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}
