"""The server over loopback with a real OpenAI client, and its cache store alone."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mappers
import mlx.core as mx
import openai
import pytest
import zoo
from identity import identity_mapper
from mlx.utils import tree_flatten
from mlx_lm import server as mlx_server
from mlx_lm.generate import generate_step

from kvgraft.cache.map import map_cache
from kvgraft.cli import main as cli
from kvgraft.cli.main import main
from kvgraft.demo.data import Conversation, bundled, documents
from kvgraft.errors import FormatError, ServerError, TokenizerMismatchError
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality
from kvgraft.mapper.save import save_mapper
from kvgraft.models.forward import prefill
from kvgraft.models.loading import LoadedModel, ModelIdentity, load_model
from kvgraft.serve import MappingPromptCache, Route, RouteTable, Server, load_routes, make_provider
from kvgraft.serve import store as store_module
from kvgraft.serve.origin import Origin, RequestTokens, origin_of
from kvgraft.serve.store import MappedKey, StoredCache

MAX_TOKENS = 8
# Short, since MLX's Linux wheel multiplies slowly: 141 tokens.
CONTEXT = Conversation.bundled().context[:560].rpartition("\n")[0]


# ------------------------------------------------------------------- helpers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demo pair in float32: on the CPU faster, and no ties between tokens."""
    root = tmp_path_factory.mktemp("models")
    for name in ("large", "small"):
        shutil.copytree(bundled(f"models/{name}"), root / name)
        loaded = load_model(root / name)
        loaded.model.set_dtype(mx.float32)
        mx.save_safetensors(
            str(root / name / "model.safetensors"), dict(tree_flatten(loaded.model.parameters()))
        )
    return {name: str(root / name) for name in ("large", "small")}


@pytest.fixture(scope="module")
def pair(folders: dict[str, str]) -> dict[str, LoadedModel]:
    return {name: load_model(path) for name, path in folders.items()}


@pytest.fixture(scope="module")
def back(tmp_path_factory: pytest.TempPathFactory, pair: dict[str, LoadedModel]) -> Path:
    """A random mapper from the small model to the large one."""
    there = Mapper.load(bundled("mapper"))
    made = mappers.mapper(there.target, there.source)
    made.source_model, made.target_model = there.target_model, there.source_model
    path = tmp_path_factory.mktemp("mappers") / "back"
    made.save(path)
    return path


def plain_routes(*paths: Any) -> RouteTable:
    """Routes without what the mappers' evaluations recommend."""
    return RouteTable([replace(r, native_start=0, native_end=1) for r in load_routes(paths)[0]])


class Running:
    """A running server and a client of it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        host, port = server.wait_until_listening(60)
        self.url = f"http://{host}:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def complete(self, model: str, prompt: str, **options: Any) -> tuple[str, Any]:
        reply = self.client.completions.create(
            model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, **options
        )
        return reply.choices[0].text, reply.usage.prompt_tokens_details


@contextmanager
def serving(*options: str, paths: Any = None, min_gain: int = 16) -> Iterator[Running]:
    routes = plain_routes(*([bundled("mapper")] if paths is None else paths))
    server = Server(make_provider(["--port", "0", *options]), routes, min_gain=min_gain)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Running(server)
    finally:
        server.shutdown()
        thread.join(60)
        assert not thread.is_alive() and len(server.store) == 0


def greedy(loaded: LoadedModel, ids: list[int], cache: Any = None) -> str:
    """What the model says next, as the server words it."""
    words = loaded.tokenizer.detokenizer
    steps = generate_step(mx.array(ids), loaded.model, max_tokens=MAX_TOKENS, prompt_cache=cache)
    for token, _ in steps:
        if token in loaded.tokenizer.eos_token_ids:
            break
        words.add_token(token)
    words.finalize()
    return str(words.text)


def grafted(pair: dict[str, LoadedModel], prompt: str, n: int) -> str:
    """The small model's reply with the first ``n`` tokens mapped from the large one."""
    ids = pair["small"].tokenizer.encode(prompt)
    source = prefill(pair["large"].model, ids[:n])
    cache = map_cache(source, Mapper.load(bundled("mapper")), pair["small"].model)
    return greedy(pair["small"], ids[n:], cache)


