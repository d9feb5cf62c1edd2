#!/usr/bin/env bash
# Builds and runs the C++ tests of the CPU kernels: plain, and under the thread,
# address and undefined-behaviour sanitizers; and for 64-bit Arm under an
# emulator where qemu-aarch64 is installed.
#
#   scripts/check_cpu.sh [plain|thread|address|arm ...]
#
# Needs CMake, a C++20 compiler, and pip and the network for Arm.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${KVGRAFT_WORK:-$root/build/cpu-tests}
python=${PYTHON:-python3}
cmake=$(dirname "$(command -v "$python")")/cmake
[ -x "$cmake" ] || cmake=cmake
mkdir -p "$work"

build() { # name, further arguments of cmake
  local name=$1
  shift
  "$cmake" -S "$root/csrc/tests" -B "$work/$name" -DCMAKE_BUILD_TYPE=Release "$@" \
    > "$work/$name.log" || {
    cat "$work/$name.log"
    exit 1
  }
  "$cmake" --build "$work/$name" --parallel "${KVGRAFT_JOBS:-2}" >> "$work/$name.log" || {
    cat "$work/$name.log"
    exit 1
  }
}

# No kernel file may leave behind symbols that the linker could take for those
# of other files: an older processor would run into instructions it lacks.
check_symbols() {
  local shared
  shared=$(find "$1" -name 'kernel_*.o' -exec nm -C {} + | grep -E ' [WVu] ' || true)
  [ -z "$shared" ] || {
    echo "shared symbols in kernel files:" "$shared" >&2
    exit 1
  }
}

arm() {
  local qemu
  qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)
  if [ -z "$qemu" ]; then
    echo "arm: NOT RUN, there is no qemu-aarch64 (Debian, Ubuntu: apt-get install qemu-user-static)"
    return 0
  fi
  if [ ! -x "$work/venv/bin/python-zig" ]; then
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet ziglang
  fi
  export ZIG_GLOBAL_CACHE_DIR=${ZIG_GLOBAL_CACHE_DIR:-$work/zig-cache}
  local tool
  for tool in c++ ar ranlib; do
    local target=
    [ "$tool" != c++ ] || target="-target aarch64-linux-musl -static"
    printf '#!/bin/sh\nexec "%s" %s %s "$@"\n' "$work/venv/bin/python-zig" "$tool" "$target" \
      > "$work/zig-$tool"
    chmod +x "$work/zig-$tool"
  done
  build arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER="$work/zig-c++" -DCMAKE_AR="$work/zig-ar" \
    -DCMAKE_RANLIB="$work/zig-ranlib"
  echo -n "arm, emulated: "
  "$qemu" "$work/arm/test_cpu" 150
}

[ $# -gt 0 ] || set -- plain thread address arm
for check in "$@"; do
  case $check in
    plain)
      build plain
      check_symbols "$work/plain"
      echo -n "plain: "
      "$work/plain/test_cpu"
      ;;
    thread)
      build thread -DKVGRAFT_SANITIZE=thread
      echo -n "thread sanitizer: "
      "$work/thread/test_cpu" 40
      ;;
    address)
      build address -DKVGRAFT_SANITIZE=address,undefined
      echo -n "address and undefined-behaviour sanitizers: "
      "$work/address/test_cpu" 150
      ;;
    arm) arm ;;
    *)
      sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 2
      ;;
  esac
done
