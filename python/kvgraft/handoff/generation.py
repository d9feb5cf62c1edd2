"""A generation that can stop at any token and continue, with the same model or another."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache import is_mapped
from kvgraft.errors import HandoffError
from kvgraft.handoff.memory import MemoryLimit
from kvgraft.handoff.repair import Repair
from kvgraft.handoff.state import GenerationState, LogitsProcessor, Sampler
from kvgraft.models.forward import extend_cache
from kvgraft.models.handle import ModelHandle, ModelSource
from kvgraft.models.vocabulary import check_tokens

__all__ = ["Generation"]

_log = logging.getLogger("kvgraft.handoff")


class Generation:
    """Token ids from a state, one by one, through ``mlx_lm.generate.generate_step``.

    ``generate_step`` computes one token ahead. When a generation is stopped, that
    token is discarded and the random sequence is reset to where it was before it:
    a run that was stopped and resumed emits what an uninterrupted one does.

    Args:
        state: Where to continue. Its cache is in use until :meth:`stop`.
        max_tokens: Tokens to generate at most; -1 for no limit.
        prefill_step: Tokens per forward pass of the prefill.
        repair: The :attr:`pending_repair` of an earlier generation from this
            conversation with the same model, to continue it.

    Raises:
        ModelNotFoundError: If the state's model was released and can't be loaded.
    """

    def __init__(
        self,
        state: GenerationState,
        *,
        max_tokens: int = 256,
        prefill_step: int = 2048,
        repair: Repair | None = None,
    ) -> None:
        # Its own list of tokens: the state that was given stays what it is.
        self._state: GenerationState | None = replace(state, tokens=list(state.tokens))
        keep = repair is not None and state.n_mapped > 0 and repair.resume(state.tokens)
        self._repair = repair if keep else None
        self._max_tokens = max_tokens
        self._prefill_step = prefill_step
        self._keys: deque[mx.array] = deque(maxlen=2)
        self._pending = 0  # tokens sampled, but not emitted
        self._steps: Iterator[tuple[int, mx.array]] | None = None
        self.n_generated = 0
        """Tokens emitted by this object."""
        self.logprobs: mx.array | None = None
        """Log probabilities ``[vocab]`` behind the last token, after processors."""
        self.events: list[str] = []
        """Errors that the generation recovered from, in order."""

    @classmethod
    def start(
        cls,
        model: ModelSource | ModelHandle,
        prompt: Sequence[int],
        *,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
        max_tokens: int = 256,
        prefill_step: int = 2048,
    ) -> Generation:
        """Generate from a prompt of token ids."""
        state = GenerationState.of(
            model, prompt, sampler=sampler, logits_processors=logits_processors
        )
        return cls(state, max_tokens=max_tokens, prefill_step=prefill_step)

    @property
    def state(self) -> GenerationState:
        """The current state; its tokens and its cache are in use. See :meth:`stop`.

        Raises:
            HandoffError: After :meth:`stop`.
        """
        if self._state is None:
            raise HandoffError("This generation was stopped. Make another from its state.")
        return self._state

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> int:
        if self.state and 0 <= self._max_tokens <= self.n_generated:
            raise StopIteration
        if self._steps is None:
            self._steps = self._begin()
        try:
            token, logprobs = next(self._steps)
        except BaseException:
            # In the middle of a token, a sampler's error, say: back to before it.
            self._close()
            self._restore_key()
            raise
        state = self.state
        if is_mapped(state.cache or ()) and bool(mx.isnan(logprobs).any()):
            token, logprobs = self._prefill_again()
        state.tokens.append(int(token))
        self._pending -= 1
        self.n_generated += 1
        self.logprobs = logprobs
        if self._repair is not None:
            self._advance_repair(self._repair)
        return int(token)

    def read(self) -> None:
        """Prefill what the cache lacks of the conversation, all but the last token.

        Generating the first token does so too; this is for a hand-off before it.
        """
        state = self.state
        cache = self._cache()
        unread = state.tokens[state.n_cached : -1]
        extend_cache(state.handle.load(), unread, cache, step=self._prefill_step)

    def repair(self, *, chunk: int = 64, memory_limit: MemoryLimit | None = None) -> bool:
        """Replace the mapped cache by a native one while generating from it.

        From now on the model also prefills the conversation itself, ``chunk`` tokens
        after each emitted one. When it has caught up, its cache replaces the mapped
        one, and what follows is what a native cache gives. Only the next token was
        still sampled from the mapped cache.

        Args:
            chunk: Tokens read per emitted token, at least 2. A larger chunk is done
                sooner, with slower tokens until then.
            memory_limit: Don't begin if the second cache would not fit.

        Returns:
            Whether there is anything to repair, and room for it.

        Raises:
            ArgumentError: If ``chunk`` is below 2.
        """
        state = self.state
        if not state.n_mapped:
            return False
        self._repair = Repair.begin(state, chunk=chunk, memory_limit=memory_limit)
        if self._repair is None:
            self._note("no background repair: a second cache does not fit the memory limit")
        return self.repairing

    @property
    def repairing(self) -> bool:
        """Whether a background repair is under way."""
        return self._repair is not None

    @property
    def pending_repair(self) -> Repair | None:
        """The background repair under way: for the generation that resumes this one."""
        return self._repair

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._state is None

    def stop(self) -> GenerationState:
        """Stop here, and return the state for :func:`switch` or another run.

        The token that the model has computed ahead is never emitted.
        """
        self._close()
        self._restore_key()
        state, self._state = self.state, None
        if state.cache is not None:
            mx.eval([entry.state for entry in state.cache])
        return state

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        try:
            steps.close()  # type: ignore[attr-defined]  # a generator
        except RuntimeError as error:
            # MLX keeps the current stream by thread, and mlx-lm's generator restores it
            # in the thread that began. The state is complete all the same.
            if "different thread" not in str(error):
                raise
            self._note("stopped in another thread than the one that began; this has no effect")

    def _cache(self) -> list[Any]:
        """The state's cache; an empty one if it has none."""
        state = self.state
        cache = state.cache or make_prompt_cache(state.handle.load(), state.max_kv_size)
        if cache is not state.cache:
            self._state = state.with_cache(cache)
        return cache

    def _restore_key(self) -> None:
        """Reset the random key to that of the next token, if one was sampled ahead."""
        if self._pending and self._keys:  # greedy decoding draws nothing
            self._state = replace(self.state, rng_key=_words(self._keys[-self._pending]))
        self._keys.clear()
        self._pending = 0

    def _begin(self) -> Iterator[tuple[int, mx.array]]:
        """A run of ``generate_step`` that reads what the cache lacks."""
        n = len(self.state.tokens)
        if self.state.n_cached >= n:
            # The last token must be read again, for the logits after it.
            self._state = self.state.rewound(n - 1)
            if self._state.cache is None and n > 1:
                self._repair = None
                self._note(
                    "the cache has dropped tokens and cannot be cut by one; the conversation is "
                    "re-prefilled"
                )
        model = self.state.handle.load()
        check_tokens(model, self.state.tokens)
        cache = self._cache()
        state = self.state
        if state.rng_key is not None:
            _set_random_key(state.rng_key)
            self._state = replace(state, rng_key=None)
        processors = [_with_history(list(state.tokens), p) for p in state.logits_processors]
        steps = generate_step(
            mx.array(state.unread),
            model,
            max_tokens=-1,
            sampler=self._sampler(state.sampler),
            logits_processors=processors or None,
            prompt_cache=cache,
            prefill_step_size=self._prefill_step,
        )
        return _wired(model, steps)

    def _sampler(self, sampler: Sampler | None) -> Sampler:
        def sample(logprobs: mx.array) -> mx.array:
            self._pending += 1
            if sampler is None:
                return mx.argmax(logprobs, axis=-1)
            keys: Any = mx.random.state
            self._keys.append(keys[0])
            return sampler(logprobs)

        return sample

    def _prefill_again(self) -> tuple[int, mx.array]:
        """Take the current token again, from a cache that the model fills itself."""
        self._note(
            "the target's predictions from the mapped cache are NaN; the conversation was "
            "re-prefilled"
        )
        self._close()
        self._state, self._repair = self.state.with_cache(None), None
        self.read()
        self._restore_key()
        self._steps = self._begin()
        return next(self._steps)

    def _advance_repair(self, repair: Repair) -> None:
        state = self.state
        try:
            native = repair.advance(state.tokens)
        except Exception as error:  # whatever a forward pass can raise, memory first
            self._repair = None
            self._note(f"background repair was abandoned ({type(error).__name__}: {error})")
            return
        if native is None:
            return
        assert state.cache is not None
        # generate_step indexes this very list, so the next token comes from it.
        state.cache[:] = native
        self._repair = None

    def _note(self, text: str) -> None:
        self.events.append(text)
        _log.warning("%s", text)