# ------------------------------------------------------------- over loopback


def test_a_conversation_changes_the_model_and_comes_back(folders, pair):
    with serving("--model", folders["large"]) as running:
        first, usage = running.complete(folders["large"], CONTEXT)
        n_context = len(pair["large"].tokenizer.encode(CONTEXT))
        assert usage.cached_tokens == 0 and not hasattr(usage, "mapped_tokens")
        assert first == greedy(pair["large"], pair["large"].tokenizer.encode(CONTEXT))

        prompt = CONTEXT + first + "\nUser: What animal belongs to Vera?\nAssistant:"
        second, usage = running.complete(folders["small"], prompt)
        assert usage.cached_tokens == usage.mapped_tokens >= n_context
        assert usage.mapped_from == "large"
        assert second == grafted(pair, prompt, usage.cached_tokens)

        prompt += second + "\nUser: Where is it?\nAssistant:"
        third, usage = running.complete(folders["large"], prompt)
        assert usage.cached_tokens >= n_context and not hasattr(usage, "mapped_tokens")
        assert third == greedy(pair["large"], pair["large"].tokenizer.encode(prompt))


def test_chat_and_streaming_give_the_same(folders, pair):
    question = [{"role": "user", "content": CONTEXT}]
    options = {"max_tokens": MAX_TOKENS, "temperature": 0}
    with serving("--model", folders["large"]) as running:
        chat = running.client.chat.completions
        first = chat.create(model=folders["large"], messages=question, **options)
        turns = [
            *question,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "What animal belongs to Vera?"},
        ]
        stream = chat.create(
            model=folders["small"],
            messages=turns,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        pieces, usage = [], None
        for chunk in stream:
            if chunk.choices:
                pieces.append(chunk.choices[0].delta.content or "")
            usage = chunk.usage or usage
        details = usage.prompt_tokens_details
        assert details.cached_tokens == details.mapped_tokens > 100
        prompt = pair["small"].tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        said = "".join(pieces)
        assert said.strip() == grafted(pair, prompt, details.cached_tokens).strip()
        whole = chat.create(model=folders["small"], messages=turns, **options)
        assert whole.choices[0].message.content == said
        assert whole.usage.prompt_tokens_details.mapped_tokens == details.mapped_tokens


def test_a_mapped_cache_is_never_served_as_native(folders, pair):
    prompt = CONTEXT + " All right.\nUser: What animal belongs to Vera?\nAssistant:"
    native = greedy(pair["small"], pair["small"].tokenizer.encode(prompt))
    with serving("--model", folders["large"]) as running:
        running.complete(folders["large"], prompt)
        once, usage = running.complete(folders["small"], prompt)
        assert usage.mapped_tokens > 100
        again, usage = running.complete(folders["small"], prompt)
        # The second time from the store, and still known as mapped.
        assert again == once != native and usage.mapped_tokens > 100
        exact, usage = running.complete(folders["small"], prompt, extra_body={"exact": True})
        assert exact == native
        assert usage.cached_tokens == 0 and not hasattr(usage, "mapped_tokens")
        # Now that there is a native cache, it is preferred, and the next is native, too.
        last, usage = running.complete(folders["small"], prompt)
        assert last == native
        assert usage.cached_tokens > 100 and not hasattr(usage, "mapped_tokens")


def test_concurrent_conversations_are_not_mixed(folders, pair):
    openings = [text[:300] for text in documents("heldout_stories")[:5]]
    with serving("--model", folders["large"], "--prompt-cache-size", "40") as running:

        def talk(opening: str) -> tuple[str, str, Any]:
            # Nobody waits for the others: requests for both models come mixed.
            first, _ = running.complete(folders["large"], opening)
            prompt = opening + first + " And then"
            second, usage = running.complete(folders["small"], prompt)
            return prompt, second, usage

        with ThreadPoolExecutor(len(openings)) as pool:
            answers = list(pool.map(talk, openings))
    for opening, (prompt, second, usage) in zip(openings, answers, strict=True):
        assert usage.mapped_tokens >= len(pair["large"].tokenizer.encode(opening)) - 1
        assert second == grafted(pair, prompt, usage.cached_tokens)
    assert len({second for _, second, _ in answers}) > 1


@pytest.mark.parametrize("value", [1, 0, "true", None, [True]])
def test_exact_must_be_a_boolean(folders, value):
    with serving("--model", folders["large"]) as running:
        with pytest.raises(openai.BadRequestError) as refused:
            running.complete(folders["large"], "Once", extra_body={"exact": value})
        assert "exact must be true or false" in refused.value.response.text
        running.complete(folders["large"], "Once", extra_body={"exact": False})


@pytest.mark.parametrize("seed", [None, 1])
def test_an_empty_prompt_is_refused_and_the_server_goes_on(folders, pair, seed):
    options = {} if seed is None else {"seed": seed}
    want = greedy(pair["large"], pair["large"].tokenizer.encode("Once"))
    with serving("--model", folders["large"]) as running:
        for _ in range(2):
            with pytest.raises(openai.NotFoundError) as refused:  # as for all wrong prompts
                running.complete(folders["large"], "", **options)
            assert "prompt is empty" in refused.value.response.text
            assert running.complete(folders["large"], "Once", **options)[0] == want


@pytest.mark.parametrize("seed", [None, 1])
def test_a_draft_model_gets_its_cache_too(folders, pair, back, seed):
    """With a draft model, or a seed, mlx-lm serves one request at a time, by other code."""
    options = {} if seed is None else {"seed": seed}
    with serving("--model", folders["large"], paths=[bundled("mapper"), back]) as running:
        drafting = {"extra_body": {"draft_model": folders["small"]}}
        first, _ = running.complete(folders["small"], CONTEXT, **options)
        prompt = CONTEXT + first + "\nUser: What animal belongs to Vera?\nAssistant:"
        second, usage = running.complete(folders["large"], prompt, **drafting, **options)
        assert usage.mapped_tokens > 100
        ids = pair["large"].tokenizer.encode(prompt)
        n = usage.cached_tokens
        source = prefill(pair["small"].model, ids[:n])
        cache = map_cache(source, Mapper.load(back), pair["large"].model)
        assert second == greedy(pair["large"], ids[n:], cache)
        # The next turn goes on from the joint cache, whose parts end at different tokens.
        prompt += second + "\nUser: Where is it?\nAssistant:"
        exact = {"extra_body": {"draft_model": folders["small"], "exact": True}}
        for _ in range(2):
            third, _ = running.complete(folders["large"], prompt, **exact, **options)
            assert third == greedy(pair["large"], pair["large"].tokenizer.encode(prompt))


def test_the_program_serves_and_ends_on_sigterm(folders):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvgraft", "serve", "--mapper", str(bundled("mapper")),
               "--model", folders["small"], "--port", str(port), "--log-level", "INFO"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}/health"
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as reply:
                    assert json.load(reply)["status"] == "ok"
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        reply = client.completions.create(model="default_model", prompt="Once", max_tokens=2)
        assert reply.usage.completion_tokens == 2
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "large -> small (" in out
        assert "Traceback" not in err
    finally:
        process.kill()
        process.wait()


