"""A chat over several models, with the bundled pair."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest
from fit_problems import save_model
from identity import identity_mapper
from mlx_lm import stream_generate

from kvgraft.cache import is_mapped
from kvgraft.demo.data import bundled
from kvgraft.errors import ArgumentError
from kvgraft.handoff import MemoryLimit, Session, SessionOptions, memory_policy
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.handle import ModelHandle
from kvgraft.models.loading import LoadedModel, load_model

FIRST = "The bottle belongs to Frank. Martha likes oysters best. What does Martha like best?"
SECOND = "Who owns the bottle?"
N = 12


def handle(name: str) -> ModelHandle:
    return ModelHandle(bundled(f"models/{name}"), dtype=mx.float32)


def copies() -> dict[str, ModelHandle]:
    """The same model twice, and so an exact map between the two."""
    return {"a": handle("large"), "b": handle("large")}


@pytest.fixture(scope="module")
def exact() -> dict[tuple[str, str], Mapper]:
    model = load_model(bundled("models/large"))
    model.model.set_dtype(mx.float32)
    same = identity_mapper(model.model)
    return {("a", "b"): same, ("b", "a"): same}


def pair() -> dict[str, ModelHandle]:
    return {"large": handle("large"), "small": handle("small")}


def mapper() -> Mapper:
    return Mapper.load(bundled("mapper"))


def say(session: Session, text: str, n: int = N) -> str:
    return "".join(session.chat(text, max_tokens=n))


@pytest.fixture(scope="module")
def uninterrupted() -> list[str]:
    session = Session({"a": handle("large")})
    return [say(session, FIRST), say(session, SECOND)]


def test_a_reply_is_what_the_model_says(uninterrupted):
    loaded = load_model(bundled("models/large"))
    loaded.model.set_dtype(mx.float32)
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": FIRST}], tokenize=False, add_generation_prompt=True
    )
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    said = [r.text for r in stream_generate(loaded.model, loaded.tokenizer, ids, max_tokens=N)]
    assert uninterrupted[0] == "".join(said)


def test_the_second_turn_reads_only_what_is_new(uninterrupted):
    session = Session({"a": handle("large")})
    say(session, FIRST)
    held = session.n_tokens
    say(session, SECOND)
    turn = session.turns[1]
    assert turn.skipped > 0.8 * held
    assert turn.read == turn.n_prompt - turn.skipped
    assert turn.mapped == 0 and turn.switches == []
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert session.messages[1]["content"] == uninterrupted[0]


def test_a_switch_between_turns(uninterrupted, exact):
    session = Session(copies(), exact)
    assert say(session, FIRST) == uninterrupted[0]
    session.use("b")
    assert say(session, SECOND) == uninterrupted[1]
    turn = session.turns[1]
    assert session.current == "b" and turn.models == ["a", "b"]
    assert turn.mapped == turn.switches[0].mapped > 0
    assert turn.skipped == turn.mapped and turn.native + turn.mapped == session.n_tokens
    assert "mapped" in turn.describe() and "skipped" in turn.describe()


def test_a_switch_in_the_middle_of_a_reply(uninterrupted, exact):
    session = Session(copies(), exact)
    pieces = []
    for piece in session.chat(FIRST, max_tokens=N):
        pieces.append(piece)
        if len(pieces) == 3:
            session.use("b")
    assert "".join(pieces) == uninterrupted[0]
    assert session.turns[0].models == ["a", "b"]
    assert say(session, SECOND) == uninterrupted[1]


def test_the_current_model_may_read_the_message_before_it_hands_over(uninterrupted, exact):
    session = Session(copies(), exact)
    session.use("b")
    said = "".join(session.chat(FIRST, max_tokens=N, read_first=True))
    assert said == uninterrupted[0]
    turn = session.turns[0]
    assert turn.switches[0].mapped == turn.n_prompt - 1 == turn.skipped


def test_back_and_forth_drift_is_bounded(uninterrupted, exact):
    """With an exact map the text stays; the counters show what is re-prefilled."""
    session = Session(copies(), exact)
    say(session, FIRST)
    worst = 0
    for name in ("b", "a", "b"):
        session.use(name)
        say(session, SECOND, 4)
        worst = max([worst, *(part.times for part in session.mapped_ranges)])
    assert worst == 1
    free = Session(copies(), exact, SessionOptions(max_mapped=None))
    say(free, FIRST)
    for name in ("b", "a", "b"):
        free.use(name)
        say(free, SECOND, 4)
    assert max(part.times for part in free.mapped_ranges) == 3


def test_a_kept_cache_is_come_back_to(exact):
    session = Session(copies(), exact, SessionOptions(keep_cache=True))
    say(session, FIRST)
    session.use("b")
    say(session, SECOND)
    session.use("a")
    say(session, SECOND)
    report = session.turns[2].switches[0]
    assert report.reason is None and report.reused > 0
    assert session.mapped_ranges[0].start == report.reused
    plain = Session({"a": handle("large")})
    for text in (FIRST, SECOND, SECOND):
        say(plain, text)
    assert [m["content"] for m in session.messages] == [m["content"] for m in plain.messages]


def test_a_real_pair_and_its_fallback():
    """There is a map down, none up: up, the conversation is re-prefilled."""
    session = Session(pair(), {("large", "small"): mapper()})
    say(session, FIRST)
    session.use("small")
    say(session, SECOND)
    down = session.turns[1].switches[0]
    assert down.mapped > 0 and down.reason is None
    session.use("large")
    say(session, SECOND)
    up = session.turns[2].switches[0]
    assert up.mapped == 0 and "no mapper" in up.reason
    assert session.turns[2].mapped == 0


def test_repair_continues_over_turns():
    session = Session(pair(), {("large", "small"): mapper()}, SessionOptions(repair=4))
    say(session, FIRST)
    session.use("small")
    say(session, SECOND, 6)
    assert session.turns[1].mapped > 0
    say(session, "And who likes oysters?", 40)
    assert session.turns[2].mapped == 0
    assert not is_mapped(session._state.cache)


def test_a_policy_moves_the_conversation(uninterrupted, exact):
    seen = []

    def policy(observation):
        seen.append(observation)
        return "b" if observation.steps_since_switch == 4 and observation.current == "a" else None

    session = Session(copies(), exact, SessionOptions(policy=policy))
    assert say(session, FIRST) == uninterrupted[0]
    assert session.turns[0].models == ["a", "b"]
    first = seen[0]
    assert [option.name for option in first.model_options] == ["a", "b"]
    assert first.model_options[0].nbytes == first.used < first.limit
    assert len(seen[3].pressures) == 4 and not seen[3].has_switched
    assert len(seen[4].pressures) == 1 and seen[4].has_switched


def test_pressure_sends_it_down():
    used = [10]
    memory_limit = MemoryLimit(1 << 40, observe=lambda: used[0])
    options = SessionOptions(memory_limit=memory_limit, policy=memory_policy())
    session = Session(pair(), {("large", "small"): mapper()}, options)
    text = session.chat(FIRST, max_tokens=N)
    next(text)
    assert session.current == "large"
    used[0] = int(0.9 * (1 << 40))
    list(text)
    assert session.current == "small" and session.turns[0].switches[0].mapped > 0


def test_room_brings_it_up():
    used = [int(0.3 * (1 << 40))]
    memory_limit = MemoryLimit(1 << 40, observe=lambda: used[0])
    options = SessionOptions(start="small", memory_limit=memory_limit, policy=memory_policy(hold=3))
    session = Session(pair(), options=options)
    say(session, FIRST, 8)
    assert session.current == "large"
    assert session.turns[0].switches[0].n_tokens == session.turns[0].n_prompt + 3


def test_models_with_different_tokenizers(tmp_path):
    """Position i means something else then: the text is re-prefilled, in other ids."""
    folders = {
        name: save_model(tmp_path / name, added=added)
        for name, added in (("a", ["<x>"]), ("b", []))
    }
    handles = {name: ModelHandle(folder) for name, folder in folders.items()}
    session = Session(handles, {("a", "b"): identity_mapper(handles["a"].load())})
    pieces = []
    for piece in session.chat("the river and the old house", max_tokens=10):
        pieces.append(piece)
        if len(pieces) == 4:
            session.use("b")
    report = session.turns[0].switches[0]
    assert report.mapped == 0 and "different tokenizers" in report.reason
    assert session.messages[-1]["content"] == "".join(pieces)
    assert session.turns[0].generated == 10


def test_a_model_that_cannot_be_loaded_is_not_switched_to(uninterrupted):
    def broken() -> LoadedModel:
        raise OSError("unplugged")

    session = Session({"a": handle("large"), "b": broken})
    say(session, FIRST)
    session.use("b")
    assert say(session, SECOND) == uninterrupted[1]
    assert session.current == "a"
    assert "unplugged" in session.turns[1].events[0]


def test_an_interrupted_reply_keeps_what_was_said(uninterrupted):
    session = Session({"a": handle("large")})
    text = session.chat(FIRST, max_tokens=N)
    said = "".join(islice(text, 2))
    text.close()
    assert session.messages[-1]["content"] == said != uninterrupted[0]
    assert say(session, SECOND)


def test_live_models_stay():
    loaded = {name: load_model(bundled(f"models/{name}")) for name in ("large", "small")}
    session = Session(loaded, {("large", "small"): mapper()})
    say(session, FIRST, 3)
    for name in ("small", "large", "small"):
        session.use(name)
        say(session, SECOND, 3)
    assert session.turns[1].switches[0].mapped > 0


def test_unknown_names_and_models_without_tokenizer():
    with pytest.raises(ArgumentError, match="no model 'c'"):
        Session(copies()).use("c")
    with pytest.raises(ArgumentError, match="at least one"):
        Session({})
    bare = load_model(bundled("models/small")).model
    with pytest.raises(ArgumentError, match="tokenizer"):
        say(Session({"bare": bare}), FIRST)


def test_a_new_message_interrupts_the_reply_that_is_running(uninterrupted):
    session = Session({"a": handle("large")})
    first = session.chat(FIRST, max_tokens=N)
    said = [next(first), next(first)]
    second = session.chat(SECOND, max_tokens=N)
    next(second)
    assert list(first) == []  # over
    list(second)
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert session.messages[1]["content"].startswith("".join(said))


def test_a_turn_that_cannot_begin_leaves_nothing_behind():
    fails = [True]

    def load():
        if fails.pop() if fails else False:
            raise OSError("disk")
        return load_model(bundled("models/large"))

    session = Session({"a": load})
    with pytest.raises(OSError, match="disk"):
        say(session, FIRST)
    assert session.messages == [] and session.turns == []
    assert say(session, FIRST)
    assert [m["role"] for m in session.messages] == ["user", "assistant"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_in_a_switch_is_the_one_that_is_seen(error, exact, monkeypatch, uninterrupted):
    session = Session(copies(), exact)

    def broken(*_, **__):
        raise error("in the middle")

    reply = session.chat(FIRST, max_tokens=N)
    said = [next(reply)]
    session.use("b")
    with monkeypatch.context() as patched:
        patched.setattr("kvgraft.handoff.session.switch", broken)
        with pytest.raises(error, match="in the middle"):
            said += list(reply)
    assert session.messages[-1]["content"].startswith("".join(said))
    assert say(session, SECOND)


def test_options_of_a_session_are_checked():
    with pytest.raises(ArgumentError, match="at least 2"):
        SessionOptions(repair=1)
    with pytest.raises(ArgumentError, match="native_end"):
        SessionOptions(native_end=0)
    with pytest.raises(ArgumentError, match="no model 'c'"):
        Session(copies(), options=SessionOptions(start="c"))
