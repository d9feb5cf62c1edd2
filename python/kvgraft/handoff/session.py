"""A chat that moves between models."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from kvgraft import cache as caches
from kvgraft.cache import MappedRange
from kvgraft.errors import ArgumentError, HandoffError
from kvgraft.handoff.decision import same_tokenizer
from kvgraft.handoff.generation import Generation
from kvgraft.handoff.memory import MemoryLimit, cache_bytes, plan_memory, token_bytes
from kvgraft.handoff.options import SessionOptions
from kvgraft.handoff.policy import ModelOption, Observation
from kvgraft.handoff.repair import Repair, common_prefix
from kvgraft.handoff.report import SwitchReport
from kvgraft.handoff.state import GenerationState
from kvgraft.handoff.switch import switch
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.models.handle import ModelHandle, ModelSource
from kvgraft.ops.env import machine_memory

__all__ = ["Session", "SessionOptions", "Turn"]

_log = logging.getLogger("kvgraft.handoff")
_HISTORY = 256  # pressures that a policy sees at most


@dataclass
class Turn:
    """What one turn of a :class:`Session` did and cost.

    Attributes:
        models: Names of the models that wrote the reply, in order.
        n_prompt: Tokens of the conversation, the new message included.
        skipped: Of these, tokens that no model had to read in this turn, since
            they were in a cache, native or mapped.
        read: Of these, tokens that were read.
        generated: Tokens of the reply.
        seconds_to_first: From the call to the first token, hand-offs included.
        seconds: From the call to the last token.
        switches: Hand-offs, in order.
        native: Tokens of the final cache whose rows the model computed itself.
        mapped: Tokens of the final cache whose rows were mapped.
        events: Errors that the session recovered from.
    """

    models: list[str] = field(default_factory=list)
    n_prompt: int = 0
    skipped: int = 0
    read: int = 0
    generated: int = 0
    seconds_to_first: float = 0.0
    seconds: float = 0.0
    switches: list[SwitchReport] = field(default_factory=list)
    native: int = 0
    mapped: int = 0
    events: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """A few lines for people."""
        lines = [
            f"{' -> '.join(self.models)}: {self.n_prompt} prompt tokens ({self.skipped} skipped, "
            f"{self.read} read), {self.generated} generated in {self.seconds:.2f} s, the first "
            f"after {self.seconds_to_first:.2f} s; cache: {self.native} native, "
            f"{self.mapped} mapped"
        ]
        lines += [line for report in self.switches for line in report.describe().splitlines()]
        return "\n".join([*lines, *self.events])


class Session:
    """A conversation with several models, one of which is in memory.

    Args:
        models: Models by name, largest first. Folders, repositories and functions
            are loaded when needed and released on a hand-off; live models stay
            in memory.
        mappers: Mapper, or its path, by ``(source, target)``. Where there is none,
            the target re-prefills the conversation.
        options: How to generate, and when and how to switch; default
            ``SessionOptions()``.

    Raises:
        ArgumentError: If there are no models, or a name is unknown.

    Example:
        >>> import kvgraft
        >>> from kvgraft.demo.data import bundled
        >>> models = {name: bundled(f"models/{name}") for name in ("large", "small")}
        >>> session = kvgraft.Session(models, {("large", "small"): bundled("mapper")})
        >>> reply = "".join(session.chat("Once upon a time", max_tokens=8))
        >>> session.use("small")
        >>> reply = "".join(session.chat(" there was a dog", max_tokens=8))
        >>> session.current
        'small'
    """

    def __init__(
        self,
        models: Mapping[str, ModelSource | ModelHandle],
        mappers: Mapping[tuple[str, str], Mapper | str | os.PathLike[str]] | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        if not models:
            raise ArgumentError("A session needs at least one model.")
        self._options = options = SessionOptions() if options is None else options
        self._handles = {name: ModelHandle.of(source) for name, source in models.items()}
        for name, handle in self._handles.items():
            handle.name = handle.name or name
        self._mappers = dict(mappers or {})
        for pair in self._mappers:
            for name in pair:
                self._check_name(name)
        self._current = next(iter(self._handles)) if options.start is None else options.start
        self._check_name(self._current)
        self._wanted: str | None = None
        self._state: GenerationState | None = None
        self._repair: Repair | None = None
        # Of each model that was left: the conversation then, and its cache.
        self._parked: dict[str, tuple[list[int], list[Any]]] = {}
        self._pressures: deque[float] = deque(maxlen=_HISTORY)
        self._steps = 0
        self._has_switched = False
        self._talking: Iterator[str] | None = None
        self.messages: list[dict[str, str]] = []
        """The conversation, as chat templates take it."""
        self.turns: list[Turn] = []
        """What each turn cost."""
        if options.system is not None:
            self.messages.append({"role": "system", "content": options.system})

    @property
    def current(self) -> str:
        """Name of the model that holds the conversation."""
        return self._current

    @property
    def mapped_ranges(self) -> tuple[MappedRange, ...]:
        """Which tokens of the current cache were mapped; all others are native."""
        return () if self._state is None else self._state.mapped_ranges

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation so far."""
        return 0 if self._state is None else len(self._state.tokens)

    def use(self, name: str) -> None:
        """Continue with another model: from the next token, or with the next turn.

        Raises:
            ArgumentError: If there is no model of this name.
        """
        self._check_name(name)
        self._wanted = name

    def chat(self, text: str, *, max_tokens: int = 256, read_first: bool = False) -> Iterator[str]:
        """Send a message and get the reply, piece by piece.

        Stop iterating to interrupt the reply; what was generated so far stays in the
        conversation. The next message interrupts a reply that is still running.

        Args:
            text: The user's message.
            max_tokens: Tokens of the reply at most.
            read_first: Where :meth:`use` has asked for another model, let the
                current one read the message before the hand-off. Otherwise the other
                one reads it on top of what is handed over.

        Yields:
            Text as it is generated. Switches happen in between, asked for by
            :meth:`use` or by the policy.
        """
        started = time.perf_counter()
        if self._talking is not None:
            self._talking.close()  # type: ignore[attr-defined]  # a generator
        turn = Turn(models=[self._current])
        self.turns.append(turn)
        self.messages.append({"role": "user", "content": text})
        try:
            state = self._listen(turn, read_first)
        except BaseException:
            # It was not sent: trying again must not send it twice.
            self.messages.pop()
            self.turns.pop()
            raise
        self._talking = self._reply(state, turn, max_tokens, started)
        yield from self._talking

    def _listen(self, turn: Turn, read_first: bool) -> GenerationState:
        """The state to reply from, after a hand-off if one was asked for."""
        state = self._begin_turn()
        before = state.n_cached
        if self._wanted not in (None, self._current):
            if read_first:
                reader = Generation(state, prefill_step=self._options.prefill_step)
                reader.read()
                state = self._state = reader.stop()
            state = self._move(state, turn)
            if turn.switches:
                # The other model's template and tokenizer apply from here on.
                state = self._with_messages(state)
                before = turn.switches[-1].mapped + turn.switches[-1].reused
        turn.n_prompt = len(state.tokens)
        turn.skipped = min(before, turn.n_prompt - 1)
        turn.read = turn.n_prompt - turn.skipped
        return state

    def _reply(
        self, state: GenerationState, turn: Turn, max_tokens: int, started: float
    ) -> Iterator[str]:
        pieces: list[str] = []
        identity = state.handle.identity
        detokenizer = _detokenizer(state.handle)
        stops = set(state.handle.tokenizer.eos_token_ids)
        run = self._run(state, turn, max_tokens)
        try:
            while (token := next(run, None)) is not None:
                turn.generated += 1
                turn.seconds = time.perf_counter() - started
                if turn.generated == 1:
                    turn.seconds_to_first = turn.seconds
                if token in stops:
                    break
                detokenizer.add_token(token)
                pieces.append(detokenizer.last_segment)
                if pieces[-1]:
                    yield pieces[-1]
                if turn.generated < max_tokens and self._should_move(run.state):
                    state = self._move(self._stop(run), turn)
                    turn.events += run.events
                    run = self._run(state, turn, max_tokens - turn.generated)
                    stops = set(state.handle.tokenizer.eos_token_ids)
                    if not same_tokenizer(identity, state.handle.identity):
                        # With one tokenizer, one detokenizer for the whole reply: a
                        # character may be split by the switch.
                        detokenizer.finalize()
                        pieces.append(detokenizer.last_segment)
                        yield pieces[-1]
                        identity, detokenizer = state.handle.identity, _detokenizer(state.handle)
            detokenizer.finalize()
            pieces.append(detokenizer.last_segment)
            if pieces[-1]:
                yield pieces[-1]
        finally:
            # Also when the caller interrupts it, or the model fails.
            turn.events += run.events
            if not run.stopped:
                self._stop(run)
            assert self._state is not None
            turn.mapped = self._state.n_mapped
            turn.native = self._state.n_cached - turn.mapped
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _run(self, state: GenerationState, turn: Turn, max_tokens: int) -> Generation:
        options = self._options
        run = Generation(
            state, max_tokens=max_tokens, prefill_step=options.prefill_step, repair=self._repair
        )
        if options.repair and not run.repairing:
            run.repair(chunk=options.repair, memory_limit=options.memory_limit)
        return run

    def _stop(self, run: Generation) -> GenerationState:
        self._repair = run.pending_repair
        self._state = run.stop()
        return self._state

    # ------------------------------------------------------------------------- turns

    def _begin_turn(self) -> GenerationState:
        """The state with the new message in it, and what is cached of it."""
        handle = self._handles[self._current]
        handle.load()  # the tokenizer comes with it
        if self._state is None:
            processors = tuple(self._options.logits_processors)
            self._state = GenerationState(handle, [], None, self._options.sampler, processors)
        return self._with_messages(self._state)

    def _with_messages(self, state: GenerationState) -> GenerationState:
        """The state with the tokens of the messages, and the cache of those that they share."""
        tokens = self._render(state.handle.tokenizer, state.handle.name)
        if not tokens:
            raise ArgumentError("The conversation is empty: there is nothing to reply to.")
        # Templates may render an earlier reply differently from how it was generated.
        shared = min(common_prefix(state.tokens, tokens), len(tokens) - 1)
        self._state = replace(state.rewound(shared), tokens=tokens)
        return self._state

    def _render(self, tokenizer: Any, name: str) -> list[int]:
        if tokenizer is None:
            raise ArgumentError(
                f"{name} came without a tokenizer, and a chat needs one. Give a folder, a "
                "repository, or what kvgraft.models.loading.load_model returns."
            )
        if self._options.chat_template and getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                self.messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:  # a base model continues the plain text
            ids = tokenizer.encode("".join(m["content"] for m in self.messages))
        return [int(i) for i in ids]

    # ---------------------------------------------------------------------- switching

    def _should_move(self, state: GenerationState) -> bool:
        policy = self._options.policy
        if policy is not None and self._wanted is None:
            self._steps += 1
            self._wanted = policy(self._observe(state))
            if self._wanted is not None:
                self._check_name(self._wanted)
        if self._wanted == self._current:
            self._wanted = None
        return self._wanted is not None

    def _observe(self, state: GenerationState) -> Observation:
        memory_limit = self._options.memory_limit or MemoryLimit(machine_memory())
        limit = memory_limit.usable
        used = memory_limit.observe()
        if used > 0.8 * limit:
            mx.clear_cache()  # buffers kept for reuse are no pressure
            self._parked.clear()
            used = memory_limit.observe()
        self._pressures.append(used / limit)
        return Observation(
            used, limit, self._current, tuple(self._model_options(state, used)),
            tuple(self._pressures), self._steps, self._has_switched,
        )  # fmt: skip

    def _model_options(self, state: GenerationState, used: int) -> Iterator[ModelOption]:
        held, n = cache_bytes(state.cache), len(state.tokens)
        weights = state.handle.nbytes or 0
        for name, handle in self._handles.items():
            if name == self._current:
                yield ModelOption(name, used, used)
                continue
            geometry = handle.known_geometry
            mapper = self._mappers.get((self._current, name))
            opened = mapper if isinstance(mapper, Mapper) else None
            if geometry is None and opened is not None:
                geometry = opened.target
            live = handle.is_loaded
            stays = self._options.keep_source or not state.handle.can_load
            plan = plan_memory(
                source_weights=weights,
                source_cache=held,
                target_weights=0 if live else handle.nbytes or 0,
                n_tokens=n,
                target=geometry,
                mapper=opened,
                keep_source=stays,
                other=max(0, used - weights - held),
            )
            after = 0 if geometry is None else n * token_bytes(geometry)
            rest = used - held - (0 if stays else weights)
            yield ModelOption(name, rest + after + (0 if live else handle.nbytes or 0), plan.peak)

    def _move(self, state: GenerationState, turn: Turn) -> GenerationState:
        """Switch to the wanted model; on failure the current one continues."""
        target, self._wanted = self._wanted, None
        assert target is not None
        source, options = self._current, self._options
        self._steps, self._has_switched = 0, True
        self._pressures.clear()
        limit = options.memory_limit
        if limit is not None and limit.observe() > limit.usable / 2:
            self._parked.clear()
        # A live model could not be loaded again.
        keep_source = options.keep_source or not state.handle.can_load
        try:
            done = switch(
                state,
                self._handles[target],
                self._open((source, target)),
                replace(options, keep_source=keep_source),
                own_cache=self._unpark(target, state.tokens),
            )
        except HandoffError as error:
            name = self._handles[source].name
            turn.events.append(f"stayed with {name}: {error}")
            _log.warning("stayed with %s: %s", name, error)
            return state
        if options.keep_cache and state.cache:
            self._parked[source] = (state.tokens, state.cache)
        self._current, self._state, self._repair = target, done.state, None
        turn.switches.append(done.report)
        turn.models.append(target)
        return done.state

    def _open(self, pair: tuple[str, str]) -> Mapper | str | os.PathLike[str] | None:
        """The mapper of a pair, opened once; a path that can't be opened stays a path."""
        mapper = self._mappers.get(pair)
        if mapper is not None and not isinstance(mapper, Mapper):
            try:
                mapper = self._mappers[pair] = open_mapper(mapper)
            except Exception as error:  # switch() meets it again, and re-prefills
                _log.debug("mapper %s: %s", mapper, error)
        return mapper

    def _unpark(self, name: str, tokens: Sequence[int]) -> list[Any] | None:
        """The cache that a model left behind, cut to what it shares with this conversation."""
        old, cache = self._parked.pop(name, ([], []))
        n = min(common_prefix(old, tokens), caches.n_tokens(cache), len(tokens) - 1)
        return cache if n > 0 and caches.trim(cache, n) else None

    def _check_name(self, name: str) -> None:
        if name not in self._handles:
            raise ArgumentError(
                f"There is no model {name!r} in this session; there are {', '.join(self._handles)}."
            )


def _detokenizer(handle: ModelHandle) -> Any:
    detokenizer = handle.tokenizer.detokenizer
    detokenizer.reset()
    return detokenizer