def test_a_taken_port_is_said_and_no_thread_stays(folders):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        routes, _ = load_routes([bundled("mapper")])
        provider = make_provider(["--port", str(taken.getsockname()[1])])
        before = threading.active_count()
        with pytest.raises(ServerError, match="Cannot listen"):
            Server(provider, routes).serve_forever()
        assert threading.active_count() == before


# ------------------------------------------------------------ options, hooks


def test_options_are_those_of_mlx_lm(monkeypatch):
    argv, run = sys.argv, mlx_server.run
    provider = make_provider(["--max-tokens", "7", "--chat-template-args", '{"a": 1}'])
    assert provider.cli_args.max_tokens == 7
    assert provider.cli_args.chat_template_args == {"a": 1}
    assert sys.argv is argv and mlx_server.run is run
    with pytest.raises(SystemExit):
        make_provider(["--no-such-option"])
    assert sys.argv is argv and mlx_server.run is run


@pytest.mark.parametrize(
    "name", ["ResponseGenerator._tokenize", "LRUPromptCache.insert_cache", "_run_http_server"]
)
def test_another_mlx_lm_is_refused(monkeypatch, name):
    owner: Any = mlx_server
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, last)
    with pytest.raises(ServerError, match=f"lacks .*{last}"):
        make_provider()


