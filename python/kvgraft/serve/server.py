"""``mlx_lm.server`` with a :class:`~kvgraft.serve.store.MappingPromptCache`.

mlx-lm's own program parses the options, loads models, batches requests and
speaks HTTP. Three of its parts are extended here: the cache store, the reading
of prompts (so that their token ids carry an :class:`~kvgraft.serve.origin.Origin`)
and the usage field of the replies.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm import server as mlx_server

from kvgraft.errors import ServerError
from kvgraft.serve.origin import Origin, RequestTokens, origin_of
from kvgraft.serve.routes import RouteTable
from kvgraft.serve.store import MIN_GAIN, MappingPromptCache

__all__ = ["Server", "check_hooks", "make_provider"]

_upstream: Any = mlx_server
_EXACT = "kvgraft_exact"
_MOST_PORT = 65535


def check_hooks() -> None:
    """Raise :class:`ServerError` unless the installed mlx-lm is built as this module needs it."""
    wanted: dict[str, Sequence[str]] = {
        "ResponseGenerator.__init__": ("model_provider", "prompt_cache"),
        "ResponseGenerator._generate": (),
        "ResponseGenerator._tokenize": ("tokenizer", "request", "args"),
        "ResponseGenerator.generate": ("request", "generation_args"),
        "ResponseGenerator.stop_and_join": (),
        "APIHandler.handle_completion": ("request",),
        "APIHandler.generate_response": ("prompt_token_count", "prompt_cache_count"),
        "APIHandler.completion_usage_response": ("prompt_token_count", "prompt_cache_count"),
        "LRUPromptCache.__init__": ("max_size", "max_bytes"),
        "LRUPromptCache.fetch_nearest_cache": ("model", "tokens"),
        "LRUPromptCache.trim_to": ("n_sequences",),
        "LRUPromptCache.insert_cache": ("model", "tokens", "prompt_cache", "cache_type"),
        "_run_http_server": ("host", "port", "response_generator", "server_class",
                             "handler_class"),
        "main": (),
        "run": ("host", "port", "model_provider"),
    }  # fmt: skip
    missing = []
    for name, parameters in wanted.items():
        found: Any = mlx_server
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
        elif lost := set(parameters) - set(inspect.signature(found).parameters):
            missing.append(f"{name}({', '.join(sorted(lost))})")
    if "main" not in missing and "run" not in _upstream.main.__code__.co_names:
        missing.append("main calling run")
    if missing:
        raise ServerError(
            f"mlx-lm {mlx_lm.__version__} has another server than kvgraft serve extends; it lacks "
            f"{', '.join(missing)}. Install mlx-lm 0.31.3 to 0.32.2, or a newer kvgraft."
        )


def make_provider(options: Sequence[str] = ()) -> Any:
    """mlx-lm's ``ModelProvider`` for options of ``mlx_lm.server``.

    mlx-lm's own program parses them and sets up logging, so that all of its
    options and defaults hold. No model is loaded yet.

    Args:
        options: The command line, such as ``["--model", PATH, "--port", "8080"]``.

    Raises:
        ServerError: If the installed mlx-lm's server can't be extended, or the
            port can't be one.
        SystemExit: From mlx-lm, if another option is wrong.
    """
    check_hooks()
    providers: list[Any] = []

    def collect(host: str, port: int, model_provider: Any, **_: Any) -> None:
        providers.append(model_provider)

    with _replaced(_upstream, "run", collect), _replaced(sys, "argv", [_prog(), *options]):
        _upstream.main()
    if not providers:
        raise ServerError(f"The server of mlx-lm {mlx_lm.__version__} did not start as expected.")
    port = providers[0].cli_args.port
    if not 0 <= port <= _MOST_PORT:
        raise ServerError(f"--port is a number from 0 (any free one) to {_MOST_PORT}, not {port}.")
    return providers[0]


class Server:
    """A server on one address, and the models and caches behind it.

    Loading and generating begin at once, in a thread of their own; requests are
    answered once :meth:`serve_forever` runs.

    Args:
        provider: What :func:`make_provider` returned.
        routes: The mappers.
        min_gain: Tokens that a mapping must save; see :data:`MIN_GAIN`.

    Attributes:
        store: The prompt caches. They belong to the generation thread.

    Raises:
        ServerError: If mlx-lm's server can't be extended, or runs on several
            machines, where each holds only a part of a cache.
    """

    def __init__(self, provider: Any, routes: RouteTable, *, min_gain: int = MIN_GAIN) -> None:
        check_hooks()
        if mx.distributed.init().size() > 1:
            raise ServerError(
                "kvgraft serve runs on one machine: on several, each holds only a part of a "
                "cache, which a mapper cannot read. Use mlx_lm.server there."
            )
        args = provider.cli_args
        max_bytes = getattr(args, "prompt_cache_bytes", None)
        self._args = args
        self.store = MappingPromptCache(
            provider,
            routes,
            max_size=args.prompt_cache_size,
            max_bytes=1 << 63 if max_bytes is None else max_bytes,
            min_gain=min_gain,
        )
        self._httpd: ThreadingHTTPServer | None = None
        self._listening = threading.Event()
        self._generator: Any = _ResponseGenerator(provider, self.store)

    def serve_forever(self) -> None:
        """Answer requests until :meth:`shutdown` or Ctrl-C; then end every thread.

        Raises:
            ServerError: If the address can't be listened on.
        """
        outer = self

        class Listener(ThreadingHTTPServer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                outer._httpd = self
                outer._listening.set()

        try:
            _upstream._run_http_server(
                self._args.host,
                self._args.port,
                self._generator,
                server_class=Listener,
                handler_class=_Handler,
            )
        except OSError as error:
            raise ServerError(
                f"Cannot listen on {self._args.host} port {self._args.port} ({error}). Choose "
                "another with --port, or stop what listens there."
            ) from error
        finally:
            if self._httpd is not None:
                self._httpd.server_close()
            self._generator.stop_and_join()

    def wait_until_listening(self, timeout: float | None = None) -> tuple[str, int]:
        """The address, once it is listened on; for a server that runs in another thread.

        Raises:
            ServerError: If it is not listening after ``timeout`` seconds.
        """
        if not self._listening.wait(timeout) or self._httpd is None:
            raise ServerError("The server is not listening yet.")
        host, port = self._httpd.server_address[:2]
        return str(host), int(port)

    def shutdown(self) -> None:
        """End :meth:`serve_forever`, from another thread."""
        self.wait_until_listening()
        assert self._httpd is not None
        self._httpd.shutdown()


class _ResponseGenerator(_upstream.ResponseGenerator):  # type: ignore[misc]  # untyped
    """Ties an origin to each request's token ids."""

    def __init__(self, provider: Any, store: MappingPromptCache) -> None:
        # Before the base class starts its thread.
        self._local = threading.local()
        self._store = store
        super().__init__(provider, store)

    def _generate(self) -> None:
        try:
            super()._generate()
        finally:
            # The arrays go in the thread that made them, whoever still holds the store.
            self._store.trim_to(n_sequences=0)
            # Otherwise MLX's own threads for them may abort the process when it ends.
            mx.clear_streams()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        prompt, *rest = super()._tokenize(tokenizer, request, args)
        if not len(prompt):
            # mlx-lm's generation thread would end on it, and with it the server.
            raise ValueError("The prompt is empty: it has no tokens. Send some text.")
        tagged = RequestTokens(prompt, Origin(exact=getattr(request, _EXACT, False)))
        for part in rest:
            # A prompt with images is looked up by a list of its own.
            if isinstance(key := getattr(part, "cache_key", None), list):
                part.cache_key = RequestTokens(key, tagged.origin)
        return (tagged, *rest)

    def generate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        context, responses = super().generate(request, *args, **kwargs)
        self._local.origin = origin_of(context.prompt)
        return context, responses

    def answered_origin(self) -> Origin | None:
        """Origin of the request that the calling handler's thread answers."""
        return getattr(self._local, "origin", None)


class _Handler(_upstream.APIHandler):  # type: ignore[misc]  # untyped
    """Takes ``exact`` in a request; says in its usage field what was mapped."""

    def handle_completion(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        exact = self.body.get("exact", False)
        if not isinstance(exact, bool):
            message = f"exact must be true or false, not {json.dumps(exact)[:80]}"
            self._set_completion_headers(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": message}).encode())
            return None
        setattr(request, _EXACT, exact)
        return super().handle_completion(request, *args, **kwargs)

    def generate_response(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_mapped(super().generate_response(*args, **kwargs))

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_mapped(super().completion_usage_response(*args, **kwargs))

    def _with_mapped(self, response: Any) -> Any:
        details = response.get("usage", {}).get("prompt_tokens_details")
        origin = self.response_generator.answered_origin()
        if details is not None and origin is not None and origin.mapped_tokens:
            details["mapped_tokens"] = origin.mapped_tokens
            details["mapped_from"] = origin.source
        return response


@contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any] | list[str]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _prog() -> str:
    return "kvgraft serve"
