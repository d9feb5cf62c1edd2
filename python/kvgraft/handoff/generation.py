"""A generation that can stop at any token and go on, with the same model or another."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models.cache import make_prompt_cache

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
    token is forgotten and the random sequence goes back to where it was before
    it, so that stopping leaves no trace: a run that was stopped and resumed emits
    what an uninterrupted one does.

    Args:
        state: Where to go on. It belongs to the generation until :meth:`stop`.
        max_tokens: Tokens to generate at most; -1 for no limit.
        prefill_step: Tokens per forward pass while reading.

    Raises:
        ModelNotFoundError: If the state's model was released and can't be loaded.
    """

    def __init__(
        self, state: GenerationState, *, max_tokens: int = 256, prefill_step: int = 2048
    ) -> None:
        self._state: GenerationState | None = state
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
        """What went wrong and was mended, in order."""

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
        """The state as it stands; its cache is in use. See :meth:`stop`.

        Raises:
            HandoffError: After :meth:`stop`.
        """
        if self._state is None:
            raise HandoffError("This generation was stopped. Make another from its state.")
        return self._state

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> int:
        state = self.state
        if 0 <= self._max_tokens <= self.n_generated:
            raise StopIteration
        if self._steps is None:
            self._steps = self._begin()
        try:
            token, logprobs = next(self._steps)
        except BaseException:
            self._go_back()
            raise
        if state.n_mapped and bool(mx.isnan(logprobs).any()):
            token, logprobs = self._reread("the target's predictions from the mapped cache are NaN")
        state.tokens.append(int(token))
        self._pending -= 1
        self.n_generated += 1
        self.logprobs = logprobs
        if state.repair is not None:
            self._advance_repair()
        return int(token)

    def read(self) -> None:
        """Read what the cache lacks of the conversation, all but the last token.

        The first token would do this too; this is for handing over before it.
        """
        state = self.state
        if state.cache is None:
            state.cache = make_prompt_cache(state.handle.load(), state.max_kv_size)
        unread = state.tokens[state.n_cached : -1]
        extend_cache(state.handle.load(), unread, state.cache, step=self._prefill_step)
        state.settle()

    def repair(self, *, chunk: int = 64, memory_limit: MemoryLimit | None = None) -> bool:
        """Replace the mapped cache by a native one while tokens come out of it.

        From now on the model also reads the conversation itself, ``chunk`` tokens
        after each emitted one. When it has caught up, its cache takes the place of
        the mapped one, and what follows is what a native cache gives. Only the
        token after that was still chosen from the mapped cache.

        Args:
            chunk: Tokens read per emitted token. Larger: sooner done, slower
                tokens until then.
            memory_limit: Don't begin if the second cache would not fit.

        Returns:
            Whether there is anything to repair, and room for it.
        """
        state = self.state
        if not state.n_mapped:
            return False
        state.repair = Repair.begin(state, chunk=chunk, memory_limit=memory_limit)
        if state.repair is None:
            self._note("no background repair: a second cache does not fit the memory limit")
        return state.repair is not None

    @property
    def repairing(self) -> bool:
        """Whether a background repair is under way."""
        return self.state.repair is not None

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._state is None

    def stop(self) -> GenerationState:
        """Stop here, and give the state back for :func:`switch` or another run.

        The token that the model has computed ahead is never emitted.
        """
        state = self.state
        self._close()
        self._restore_key()
        if state.cache is not None:
            mx.eval([entry.state for entry in state.cache])
        state.settle()
        self._state = None
        return state

    def _close(self) -> None:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        try:
            steps.close()  # type: ignore[attr-defined]  # a generator
        except RuntimeError as error:
            # MLX keeps the current stream by thread, and mlx-lm's generator wants to
            # put it back in the thread that began. The state is whole all the same.
            if "different thread" not in str(error):
                raise
            self._note("stopped in another thread than the one that began; that is harmless here")

    def _go_back(self) -> None:
        """To before the next token, after an error in the middle of it (a sampler's, say)."""
        self._close()
        self._restore_key()
        self.state.settle()

    def _restore_key(self) -> None:
        """Put the random key back to that of the next token, if one was sampled ahead."""
        if self._pending and self._keys:  # greedy decoding draws nothing
            self.state.rng_key = _words(self._keys[-self._pending])
        self._keys.clear()
        self._pending = 0

    def _begin(self) -> Iterator[tuple[int, mx.array]]:
        """A run of ``generate_step`` that reads what the cache lacks."""
        state = self.state
        if state.n_cached >= len(state.tokens):
            # The last token must be read again, for the logits after it.
            state.rewind(len(state.tokens) - 1)
            if state.cache is None and len(state.tokens) > 1:
                self._note(
                    "the cache has dropped tokens and cannot go back by one; the conversation is "
                    "read again"
                )
        model = state.handle.load()
        check_tokens(model, state.tokens)
        if state.cache is None:
            state.cache = make_prompt_cache(model, state.max_kv_size)
            state.settle()
        if state.rng_key is not None:
            _restore(state.rng_key)
            state.rng_key = None
        held = state.n_cached
        processors = [_with_history(list(state.tokens), p) for p in state.logits_processors]
        steps = generate_step(
            mx.array(state.tokens[held:]),
            model,
            max_tokens=-1,
            sampler=self._sampler(state.sampler),
            logits_processors=processors or None,
            prompt_cache=state.cache,
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

    def _reread(self, reason: str) -> tuple[int, mx.array]:
        """Take the current token again, from a cache that the model fills itself."""
        state = self.state
        self._note(f"{reason}; the conversation was read again")
        self._close()
        state.cache, state.spans, state.repair = None, [], None
        self.read()
        self._restore_key()
        self._steps = self._begin()
        return next(self._steps)

    def _advance_repair(self) -> None:
        state = self.state
        assert state.repair is not None
        try:
            native = state.repair.advance(state.tokens)
        except Exception as error:  # whatever a forward pass can raise, memory first
            state.repair = None
            self._note(f"background repair was given up ({type(error).__name__}: {error})")
            return
        if native is None:
            return
        assert state.cache is not None
        # generate_step indexes this very list, so the next token comes from it.
        state.cache[:] = native
        state.spans, state.repair = [], None
        state.settle()

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


def _restore(key: tuple[int, int]) -> None:
    # MLX's state can't be assigned; a seed of 64 bits is a key of two words.
    mx.random.seed((key[0] << 32) | key[1])