def test_a_changed_signature_is_refused(monkeypatch):
    monkeypatch.setattr(mlx_server, "run", lambda host, port, models: None)
    with pytest.raises(ServerError, match=r"run\(model_provider\)"):
        make_provider()


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_an_impossible_port_is_refused(capsys, port):
    # Before the mapper is opened: there is none.
    assert cli.main(["serve", "--mapper", "nowhere", "--port", port]) == 1
    assert f"--port is a number from 0 (any free one) to 65535, not {port}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("gain", ["-1", "many"])
def test_an_impossible_gain_is_refused(capsys, gain):
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve", "--mapper", "nowhere", "--min-gain", gain])
    assert stop.value.code == 2 and "not a number of tokens" in capsys.readouterr().err


def test_the_command_needs_a_mapper_and_other_commands_take_no_more(capsys):
    assert cli.main(["serve", "--port", "0"]) == 1
    assert "--mapper" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(bundled("mapper")), "--port", "0"])
    assert stop.value.code == 2


# -------------------------------------------------------------------- routes


def altered(tmp_path: Path, **changes: Any) -> Path:
    mapper = Mapper.load(bundled("mapper"))
    for name, value in changes.items():
        setattr(mapper, name, value)
    path = tmp_path / "mapper"
    save_mapper(mapper, path)
    return path


def test_a_mapper_that_is_not_worth_it_is_left_out_unless_forced(tmp_path):
    path = altered(tmp_path, quality=Quality.from_record({"verdict": "do not ship"}))
    routes, left_out = load_routes([path])
    assert len(routes) == 0 and "force=True" in left_out[0]
    routes, left_out = load_routes([path], force=True)
    assert len(routes) == 1 and not left_out


def test_a_policy_is_read(tmp_path):
    quality = Quality.from_record({"verdict": "ship", "policy": {"head": 4, "tail": 16}})
    (route,) = load_routes([altered(tmp_path, quality=quality)])[0]
    assert (route.native_start, route.native_end, route.verdict) == (4, 16, "ship")


@pytest.mark.parametrize("policy", [{"head": -1}, {"tail": "4"}, {"tail": True}, [4, 16]])
def test_a_senseless_policy_is_refused(tmp_path, policy):
    with pytest.raises(FormatError, match="policy"):
        load_routes([altered(tmp_path, quality=Quality(record={"policy": policy}))])


def test_a_mapper_must_say_its_models_and_they_must_share_a_tokenizer(tmp_path):
    with pytest.raises(FormatError, match="which models"):
        load_routes([altered(tmp_path / "a", source_model=None)])
    other = mappers.mapper().source_model
    with pytest.raises(TokenizerMismatchError):
        load_routes([altered(tmp_path / "b", source_model=other)])


# --------------------------------------------------------------------- store

A, B = ("large", None, None), ("small", None, None)
IDS = [5 + i % 90 for i in range(120)]


