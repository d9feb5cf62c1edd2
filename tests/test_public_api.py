"""The names that ``import kvgraft`` offers, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvgraft

SEEDS = ["load_mapper", "transfer_layer", "transfer_cache", "CrossModelMapper", "KVMapper"]


@pytest.mark.parametrize("name", [*kvgraft.__all__, *SEEDS])
def test_every_public_name_is_there_and_documented(name):
    assert getattr(kvgraft, name).__doc__
    assert name in dir(kvgraft)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'graft'"):
        kvgraft.graft  # noqa: B018


def test_import_is_light():
    heavy = {"mlx_lm", "scipy", "matplotlib", "transformers"}
    code = f"import kvgraft, sys; print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
