"""Which lines of the kernel the cases run: prints those that none does.

    PYTHONPATH=python python tests/metal/line_coverage.py

Exits with 1 if there is one.
"""

# ruff: noqa: E402 - the helpers lie beside this script
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parent)]

from emulator import CACHE, Library
from map_layer import DIRECTORY, SOURCE, TILES, run

from kvgraft.ops.cases import CASES, build


def source_lines(generated: str) -> list[int]:
    """For each line of the generated file, its line in the kernel; 0 elsewhere."""
    lines, here, inside = [], 0, False
    for text in generated.splitlines():
        if m := re.match(r'#\s*(?:line )?(\d+) "([^"]*)"', text):
            here, inside = int(m[1]) - 1, m[2] == "<stdin>"
            lines.append(0)
            continue
        here += 1
        lines.append(here if inside else 0)
    return lines


def counts() -> dict[int, int]:
    """How often each line of the kernel that holds code ran."""
    CACHE.mkdir(parents=True, exist_ok=True)
    raw, merged = CACHE / f"{os.getpid()}.profraw", CACHE / f"{os.getpid()}.profdata"
    os.environ["LLVM_PROFILE_FILE"] = str(raw)
    library = Library(SOURCE.read_text(), DIRECTORY, mode="coverage")
    for i, case in enumerate(CASES):
        if 0 < case.tokens <= 70:
            problem = build(case)
            tile = None if case.tokens <= 16 else TILES[i % len(TILES)]
            run(library, problem, tile, max_sources=4, checks=False)
    library.library.write_profile()
    subprocess.run(["llvm-profdata-19", "merge", raw, "-o", merged], check=True)
    report = subprocess.run(
        ["llvm-cov-19", "export", "--format=lcov", f"--instr-profile={merged}", library.path],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = source_lines(library.text)
    found: dict[int, int] = {}
    inside = False
    for text in report.splitlines():
        if text.startswith("SF:"):
            inside = text.endswith((".cpp", "<stdin>"))
        elif inside and text.startswith("DA:"):
            line, count = (int(x) for x in text[3:].split(",")[:2])
            if line <= len(lines) and (at := lines[line - 1]):
                found[at] = found.get(at, 0) + count
    return found


def main() -> int:
    found = counts()
    text = SOURCE.read_text().splitlines()
    missed = [line for line, count in sorted(found.items()) if not count]
    for line in missed:
        print(f"{line}: {text[line - 1]}")
    print(f"{len(found) - len(missed)} of {len(found)} lines run.")
    return 1 if missed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