class Bench:
    """A store with the demo pair, driven as the server drives it."""

    def __init__(self, pair: dict[str, LoadedModel], folders: dict[str, str], **options: Any):
        self.pair = pair
        self.paths = {key: (folders[key], None, None) for key in ("large", "small")}
        self.provider = SimpleNamespace(
            model_key=None, model=None, tokenizer=None, draft_model=None
        )
        routes = options.pop("routes", None)
        routes = plain_routes(bundled("mapper")) if routes is None else routes
        options.setdefault("min_gain", 16)
        self.store = MappingPromptCache(self.provider, routes, **options)

    def use(self, name: str, adapter: str | None = None) -> Any:
        path = self.paths[name][0]
        loaded = self.pair[name]
        self.provider.model_key = (path, adapter, None)
        self.provider.model, self.provider.tokenizer = loaded.model, loaded.tokenizer
        return self.provider.model_key

    def read(self, name: str, ids: list[int], **origin: Any) -> tuple[Any, Origin]:
        """Serve a prompt: fetch, read the rest, insert."""
        key = self.use(name)
        tokens = RequestTokens(ids, Origin(**origin))
        cache, rest = self.store.fetch_nearest_cache(key, tokens)
        n = len(ids) - len(rest)
        fetched = cache
        if cache is None:
            # An image has ids below 0, and is read as embeddings; any rows do here.
            cache = prefill(self.provider.model, [max(i, 0) for i in rest])
        else:
            cache = list(cache)
            self.provider.model(mx.array([list(rest)]), cache=cache)
        assert all(entry.offset == len(ids) for entry in cache)
        # As after a batch: other objects, without any mark.
        fresh = [type(entry)() for entry in cache]
        for new, entry in zip(fresh, cache, strict=True):
            new.keys, new.values, new.offset = entry.keys, entry.values, entry.offset
        self.store.insert_cache(key, tokens[:], fresh)
        assert n < len(ids)
        return fetched, origin_of(tokens)

    def look_up(self, name: str, ids: list[int]) -> int:
        """How many tokens a native cache of the model holds."""
        cache, rest = self.store.fetch_nearest_cache(self.use(name), list(ids))
        return 0 if cache is None else len(ids) - len(rest)


@pytest.fixture
def bench(pair, folders) -> Bench:
    return Bench(pair, folders)


def test_slices_of_tokens_keep_their_request():
    tokens = RequestTokens([1, 2, 3])
    assert tokens[1:] == [2, 3] and origin_of(tokens[:][:1]) is tokens.origin
    part = tokens[:1]
    part += [7]
    part.append(8)
    assert part == [1, 7, 8] and origin_of(part) is tokens.origin
    assert tokens[2] == 3 and origin_of([1]) is None and origin_of(list(tokens)) is None


def test_what_goes_on_from_a_mapped_cache_stays_apart(bench):
    bench.read("large", IDS)
    _, origin = bench.read("small", [*IDS, 7, 8])
    assert origin.mapped_tokens == len(IDS)
    assert bench.look_up("small", [*IDS, 7, 8, 9]) == 0
    assert bench.look_up("large", [*IDS, 7, 8, 9]) == len(IDS)
    held, rest = bench.store.fetch_nearest_cache(
        bench.use("small"), tokens := RequestTokens([*IDS, 7, 8, 9])
    )
    assert len(rest) == 1 and tokens.origin.mapped_tokens == len(IDS)
    # Cut inside of the mapped part, no more than what is left was mapped.
    bench.store.fetch_nearest_cache(bench.use("small"), tokens := RequestTokens(IDS[:60]))
    assert tokens.origin.mapped_tokens == 59


def test_a_mapped_cache_is_no_donor(pair, folders, back):
    bench = Bench(pair, folders, routes=plain_routes(bundled("mapper"), back))
    bench.read("large", IDS[:60])
    _, origin = bench.read("small", IDS)
    assert origin.mapped_tokens == 60
    # The small model holds all 120 tokens, but on mapped ground; its own 60 serve the large one.
    fetched, origin = bench.read("large", [*IDS, 7])
    assert origin.native and fetched[0].offset >= 60
    # And the other way round: a native cache of the small model is a donor.
    other = IDS[::-1]
    bench.read("small", other)
    _, origin = bench.read("large", [*other, 7])
    assert origin.mapped_tokens == len(other) and origin.source == "small"


