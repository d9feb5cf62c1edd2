#!/usr/bin/env bash
# Evaluates the mapper that ships with the demo pair: verdict and policy go into the
# artifact, the report into docs/reports/demo.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
demo="$root/python/kvgraft/demo"
exec kvgraft eval "$demo/mapper" \
  --source "$demo/models/large" --target "$demo/models/small" \
  --text "$demo/text/heldout_stories.txt" "$demo/text/heldout_novels.txt" \
  --calibration "$demo/text/calibration_stories.txt" "$demo/text/calibration_novels.txt" \
  --documents 16 --prefix 512 --scored 128 --needle-lengths 256 512 \
  --speed-lengths 64 128 256 512 1024 --out "$root/docs/reports/demo" "$@"
