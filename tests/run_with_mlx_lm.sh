#!/bin/sh
# Run the tests that touch mlx-lm's own objects against another release of it:
#
#     tests/run_with_mlx_lm.sh 0.31.3 [pytest arguments …]
#
# The release is unpacked beside the environment and put before it on the path,
# so that MLX, kvgraft's extension and everything else stay as installed.
set -eu

version=${1:?usage: $0 MLX_LM_VERSION [pytest arguments]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
overlay=${KVGRAFT_OVERLAYS:-$root/build/overlays}/mlx-lm-$version

if ! [ -d "$overlay/mlx_lm" ]; then
    "$python" -m pip install --quiet --no-deps --target "$overlay" "mlx-lm==$version"
fi
export PYTHONPATH="$overlay${PYTHONPATH:+:$PYTHONPATH}"
found=$("$python" -c "import mlx_lm; print(mlx_lm.__version__)")
if [ "$found" != "$version" ]; then
    echo "wanted mlx-lm $version, got $found" >&2
    exit 1
fi
cd "$root"
if [ $# -eq 0 ]; then
    set -- -q -n "$(nproc)" tests/cache tests/models/test_probe.py
fi
exec "$python" -m pytest "$@"