def test_a_mapper_reads_no_other_models_caches(pair, folders, back, tmp_path):
    """Not even one of the same geometry and tokenizer, which would go unnoticed."""
    there = Mapper.load(bundled("mapper"))
    assert there.source_model is not None
    third = replace(there.source_model, config_sha256="f" * 64)
    bench = Bench(pair, folders, routes=plain_routes(altered(tmp_path, source_model=third), back))
    bench.read("large", IDS)
    fetched, origin = bench.read("small", [*IDS, 1])
    assert fetched is None and origin.native


def test_only_the_common_prefix_is_taken(bench):
    bench.read("large", [*IDS[:60], 1, 2, 3, 4])
    bench.read("large", [*IDS[:30], 9, 9])
    fetched, origin = bench.read("small", IDS)
    assert origin.mapped_tokens == 60 and fetched.mapped_tokens == 0
    expected = map_cache(
        prefill(bench.pair["large"].model, IDS[:60]),
        Mapper.load(bundled("mapper")),
        bench.pair["small"].model,
    )
    for got, want in zip(fetched, expected, strict=True):
        assert mx.allclose(got.keys[..., :60, :], want.keys[..., :60, :], atol=1e-4)


def test_a_cache_found_under_other_tokens_is_not_used(bench, caplog):
    """Whatever goes wrong with the index, the ids beside the cache decide."""
    bench.read("large", IDS)
    wrong = StoredCache(prefill(bench.pair["large"].model, IDS), store_module._pack(IDS[::-1]))
    other = [2, 3, *IDS[2:]]
    super(MappingPromptCache, bench.store).insert_cache(bench.use("large"), other, wrong)
    with caplog.at_level(logging.ERROR, "kvgraft.serve"):
        assert bench.look_up("large", [*other, 1]) == 0
        _, origin = bench.read("small", [*other, 1])
    assert origin.native and "other tokens" in caplog.text


def test_a_cache_of_another_length_is_not_used(bench, caplog):
    short = StoredCache(prefill(bench.pair["large"].model, IDS[:-3]), store_module._pack(IDS))
    super(MappingPromptCache, bench.store).insert_cache(bench.use("large"), IDS, short)
    with caplog.at_level(logging.ERROR, "kvgraft.serve"):
        assert bench.look_up("large", [*IDS, 1]) == 0
    assert "holds other than" in caplog.text


def test_tokens_that_a_cache_does_not_hold_are_forgotten(bench):
    """After speculative decoding, the last token is in no cache."""
    tokens = RequestTokens([*IDS, 1, 2], Origin(decided=True))
    bench.store.insert_cache(bench.use("large"), tokens, prefill(bench.pair["large"].model, IDS))
    assert bench.look_up("large", [*IDS, 1, 2, 3]) == len(IDS)


def test_a_quantised_cache_is_a_donor(bench):
    """As ``--kv-bits`` leaves it."""
    cache = [
        entry.to_quantized(group_size=32, bits=8)
        for entry in prefill(bench.pair["large"].model, IDS)
    ]
    tokens = RequestTokens(IDS, Origin(decided=True))
    bench.store.insert_cache(bench.use("large"), tokens, cache)
    _, origin = bench.read("small", [*IDS[:100], 1])
    assert origin.mapped_tokens == 100


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_an_identity_map_through_the_store_changes_nothing(name):
    """With sliding layers, too: their rings have wrapped, and can't be cut."""
    model = zoo.make(name)
    ids = [i % zoo.VOCAB for i in range(3, 200, 7)]
    ends = {key: ModelIdentity(key, key * 64, "c" * 64) for key in "ab"}
    provider = SimpleNamespace(model_key=None, model=model, tokenizer=None, draft_model=None)
    route = Route(identity_mapper(model), ends["a"], ends["b"], "ship")
    store = MappingPromptCache(provider, RouteTable([route]), min_gain=4)
    store._identities.update({(key, None, None): end for key, end in ends.items()})
    tokens = RequestTokens(ids, Origin(decided=True))
    store.insert_cache(("a", None, None), tokens, prefill(model, ids))

    asked = RequestTokens([*ids, 1, 2, 3])
    cache, rest = store.fetch_nearest_cache(("b", None, None), asked)
    assert asked.origin.mapped_tokens == len(ids) and rest == [1, 2, 3]
    got = model(mx.array([rest]), cache=cache)
    want = model(mx.array([rest]), cache=prefill(model, ids))
    assert mx.allclose(got, want, atol=1e-4)

    again = RequestTokens(ids)
    cache, rest = store.fetch_nearest_cache(("b", None, None), again)
    wrapped = name == "gemma3_text"
    assert again.origin.mapped_tokens == (0 if wrapped else len(ids) - 1)


