"""Options made from dataclasses, and options under their old names."""

from __future__ import annotations

import argparse
import io
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass, field

import pytest

from kvgraft.cli.main import main
from kvgraft.cli.options import add_fields, config_of, memory_size
from kvgraft.cli.parser import COMMANDS, build_parser
from kvgraft.cli.renamed import RENAMED, current_names
from kvgraft.evaluate import EvalConfig
from kvgraft.fit import FitConfig


@pytest.mark.parametrize(
    "text, size",
    [
        ("12G", 12 * 10**9),
        ("1.5 GB", 15 * 10**8),
        ("800m", 8 * 10**8),
        ("12", 12 * 10**9),
        ("0.5", 5 * 10**8),
        ("12000000000", 12 * 10**9),
    ],
)
def test_memory_sizes_are_the_same_everywhere(text, size):
    def limit(command, *args):
        pair = ["--source", "a", "--target", "b", "--memory-limit", text]
        return build_parser(command).parse_args([command, *pair, *args]).memory_limit

    assert limit("fit", "--text", "t", "--out", "m") == size
    assert limit("plan") == limit("generate", "-p", "x") == size


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "12Q", "G", ""])
def test_sizes_that_are_none(text, capsys):
    for command in (
        ["plan", "--source", "a", "--target", "b"],
        ["generate", "--source", "a", "--target", "b", "-p", "x"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*command, f"--memory-limit={text}"])
        assert ended.value.code == 2
        assert "is not a size above 0; write it as 12G" in capsys.readouterr().err


# ------------------------------------------------------- options from dataclasses


@dataclass(frozen=True)
class Settings:
    """Every kind of field that options are made from."""

    count: int = 3
    limit: int | None = None
    share: float = 0.5
    name: str | None = None
    on: bool = False
    sizes: tuple[int, ...] = (1, 2)
    kind: str = field(default="a", metadata={"choices": ("a", "b")})
    rate: float | str = field(default=0.1, metadata={"words": ("auto",)})
    hidden: int = 7


HELP = {
    "count": "how many",
    "limit": {"help": "most", "type": memory_size, "metavar": "SIZE"},
    "share": "part",
    "name": "which",
    "on": "switch",
    "sizes": "which sizes",
    "kind": "what kind",
    "rate": "how fast",
}


def parsed(*argv, defaults=Settings()):  # noqa: B008 - frozen
    parser = argparse.ArgumentParser()
    add_fields(parser, defaults, HELP)
    return config_of(Settings, parser.parse_args(argv))


def test_without_options_the_defaults_hold():
    assert parsed() == Settings()
    changed = Settings(count=5, rate="auto")
    assert parsed(defaults=changed) == changed


def test_each_kind_of_field_is_parsed():
    argv = "--count 4 --limit 2G --share 0.25 --name x --on --sizes 3 4 5 --kind b --rate 2"
    assert parsed(*argv.split()) == Settings(4, 2 * 10**9, 0.25, "x", True, (3, 4, 5), "b", 2.0)
    assert parsed("--rate", "auto").rate == "auto"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--rate", "fast"], "'fast' is neither a number nor 'auto'"),
        (["--kind", "c"], "invalid choice: 'c'"),
        (["--hidden", "1"], "unrecognized arguments"),
    ],
)
def test_other_values_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit):
        parsed(*argv)
    assert message in capsys.readouterr().err


def test_help_shows_defaults():
    parser = argparse.ArgumentParser()
    add_fields(parser, Settings(), HELP)
    shown = " ".join(parser.format_help().split())
    assert "how many (default: 3)" in shown and "which sizes (default: 1 2)" in shown
    assert "switch (default" not in shown and "which (default" not in shown
    assert "--rate X|auto" in shown


@pytest.mark.parametrize(
    "command, kind, argv",
    [
        ("fit", FitConfig, ["--text", "t", "--out", "m"]),
        ("eval", EvalConfig, ["m", "--text", "t"]),
    ],
)
def test_commands_have_the_defaults_of_their_dataclass(command, kind, argv):
    args = build_parser(command).parse_args([command, "--source", "a", "--target", "b", *argv])
    chosen = {"k": "auto", "head_mapping": "auto"} if kind is FitConfig else {}
    assert config_of(kind, args) == kind(**chosen)


# ------------------------------------------------------------------- help texts


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_its_examples_parse(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert max(map(len, shown.splitlines())) <= 80
    _, _, examples = shown.partition("examples:\n")
    for line in examples.replace("\\\n", " ").splitlines():
        program, *argv = shlex.split(line)
        assert program == "kvgraft"
        args, more = build_parser(command).parse_known_args(argv)
        assert not more or args.takes_more


# ------------------------------------------------------------------- old names


@pytest.mark.parametrize(
    "old, new",
    [
        ("fit --plan full --k 4", "fit --head-mapping full --k 4"),
        ("plan --plan=local", "plan --head-mapping=local"),
        ("fit --selection paper", "fit --layer-ranking paper"),
        ("fit --layers separate", "fit --source-layers separate"),
        ("fit --weights 8bit", "fit --weight-format 8bit"),
        ("fit --select nll --k 4", "fit --k 4"),
        ("fit --select=fixed --k 4", "fit --k 8 --head-mapping full --k 4"),
        ("fit --select other", "fit --select other"),
        ("plan --select=other", "plan --select=other"),
        ("eval m --heads 0 4 --tails 1", "eval m --native-starts 0 4 --native-ends 1"),
        ("generate --from a --to b", "generate --source a --target b"),
        ("generate --head 4 --tail 8", "generate --native-start 4 --native-end 8"),
        # The native end counts the token to continue from, the tail of a file did not.
        ("transfer a b --head 4 --tail 8", "transfer a b --native-start 4 --native-end 9"),
        ("transfer a b --tail=0", "transfer a b --native-end=1"),
        ("transfer a b --tail many", "transfer a b --native-end many"),
        ("convert a b --weights 4bit", "convert a b --weight-format 4bit"),
        ("demo --model a", "demo --source a"),
        ("inspect m --layers", "inspect m --layers"),
        ("serve --mapper m --from x", "serve --mapper m --from x"),
        ("fit -- --plan", "fit -- --plan"),
        ("", ""),
    ],
)  # fmt: skip
def test_old_names_are_replaced_with_a_warning(old, new, capsys):
    assert current_names(old.split()) == new.split()
    warned = capsys.readouterr().err
    assert ("the old name will go in 0.3" in warned) == (old != new)


def test_the_warning_names_both(capsys):
    current_names(["fit", "--plan", "local"])
    assert capsys.readouterr().err == (
        "kvgraft: warning: --plan is now --head-mapping; the old name will go in 0.3\n"
    )


@pytest.mark.parametrize("old", [["--tail", "3"], ["--tail=3"]])
def test_the_warning_names_a_value_that_counts_otherwise(old, capsys):
    current_names(["transfer", *old])
    assert capsys.readouterr().err == (
        "kvgraft: warning: --tail 3 is now --native-end 4; the old name will go in 0.3\n"
    )


def test_every_new_name_is_an_option():
    for command, names in RENAMED.items():
        parser = build_parser(command)
        with pytest.raises(SystemExit), redirect_stdout(io.StringIO()) as shown:
            parser.parse_args([command, "--help"])
        for new in names.values():
            assert f"{new} " in shown.getvalue()
