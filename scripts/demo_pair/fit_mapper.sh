#!/usr/bin/env bash
# Fits the mapper that ships with the demo pair on the bundled calibration text, tunes it
# on what the target predicts, and evaluates it. Run it after
# `python -m demo_pair.export models`, with kvgraft installed.
set -euo pipefail
demo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../python/kvgraft/demo" && pwd)
fitted=$(mktemp -d)
trap 'rm -rf "$fitted"' EXIT
kvgraft fit \
  --source "$demo/models/large" --target "$demo/models/small" \
  --text "$demo/text/calibration_stories.txt" "$demo/text/calibration_novels.txt" \
  --out "$fitted/mapper" --k all --head-mapping full --sequences 300 --seq-len 512 --stride 1 "$@"
cd "$demo/../../../scripts"
python -m demo_pair.tune_mapper --mapper "$fitted/mapper" --out "$demo/mapper"
"$demo/../../../scripts/demo_pair/evaluate_mapper.sh"