@pytest.mark.parametrize("drafts", ["small", "large"])
def test_a_donor_that_drafts_keeps_its_own_cache(pair, folders, back, monkeypatch, drafts):
    bench = Bench(pair, folders, routes=plain_routes(back))
    bench.read("small", IDS)
    calls = []

    def counted(model: Any, tokens: Any) -> Any:
        calls.append(model)
        return prefill(model, tokens)

    monkeypatch.setattr(store_module, "prefill", counted)
    bench.use("large")
    bench.provider.model_key = (folders["large"], None, folders[drafts])
    bench.provider.draft_model = pair[drafts].model
    joint, rest = bench.store.fetch_nearest_cache(
        bench.provider.model_key, tokens := RequestTokens([*IDS, 7])
    )
    assert tokens.origin.mapped_tokens == len(IDS) and len(rest) == 1
    n_target = len(pair["large"].model.layers)
    expected = prefill(pair[drafts].model, IDS)
    for got, want in zip(joint[n_target:], expected, strict=True):
        assert mx.allclose(got.keys[..., :120, :], want.keys[..., :120, :], atol=1e-4)
    assert calls == ([] if drafts == "small" else [pair["large"].model])
    # What is written into the copy does not show in the donor's cache.
    pair[drafts].model(mx.array([[1, 2, 3]]), cache=joint[n_target:])
    assert bench.look_up("small", [*IDS, 1, 2, 3, 4]) == len(IDS)


def test_layers_of_different_lengths_are_cut_to_the_shortest(bench):
    cache = prefill(bench.pair["large"].model, IDS)
    cache[2].trim(5)
    bench.store.insert_cache(bench.use("large"), RequestTokens(IDS, Origin(decided=True)), cache)
    assert bench.look_up("large", [*IDS, 1]) == len(IDS) - 5


def test_a_prompt_seen_before_leaves_a_token_to_read(bench):
    bench.read("large", IDS)
    assert bench.look_up("large", IDS) == len(IDS) - 1
    _, origin = bench.read("small", IDS)
    assert origin.mapped_tokens == len(IDS) - 1


def test_a_cache_of_unknown_origin_is_kept_apart(bench, caplog):
    cache = prefill(bench.pair["small"].model, IDS)
    with caplog.at_level(logging.WARNING, "kvgraft.serve"):
        bench.store.insert_cache(bench.use("small"), list(IDS), cache)
    assert bench.look_up("small", [*IDS, 1]) == 0 and "unknown origin" in caplog.text


def test_a_marked_cache_is_kept_apart_whatever_its_tokens_say(bench):
    source = prefill(bench.pair["large"].model, IDS)
    mapped = map_cache(source, Mapper.load(bundled("mapper")), bench.pair["small"].model)
    tokens = RequestTokens(IDS, Origin(decided=True))
    bench.store.insert_cache(bench.use("small"), tokens, mapped)
    assert bench.look_up("small", [*IDS, 1]) == 0
    key = MappedKey(bench.provider.model_key)
    assert bench.store._look_up(key, [*IDS, 1]).cache.mapped_tokens == len(IDS)


def test_its_own_cache_is_preferred_where_little_is_gained(bench):
    bench.read("small", IDS[:100])
    bench.read("large", IDS[:110])
    _, origin = bench.read("small", [*IDS[:110], 1])
    assert origin.native