def _wired(model: Any, steps: Any) -> Iterator[tuple[int, mx.array]]:
    streams: Any = [generation_stream]
    # As mlx_lm.stream_generate does: a model that nearly fills the memory stays wired.
    with wired_limit(model, streams):
        try:
            yield from steps
        finally:
            steps.close()


def _with_history(tokens: Sequence[int], processor: LogitsProcessor) -> LogitsProcessor:
    """A processor that sees all of ``tokens``, and then what this run adds.

    ``generate_step`` shows what it has read itself; before mlx-lm 0.32, of a
    prompt only the last token.
    """
    before: mx.array | None = None

    def process(seen: mx.array, logits: mx.array) -> mx.array:
        nonlocal before
        if before is None:  # the first call comes when exactly ``tokens`` are read
            before = mx.array(list(tokens[: len(tokens) - seen.size]), dtype=seen.dtype)
        return processor(mx.concatenate([before, seen]) if before.size else seen, logits)

    return process


def _words(key: mx.array) -> tuple[int, int]:
    words: Any = key.tolist()
    return int(words[0]), int(words[1])


def _set_random_key(key: tuple[int, int]) -> None:
    # MLX's random state can't be assigned; a seed of 64 bits is a key of two words.
    mx.random.seed((key[0] << 32) | key[1])
