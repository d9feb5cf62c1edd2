"""lm-evaluation-harness on mapped caches, through mlx-lm's own adapter.

The source prefills every prompt, its cache is mapped, and the target answers
from it. Needs ``pip install "kvgraft[lm-eval]"``, and both models in memory::

    import lm_eval
    from kvgraft.evaluate.lm_eval import MappedLM

    lm = MappedLM("SOURCE", "TARGET", "large-to-small")
    print(lm_eval.simple_evaluate(lm, tasks=["arc_easy", "hellaswag"], limit=200)["results"])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.evaluate import MLXLM
from mlx_lm.models.cache import make_prompt_cache

from kvgraft.cache.map import check_native_ends, map_prompt, split_prompt
from kvgraft.errors import NothingToMapError
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.pair import check_pair
from kvgraft.models.forward import extend_cache, prefill
from kvgraft.models.loading import LoadedModel, check_tokenizers, load_model
from kvgraft.models.probe import read_geometry

__all__ = ["MappedLM"]

_DEFAULT_TOKENS = 256


class MappedLM(MLXLM):
    """A target model that gets each prompt as a mapped cache.

    The target prefills contexts too short to leave anything to map. Scores without a
    context (``loglikelihood_rolling``) are the target's own.

    Args:
        source: Model that prefills the prompts: loaded, a folder or a repository.
        target: Model that answers.
        mapper: The mapper, or its path.
        native_start: Tokens at the start that the target reads itself; default what
            the mapper's evaluation recommends.
        native_end: Tokens at the end that it reads itself, the last one included;
            default likewise.
        max_tokens: Limit of a reply and of a context; default the tasks' own.
        use_chat_template: Whether prompts come with the chat template applied;
            default if the tokenizer has one.

    Raises:
        PairMismatchError: If the mapper is for other models.
        TokenizerMismatchError: If the models do not share a tokenizer.
    """

    def __init__(
        self,
        source: LoadedModel | str | os.PathLike[str],
        target: LoadedModel | str | os.PathLike[str],
        mapper: Mapper | str | os.PathLike[str],
        *,
        native_start: int | None = None,
        native_end: int | None = None,
        max_tokens: int | None = None,
        use_chat_template: bool | None = None,
    ) -> None:
        # Not MLXLM's own: it loads one model by name.
        super(MLXLM, self).__init__()
        first, second = (
            m if isinstance(m, LoadedModel) else load_model(m) for m in (source, target)
        )
        check_tokenizers(first.tokenizer, second.tokenizer)
        self._mapper = mapper if isinstance(mapper, Mapper) else open_mapper(mapper)
        self._geometry = read_geometry(second.model)
        check_pair(
            self._mapper,
            source=read_geometry(first.model),
            target=self._geometry,
            source_model=first.identity(),
            target_model=second.identity(),
        )
        self._source, self._model, self.tokenizer = first.model, second.model, second.tokenizer
        ends = self._mapper.quality.native_ends(native_start, native_end)
        self._native_start, self._native_end = ends
        check_native_ends(self._native_start, self._native_end)
        self._max_tokens = max_tokens
        self._batch_size = 1
        self._sampler = None
        self.use_chat_template = use_chat_template
        if use_chat_template is None:
            self.use_chat_template = getattr(self.tokenizer, "chat_template", None) is not None

    def prompt_cache(self, tokens: Sequence[int]) -> list[Any]:
        """The target's cache of all but the last of ``tokens``."""
        n = len(tokens) - 1
        try:
            split = split_prompt(n, self._native_start, self._native_end)
        except NothingToMapError:
            short: list[Any] = make_prompt_cache(self._model)
            extend_cache(self._model, tokens[:n], short)
            return short
        return map_prompt(
            prefill(self._source, tokens[: split.stop]),
            self._mapper,
            self._model,
            tokens,
            n_tokens=n,
            native_start=self._native_start,
            native_end=self._native_end,
            target_geometry=self._geometry,
            unload_after=False,
        ).cache

    def _process_prompt(self, prompt: Any, step_size: int = 2048) -> tuple[mx.array, list[Any]]:
        """MLXLM's hook: log-probabilities after a prompt, and the cache that holds it."""
        tokens = [int(t) for t in prompt]
        cache = self.prompt_cache(tokens)
        logits = self._model(mx.array([tokens[-1:]]), cache=cache)[:, -1].astype(mx.float32)
        log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(log_p, [entry.state for entry in cache])
        return log_p, cache

    def generate_until(self, requests: Any) -> list[str]:
        """Greedy replies, each cut at the first of its task's stop strings."""
        return [self._reply(*request.args) for request in requests]

    def _reply(self, context: str, options: dict[str, Any]) -> str:
        tokens = list(self.tokenizer.encode(context, add_special_tokens=not self.use_chat_template))
        limit = self._max_tokens or int(options.get("max_gen_toks", _DEFAULT_TOKENS))
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        ends = {int(i) for i in self.tokenizer.eos_token_ids}
        cache = self.prompt_cache(tokens)
        out: list[int] = []
        unread, text = tokens[-1:], ""
        while len(out) < limit:
            token: Any = mx.argmax(self._model(mx.array([unread]), cache=cache)[0, -1]).item()
            if token in ends:
                break
            out.append(int(token))
            unread = [int(token)]
            text = str(self.tokenizer.decode(out))
            found = [text.find(s) for s in stops if s and s in text]
            if found:
                return text[: min(found)]
        return text
