"""Say what a file or folder is when it is not the artifact it should be.

"Not a kvgraft artifact" leaves a user guessing. These functions look at names
and the first bytes, and answer with what it looks like and what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

__all__ = ["describe_bytes", "describe_folder", "describe_tensors", "manifest_kind"]

KVBRIDGE_HINT = (
    "it is a kvbridge artifact, which does not say how the models rotate their keys. Read it "
    "with kvgraft.mapper.kvbridge.read(folder, source=..., target=...), giving the two models' "
    "geometries, and save the result."
)


def describe_bytes(start: bytes) -> str | None:
    """What a file is by its first bytes; ``None`` if they say nothing.

    Never executes anything: pickles are recognised, not opened.
    """
    if start.startswith(b"PK\x03\x04"):
        return (
            "it is a zip archive, such as PyTorch's .pt or NumPy's .npz. A .pt can run code when "
            "it is opened, so kvgraft doesn't; ask its author for safetensors."
        )
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return (
            "it is a Python pickle (an old PyTorch .pt?). It can run code when it is opened, so "
            "kvgraft doesn't; ask its author for safetensors."
        )
    if start.startswith(b"GGUF"):
        return "it is a GGUF model. A mapper is made by `kvgraft fit`."
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer. Run `git lfs pull`, or download the file itself."
    if start.startswith(b"\x93NUMPY"):
        return "it is a NumPy array (.npy)."
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page; the download gave an error page. Download it again."
    if start[:1] in (b"{", b"["):
        return "it is JSON text. Give the folder that holds it, or the .safetensors file."
    return None


def describe_tensors(names: Collection[str], metadata: Mapping[str, str]) -> str:
    """What a safetensors file holds, by its tensor names and metadata."""
    if metadata.get("format") == "kvbridge" or any(re.match(r"key_weight\.\d+$", n) for n in names):
        return KVBRIDGE_HINT
    if any(re.match(r"\d+\.w_[kv]$", n) for n in names):
        return (
            "it holds the weights of a VeloxQuant mapper; give the folder with its manifest.json."
        )
    # Prompt caches: tensors numbered by layer, with mlx-lm's class names beside.
    if any(v.endswith("Cache") for v in metadata.values()):
        return (
            "it is an mlx-lm prompt cache. `kvgraft transfer IN OUT --mapper MAPPER` maps it; "
            "give the mapper here."
        )
    if any("lora_" in n for n in names):
        return "it holds LoRA adapters."
    if any(re.match(r"(model|language_model|transformer)\.|lm_head\.", n) for n in names):
        return "it holds the weights of a model. A mapper is made by `kvgraft fit`."
    return "its header holds no kvgraft configuration."


def manifest_kind(manifest: Any) -> str | None:
    """``"veloxquant"`` or ``"kvbridge"`` by the content of a ``manifest.json``."""
    if not isinstance(manifest, dict):
        return None
    if manifest.get("format") == "kvbridge":
        return "kvbridge"
    if {"format_version", "source", "target", "config", "layers"} <= manifest.keys():
        return "veloxquant"
    return None


def describe_folder(path: Path) -> str:
    """What a folder without a ``mapper_config.json`` is."""
    names = sorted(p.name for p in path.iterdir())
    if not names:
        return "it is empty."
    if "adapter_config.json" in names:
        return "it holds LoRA adapters."
    if "config.json" in names:
        kind = ""
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            kind = f" ({config['model_type']})"
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return (
            f"it is a model{kind}, not a mapper. A mapper for a pair of models is made by "
            "`kvgraft fit --source A --target B`."
        )
    if any(re.match(r"mapper(-\d+-of-\d+)?\.safetensors$", n) for n in names):
        return (
            "mapper_config.json is missing. Get it again from where the mapper came from, or give "
            "the path of mapper.safetensors itself."
        )
    pickles = [n for n in names if n.endswith((".pt", ".pth", ".bin", ".pkl"))]
    if pickles:
        return (
            f"it holds {pickles[0]}, a pickle. It can run code when it is opened, so kvgraft "
            "doesn't; ask its author for safetensors."
        )
    shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    return f"it holds no mapper_config.json, only {shown}."
