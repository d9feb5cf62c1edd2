"""The memory of a whole fit: what was planned, what was allowed, what it took.

    python -m benchmarks.fit_memory --limit 2.5G [--source A --target B]
        [--text FILE ...] [--sequences N ...] [--seq-len N] [-- OPTIONS OF kvgraft fit]

Runs `kvgraft fit` once for each number of sequences, in a process of its own, and
asks the system for the largest memory that process ever had: its resident set. That
counts code and files that are mapped, such as moments that wait on disk, which the
system takes back when it needs the room. On Linux the memory that is the process's
own is therefore watched too, 20 times a second; the limit is about that. With more
text the numbers should stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvgraft.cli.options import config_of, memory_size
from kvgraft.cli.parser import build_parser
from kvgraft.demo.data import bundled
from kvgraft.fit import FitConfig, forecast


def own_bytes(pid: int) -> int:
    """Resident memory of a process that no file stands for; 0 where that is unknown."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = [line.split() for line in status.splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(found[0][1]) if found else 0


def measure(options: list[str], out: Path) -> dict[str, Any]:
    """Peak memory of one `kvgraft fit`, its seconds, and what was planned."""
    args = build_parser("fit").parse_args(["fit", *options, "--out", str(out)])
    plan = forecast(args.source, args.target, None, config_of(FitConfig, args)).plan
    command = [sys.executable, "-m", "kvgraft", "fit", *options, "--out", str(out)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    own = 0
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            break
        own = max(own, own_bytes(process.pid))
        time.sleep(0.05)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"kvgraft fit ended with {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "limit": args.memory_limit,
        "planned": plan.peak_bytes,
        "passes": len(plan.passes),
        "peak": usage.ru_maxrss * unit,
        "own": own or None,
        "seconds": time.perf_counter() - begun,
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--source", default=str(bundled("models/large")))
    parser.add_argument("--target", default=str(bundled("models/small")))
    parser.add_argument("--text", nargs="+", default=[str(bundled("text/calibration_novels.txt"))])
    parser.add_argument("--limit", nargs="*", default=[], help="limits; none for no limit")
    parser.add_argument("--sequences", type=int, nargs="+", default=[20, 80])
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("more", nargs="*", help="options of `kvgraft fit`, after --")
    args = parser.parse_args(argv)
    rows = []
    for limit in args.limit or [None]:
        for count in args.sequences:
            options = ["--source", args.source, "--target", args.target, "--text", *args.text]
            options += ["--sequences", str(count), "--seq-len", str(args.seq_len), *args.more]
            if limit is not None:
                memory_size(limit)  # wrong ones are refused here
                options += ["--memory-limit", limit]
            with tempfile.TemporaryDirectory() as folder:
                row = measure(options, Path(folder) / "mapper")
            row |= {"sequences": count, "seq_len": args.seq_len}
            rows.append(row)
            allowed = "no limit" if limit is None else f"limit {row['limit'] / 1e9:.2f} GB"
            own = f" ({row['own'] / 1e9:.2f} GB its own)" if row["own"] else ""
            print(
                f"{count:5d} x {args.seq_len} tokens, {row['passes']} passes, {allowed}: planned "
                f"{row['planned'] / 1e9:.2f} GB, took {row['peak'] / 1e9:.2f} GB{own}, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return rows


if __name__ == "__main__":
    main()
