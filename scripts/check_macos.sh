#!/usr/bin/env bash
# Configures, compiles and links the extension for macOS arm64 on Linux, against
# the libmlx of MLX's macOS wheel. No Mac is needed and nothing is run: this
# shows that the sources compile with Metal on, that every MLX symbol they use
# is exported, and that CMakeLists.txt takes its Apple branches.
#
#   scripts/check_macos.sh [work folder, default build/macos]
#
# Needs Python 3.11 or newer with pip, unzip, and the network for pip.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mkdir -p "${1:-$root/build/macos}" && cd "${1:-$root/build/macos}" && pwd)
python=${PYTHON:-python3}

pinned() { # the version of package $1 in pyproject.toml
  sed -nE "s/^ *\"$1(\[cpu\])?==([0-9.]+)\",?$/\2/p" "$root/pyproject.toml" | head -n 1
}
mlx=$(pinned mlx)
target=14.0

if [ ! -x "$work/venv/bin/python-zig" ]; then
  "$python" -m venv "$work/venv"
  "$work/venv/bin/pip" install --quiet ziglang cmake ninja "nanobind==$(pinned nanobind)"
fi
bin=$work/venv/bin

if [ ! -f "$work/mlx-$mlx/mlx/lib/libmlx.dylib" ]; then
  "$bin/pip" download --quiet --no-deps --only-binary=:all: --python-version 3.11 \
    --platform macosx_14_0_arm64 --dest "$work/wheels" "mlx==$mlx" "mlx-metal==$mlx"
  mkdir -p "$work/mlx-$mlx"
  for wheel in "$work"/wheels/mlx*"$mlx"*.whl; do
    unzip -q -o "$wheel" -d "$work/mlx-$mlx" -x '*.metallib'
  done
fi

# What Apple's SDK has and neither zig nor the wheel brings: the few names that
# metal-cpp's headers use, and link stubs for the libraries behind them.
sdk=$work/sdk
mkdir -p "$sdk/include/CoreFoundation" "$sdk/include/IOSurface" "$sdk/lib"
cat > "$sdk/include/CoreFoundation/CoreFoundation.h" << 'HEADER'
#pragma once
typedef const void* CFTypeRef;
typedef const struct __CFString* CFStringRef;
typedef double CFTimeInterval;
typedef long CFIndex;
HEADER
cat > "$sdk/include/IOSurface/IOSurfaceRef.h" << 'HEADER'
#pragma once
typedef struct __IOSurface* IOSurfaceRef;
HEADER

stub() { # name, install name; symbols on standard input
  {
    echo '--- !tapi-tbd'
    echo 'tbd-version: 4'
    echo 'targets: [ arm64-macos ]'
    echo "install-name: '$2'"
    echo 'exports:'
    echo '  - targets: [ arm64-macos ]'
    echo "    symbols: [ $(paste -sd, -) ]"
    echo '...'
  } > "$sdk/lib/lib$1.tbd"
}
printf '%s\n' _objc_msgSend _objc_getClass _objc_getProtocol _sel_registerName \
  _objc_msgSend_stret _objc_lookUpClass | stub objc /usr/lib/libobjc.A.dylib
# Python's symbols come from the interpreter that loads the module.
nanobind=$("$bin/python" -c 'import nanobind; print(nanobind.__path__[0])')
sed -nE 's/^-U (_.*)$/\1/p' "$nanobind/cmake/darwin-ld-cpython.sym" |
  stub python /usr/lib/libpython-from-the-interpreter.dylib

# zig's linker has no -bundle and no framework search; a shared library of the
# same objects resolves the same symbols.
cat > "$work/c++" << WRAPPER
#!/usr/bin/env bash
args=()
linking=
while [ \$# -gt 0 ]; do
  case "\$1" in
    -bundle) args+=(-shared) linking=1 ;;
    -dynamiclib) args+=(-shared) linking=1 ;;
    -framework) shift ;;
    -Wl,-framework,*) ;;
    -Wl,@*darwin-ld-*.sym | -Wl,-dead_strip | -Wl,-x | -Wl,-S | -Wl,-headerpad_max_install_names) ;;
    -arch | -F | -iframework) shift ;;
    -F/* | -iframework/*) ;;
    -undefined) shift ;;
    -mmacosx-version-min=*) ;;
    *) args+=("\$1") ;;
  esac
  shift
done
[ -z "\$linking" ] || args+=("$sdk/lib/libobjc.tbd" "$sdk/lib/libpython.tbd")
exec "$bin/python-zig" c++ -target aarch64-macos.$target -isystem "$sdk/include" "\${args[@]}"
WRAPPER
cat > "$work/ar" << WRAPPER
#!/usr/bin/env bash
exec "$bin/python-zig" ar "\$@"
WRAPPER
cat > "$work/ranlib" << WRAPPER
#!/usr/bin/env bash
exec "$bin/python-zig" ranlib "\$@"
WRAPPER
chmod +x "$work/c++" "$work/ar" "$work/ranlib"

# The nanobind that the macOS wheel was built with, read from its binary, since
# it cannot be imported here.
internals=$(grep -aoE 'nanobind_system_libcpp_abi[0-9]+_a[0-9]+_v[0-9]+' \
  "$work/mlx-$mlx"/mlx/core.*darwin.so | head -n 1 | sed -E 's/.*_v//')

export ZIG_GLOBAL_CACHE_DIR=${ZIG_GLOBAL_CACHE_DIR:-$work/zig-cache}
rm -rf "$work/build"
"$bin/cmake" -S "$root" -B "$work/build" -G Ninja \
  -DCMAKE_SYSTEM_NAME=Darwin -DCMAKE_SYSTEM_PROCESSOR=arm64 \
  -DCMAKE_OSX_SYSROOT= -DCMAKE_OSX_ARCHITECTURES= -DCMAKE_OSX_DEPLOYMENT_TARGET= \
  -DCMAKE_CXX_COMPILER="$work/c++" -DCMAKE_AR="$work/ar" -DCMAKE_RANLIB="$work/ranlib" \
  -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_BUILD_TYPE=Release -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
  -DPython_EXECUTABLE="$bin/python" \
  -DMLX_ROOT="$work/mlx-$mlx/mlx" -DKVGRAFT_MLX_INTERNALS="$internals" \
  > "$work/configure.log" || {
  cat "$work/configure.log"
  exit 1
}
"$bin/cmake" --build "$work/build" ${KVGRAFT_JOBS:+-j "$KVGRAFT_JOBS"}

built=$(echo "$work"/build/_ext*.so)
magic=$(od -An -tx4 -N8 "$built" | tr -d ' \n')
[ "$magic" = feedfacf0100000c ] || {
  echo "$built is no arm64 Mach-O file" >&2
  exit 1
}
# The check can fail: a symbol that libmlx keeps to itself is not found.
echo 'void hidden() __asm("__ZN3mlx4core8copy_gpuERKNS0_5arrayERS1_NS0_8CopyTypeE");
void use() { hidden(); }' > "$work/hidden.cpp"
if "$work/c++" -dynamiclib "$work/hidden.cpp" "$work/mlx-$mlx/mlx/lib/libmlx.dylib" \
  -o "$work/hidden.dylib" 2> /dev/null; then
  echo "the linker let an undefined symbol pass; this check proves nothing" >&2
  exit 1
fi

echo "macOS arm64: compiled and linked against libmlx $mlx ($(stat -c %s "$built") bytes). Not run."
