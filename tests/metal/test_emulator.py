"""The emulator finds what it is there to find, and nothing in clean kernels."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import EmulatorError, Library, check_syntax
from lint import lint
from map_layer import DIRECTORY, SOURCE

HEAD = """#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(64)]] void k(
    const device float* b [[buffer(0)]], device float* a [[buffer(1)]],
    constant int& n [[buffer(2)]], uint3 g [[threadgroup_position_in_grid]],
    uint id [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]]) {
  const int t = int(id);
  const int i = int(g.x) * 64 + t;
  threadgroup float s[64];
"""
TAIL = """
}
template [[host_name("k")]] [[kernel]] decltype(k) k;
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MATRIX = "simdgroup_matrix<float, 8, 8> m; "

DEFECTS = {
    "none": (f"s[t] = b[i]; {BARRIER} a[i] = s[63 - t];", ""),
    "none, simdgroup barrier": (
        "s[t] = b[i]; simdgroup_barrier(mem_flags::mem_threadgroup); a[i] = s[t ^ 1];",
        "",
    ),
    "no barrier": ("s[t] = b[i]; a[i] = s[63 - t];", "RACE|UNINIT"),
    "lockstep assumed": ("s[t] = b[i]; a[i] = s[t ^ 1];", "RACE|UNINIT"),
    "simdgroup barrier is not enough": (
        "s[t] = b[i]; simdgroup_barrier(mem_flags::mem_threadgroup); a[i] = s[63 - t];",
        "RACE|UNINIT",
    ),
    "barrier of the wrong memory": (
        "s[t] = b[i]; threadgroup_barrier(mem_flags::mem_device); a[i] = s[63 - t];",
        "RACE",
    ),
    "written while others read": (
        f"float r = 0.0f; for (int k = 0; k < n; ++k) {{ s[t] = b[i]; {BARRIER} "
        "r += s[63 - t]; } a[i] = r;",
        "RACE: threadgroup",
    ),
    "two threads, one output": ("a[i / 2 * 2] = b[i]; if (i % 2) a[i] = 0.0f;", "RACE: device"),
    "two threadgroups, one output": ("a[i] = b[i]; if (t == 0) a[64] = 1.0f;", "RACE: device"),
    "read past the end": ("a[i] = b[i + 1];", "OUT-OF-BOUNDS read"),
    "read before the start": ("a[i] = b[i - 1];", "OUT-OF-BOUNDS read"),
    "written past the end": ("a[i + 1] = b[i]; if (i == 0) a[0] = 1.0f;", "OUT-OF-BOUNDS|RACE"),
    "threadgroup array overrun": (
        "threadgroup float* p = s; p[t + n] = b[i]; a[i] = 1.0f;",
        "OUT-OF-BOUNDS",
    ),
    "input written": ("((device float*)b)[i] = 1.0f; a[i] = 1.0f;", "WRITE to the input"),
    "unset threadgroup memory": (f"if (t < 60) s[t] = b[i]; {BARRIER} a[i] = s[63 - t];", "UNINIT"),
    "output not written": ("if (i != 5) a[i] = b[i];", "UNWRITTEN"),
    "unwritten output read": ("a[i] += b[i];", "UNINIT"),
    "divergent barrier": (f"s[t] = b[i]; if (t < 40) {BARRIER} a[i] = s[t];", "DIVERGENCE"),
    "early return": (f"a[i] = 0.0f; if (t > 60) return; s[t] = b[i]; {BARRIER}", "DIVERGENCE"),
    "two barriers": (
        f"if (t < 32) {{\n s[t] = 1.0f; {BARRIER}\n }} else {{\n s[t] = 2.0f; {BARRIER}\n }} "
        "a[i] = s[t];",
        "DIVERGENCE",
    ),
    "lanes load different matrices": (
        f"s[t] = b[i]; {BARRIER} {MATRIX} simdgroup_load(m, s + (t & 1), 8ul); a[i] = 1.0f;",
        "DIVERGENCE",
    ),
    "unset accumulator": (
        f"s[t] = b[i]; {BARRIER} {MATRIX} simdgroup_matrix<float, 8, 8> c; "
        "simdgroup_load(m, s, 8ul); simdgroup_multiply_accumulate(c, m, m, c); a[i] = 1.0f;",
        "UNINITIALISED accumulator",
    ),
    "unset matrix stored": (f"{MATRIX} simdgroup_store(m, s, 8ul); a[i] = 1.0f;", "UNINIT"),
    "misaligned vector": ("a[i] = (*(const device float4*)(b + 1)).x;", "UNDEFINED|OUT-OF"),
    "vector in an array of floats": (
        "if (t < 16) *(threadgroup float4*)(s + 4 * t) = float4(1.0f); a[i] = b[i];",
        "UNDEFINED|OUT-OF",
    ),
    "private array overrun": (
        "float x[4] = {b[i], b[i], b[i], b[i]}; x[n + 1] = 0.0f; a[i] = x[0];",
        "UNDEFINED",
    ),
    "integer overflow": ("a[i] = b[i] + float(n * 1000000000 > 0);", "UNDEFINED"),
    "shift too far": ("a[i] = float(1 << (n + 30));", "UNDEFINED"),
    "too much threadgroup memory": (
        "threadgroup float u[8192]; u[t] = 1.0f; a[i] = u[t];",
        "LIMIT",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_finds(name):
    body, wanted = DEFECTS[name]
    library = Library(HEAD + body + TAIL, DIRECTORY)
    data = np.linspace(1, 2, 128, dtype=np.float32).tobytes()
    for seed in (0, 1, 2):
        found = library.launch(
            "k",
            {0: data, 1: bytes(512), 2: np.int32(3).tobytes()},
            (2, 1, 1),
            64,
            constants={},
            outputs={1: "write"},
            seed=seed,
        ).report
        assert any(w in found for w in wanted.split("|")) if wanted else not found, found


def test_limits_of_a_launch():
    library = Library(HEAD + "s[t] = 1.0f; a[i] = b[i] + s[t] + float(n);" + TAIL, DIRECTORY)
    buffers = {0: bytes(512), 1: bytes(512), 2: bytes(4)}
    found = library.launch("k", buffers, (1, 1, 1), 128, constants={}, outputs={1: "write"})
    assert "LIMIT: 128 threads" in found.report


TYPE_ERRORS = {
    "no address space": "device float* p = b; a[i] = p[0];",
    "const dropped": "b[i] = 1.0f;",
    "constant written": "n = 3;",
    "address spaces mixed": "threadgroup const float* p = b; a[i] = p[0];",
    "vector of the wrong size": "const float4 v = float4(1.0f, 2.0f, 3.0f); a[i] = v.x;",
    "implicit half4 to float4": "const half4 h = half4(half(1.0f)); float4 v = h; a[i] = v.x;",
    "16x16 matrix": "simdgroup_matrix<float, 16, 16> m; a[i] = 1.0f;",
    "lane's own elements": f"{MATRIX} a[i] = m.thread_elements()[0];",
    "not in the library": "a[i] = simd_summ(b[i]);",
}


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_does_not_compile(name):
    with pytest.raises(EmulatorError, match="error:"):
        Library(HEAD + TYPE_ERRORS[name] + TAIL, DIRECTORY)


LINT = {
    "double": "double x = 1.0f; a[i] = float(x);",
    "unsuffixed literal": "a[i] = b[i] * 2.0;",
    "goto": "goto end; end: a[i] = 1.0f;",
    "new": "thread int* p = new int; a[i] = 1.0f;",
    "std": "a[i] = std::max(1.0f, 2.0f);",
    "lambda": "auto f = [](float x) { return x; }; a[i] = f(1.0f);",
    "static local": "static int q = 0; a[i] = float(q);",
    "pointer without address space": "float x = 1.0f; float* p = &x; a[i] = *p;",
    "if constexpr": "if constexpr (true) a[i] = 1.0f;",
    "not ASCII": "// \u00e9\n a[i] = 1.0f;",
    "fast math": "a[i] = fast::cos(b[i]);",
    "simd function": "a[i] = simd_sum(b[i]);",
    "clamp": "a[i] = clamp(b[i], 0.0f, 1.0f);",
}
LINT_TOP = {
    "global": "int counter = 0;\n",
    "recursion": "int f(int x) { return x < 2 ? 1 : f(x - 1); }\n",
    "threadgroup array in a function": "void f() { threadgroup float q[4]; q[0] = 1.0f; }\n",
    "virtual": "struct S { virtual int f() { return 1; } };\n",
    "recursion through another": (
        "int g(int x);\nint f(int x) { return g(x); }\nint g(int x) { return f(x); }\n"
    ),
}


@pytest.mark.parametrize("name", LINT)
def test_lint(name):
    assert lint(HEAD + LINT[name] + TAIL)


@pytest.mark.parametrize("name", LINT_TOP)
def test_lint_of_the_file(name):
    assert lint(HEAD.replace("[[kernel", LINT_TOP[name] + "[[kernel") + "a[i] = b[i];" + TAIL)


def test_our_kernels_are_clean():
    source = SOURCE.read_text()
    assert lint(source) == []
    assert lint((DIRECTORY / "params.h").read_text().replace("<cstdint>", "")) == []
    assert check_syntax(source, DIRECTORY) == ""