def test_its_own_head_is_kept_and_the_rest_mapped(bench):
    bench.read("small", IDS[:40])
    bench.read("large", IDS)
    fetched, origin = bench.read("small", [*IDS, 1])
    assert origin.mapped_tokens == len(IDS) - 40
    native = prefill(bench.pair["small"].model, IDS)
    for got, want in zip(fetched, native, strict=True):
        assert mx.allclose(got.keys[..., :40, :], want.keys[..., :40, :], atol=1e-4)
        assert not mx.allclose(got.values[..., 40:120, :], want.values[..., 40:120, :], atol=1e-2)


def test_the_policy_of_the_artifact_is_followed(pair, folders, tmp_path):
    quality = Quality.from_record({"verdict": "ship", "policy": {"head": 4, "tail": 16}})
    bench = Bench(pair, folders, routes=load_routes([altered(tmp_path, quality=quality)])[0])
    bench.read("large", IDS)
    fetched, origin = bench.read("small", IDS)
    assert origin.mapped_tokens == len(IDS) - 16 - 4
    native = prefill(bench.pair["small"].model, IDS)
    assert mx.allclose(fetched[0].keys[..., :4, :], native[0].keys[..., :4, :], atol=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_an_exact_request_gets_no_mapped_cache(bench, exact):
    bench.read("large", IDS)
    fetched, origin = bench.read("small", [*IDS, 1], exact=exact)
    assert (fetched is None) == origin.native == exact
    assert (bench.look_up("small", [*IDS, 1, 2]) > 0) == exact


def test_adapters_and_images_are_not_mapped(bench):
    image = [*IDS[:70], -99, -99, *IDS[70:]]
    bench.read("large", image)
    _, origin = bench.read("small", image)
    assert origin.mapped_tokens == 70
    key = bench.use("small", adapter="some/adapter")
    cache, _ = bench.store.fetch_nearest_cache(key, RequestTokens(image))
    assert cache is None


def test_a_failed_mapping_is_said_and_the_prompt_read(bench, caplog, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such luck")

    bench.read("small", IDS[:20])
    bench.read("large", IDS)
    monkeypatch.setattr(store_module, "map_prompt", fail)
    with caplog.at_level(logging.WARNING, "kvgraft.serve"):
        fetched, origin = bench.read("small", [*IDS, 1])
    assert origin.native and fetched is not None and "no such luck" in caplog.text
    assert bench.look_up("small", [*IDS, 1, 2]) == len(IDS) + 1


def test_an_error_in_the_store_does_not_reach_the_server(bench, caplog, monkeypatch):
    bench.read("large", IDS)

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken index")

    monkeypatch.setattr(bench.store, "_look_up", fail)
    tokens = RequestTokens([*IDS, 1])
    assert bench.store.fetch_nearest_cache(bench.use("large"), tokens) == (None, tokens)
    assert tokens.origin.native and "broken index" in caplog.text


def test_the_limits_hold_over_native_and_mapped_caches(pair, folders):
    bench = Bench(pair, folders, max_size=2)
    bench.read("large", IDS)
    bench.read("small", [*IDS, 1])
    bench.read("large", IDS[::-1])
    assert len(bench.store) == 2
    assert bench.look_up("large", [*IDS, 1]) == 0


def test_without_routes_it_is_the_store_of_mlx_lm(pair, folders):
    bench = Bench(pair, folders, routes=RouteTable([]))
    bench.read("large", IDS)
    fetched, origin = bench.read("small", IDS)
    assert fetched is None and origin.native
    assert bench.look_up("large", [*IDS, 1]) == len(IDS)


def test_a_model_that_is_not_there_is_refused_before_listening(capsys):
    for option in ("--model", "--draft-model"):
        more = ["--mapper", str(bundled("mapper")), option, "/nope", "--port", "0"]
        assert main(["serve", *more]) == 1
        assert "No model at /nope" in capsys.readouterr().err
