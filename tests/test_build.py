"""The binary, what it was built against, and what is said when that is wrong."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from kvgraft import _build_info, _ext
from kvgraft.ops import env

ROOT = Path(__file__).parent.parent


def python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, **kwargs
    )


def import_error(code):
    done = python(code)
    assert done.returncode == 1, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    return last


def test_build_info_names_the_installed_mlx():
    assert version("mlx") == _build_info.MLX_VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+", _build_info.NANOBIND_VERSION)


def test_versions_agree_with_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r"mlx(?:\[cpu\])?==([\d.]+)", text)) - {"0.94.15"} == {
        _build_info.MLX_VERSION
    }
    assert set(re.findall(r"nanobind==([\d.]+)", text)) == {_build_info.NANOBIND_VERSION}
    assert f'version = "{version("kvgraft")}"' in text


def test_another_mlx_is_refused_before_the_binary_is_loaded(tmp_path):
    info = tmp_path / "mlx-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.1.2\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import kvgraft.ops.fused
finally:
    assert "kvgraft._ext" not in sys.modules and "mlx.core" not in sys.modules
"""
    message = import_error(code)
    assert "built for mlx " + _build_info.MLX_VERSION in message
    assert "mlx 0.1.2 is installed" in message
    assert f"Install mlx=={_build_info.MLX_VERSION}" in message


def test_no_mlx_is_refused():
    message = import_error(
        "import importlib.metadata as m\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "import kvgraft"
    )
    assert "no mlx is installed" in message


def test_mlx_without_a_back_end_is_explained():
    message = import_error("import sys; sys.modules['mlx.core'] = None; import kvgraft")
    assert "mlx[cpu]==" in message


def test_source_tree_without_a_build_is_explained():
    message = import_error("import sys; sys.modules['kvgraft._build_info'] = None; import kvgraft")
    assert "not built" in message and "pip install ." in message


def test_binary_refuses_a_foreign_nanobind():
    """Without mlx.core's types in its registry the module says so, and does not load."""
    message = import_error(
        "import sys, types, importlib.util as u\n"
        "sys.modules['mlx'] = types.ModuleType('mlx')\n"
        "sys.modules['mlx.core'] = types.ModuleType('mlx.core')\n"
        f"spec = u.spec_from_file_location('_ext', {_ext.__file__!r})\n"
        "module = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)"
    )
    assert "nanobind whose internals differ" in message


def internals_of_mlx():
    script = ROOT / "cmake" / "mlx_nanobind_internals.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_configuring_with_a_foreign_nanobind_fails(off, tmp_path):
    import nanobind

    script = tmp_path / "check.cmake"
    script.write_text(
        f'set(NB_DIR "{Path(nanobind.__file__).parent}")\n'
        f'set(nanobind_VERSION "{version("nanobind")}")\n'
        f'set(KVGRAFT_MLX_INTERNALS "{internals_of_mlx() + off}")\n'
        f'include("{ROOT}/cmake/CheckNanobind.cmake")\n'
        "kvgraft_check_nanobind()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "cmake", "-P", script], capture_output=True, text=True
    )
    if off == 0:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0
        assert "but the installed mlx was built" in " ".join(done.stderr.split())


def test_one_libmlx_is_loaded():
    done = python(
        "import kvgraft.ops.fused\n"
        "print(*sorted({l.split()[-1] for l in open('/proc/self/maps') if '/libmlx.' in l}))"
        if sys.platform == "linux"
        else "print('libmlx')"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 1


def test_sdist_holds_what_a_build_needs(tmp_path):
    code = f"from scikit_build_core.build import build_sdist\nprint(build_sdist({str(tmp_path)!r}))"
    done = python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "CMakeLists.txt"}
    for folder in ("csrc", "cmake", "python/kvgraft"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                wanted.add(path.relative_to(ROOT).as_posix())
    assert {"csrc/map_layer.cpp", "python/kvgraft/py.typed"} < wanted
    assert wanted - names == set()
    assert not [n for n in names if n.startswith(("build/", "dist/"))]


def test_report_tells_what_runs():
    data = env.report()
    text = env.format_report(data)
    assert data["mlx"] in text and data["kvgraft"] in text
    assert f"{_ext.num_threads()} threads" in data["map_layer"]["cpu"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_slow_blas_is_told_and_a_preload_is_seen(tmp_path):
    here = python(
        "from kvgraft.ops import env; b = env.blas(); print(b['slow'], b['hint'])", env={}
    )
    assert here.stdout.startswith("True ") and "LD_PRELOAD=" in here.stdout, here.stderr
    # A library that defines cblas_sgemm, put in front of MLX's.
    source = tmp_path / "fake.c"
    source.write_text("void cblas_sgemm(void) {}")
    library = tmp_path / "libfakeblas.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    ctypes.CDLL(str(library))
    there = python(
        "from kvgraft.ops import env; b = env.blas(); print(b['slow'], b['library'])",
        env={"LD_PRELOAD": str(library)},
    )
    assert there.stdout.split() == ["False", str(library)], there.stderr


def test_thread_limit_from_the_environment():
    code = "from kvgraft.ops import fused; print(fused.num_threads())"
    for value, want in (("3", "3"), ("0", None), ("junk", None)):
        done = python(code, env={"KVGRAFT_NUM_THREADS": value})
        assert done.returncode == 0, done.stderr
        if want:
            assert done.stdout.strip() == want
        else:
            assert int(done.stdout) >= 1


def test_a_run_that_ran_nothing_is_told_from_one_that_passed(tmp_path):
    """scripts/check_ran.py, which stands between a Mac without Metal and a green check."""
    report = tmp_path / "junit.xml"
    for counts, least, wrong in (
        ('tests="5" failures="0" errors="0" skipped="0"', "5", ""),
        ('tests="5" failures="0" errors="0" skipped="0"', "6", "only 5 tests ran"),
        ('tests="0" failures="0" errors="0" skipped="0"', "1", "only 0 tests ran"),
        ('tests="5" failures="0" errors="0" skipped="1"', "1", "were skipped"),
        ('tests="5" failures="1" errors="0" skipped="0"', "1", "1 of 5 tests failed"),
        ('tests="5" failures="0" errors="2" skipped="0"', "1", "2 of 5 tests failed"),
    ):
        report.write_text(f"<testsuites><testsuite {counts}/></testsuites>")
        done = subprocess.run(
            [sys.executable, ROOT / "scripts" / "check_ran.py", report, least],
            capture_output=True,
            text=True,
        )
        assert bool(done.returncode) == bool(wrong) and wrong in done.stderr
