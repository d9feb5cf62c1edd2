"""The bundled pair of models, and a small fit of it on the command line."""

from __future__ import annotations

from kvgraft.demo.data import bundled

LARGE, SMALL = str(bundled("models/large")), str(bundled("models/small"))
TEXT = str(bundled("text/calibration_stories.txt"))
FIT = ["fit", "--source", LARGE, "--target", SMALL, "--text", TEXT]
LITTLE = "--sequences 6 --seq-len 64 --stride 1 --k 2 --head-mapping local".split()
