# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The scripts as their users run them where no kernel can run: arguments, errors, exit statuses."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    COMPILED,
    RECIPES,
    ROOT,
    SCRIPT,
    assert_fails,
    copy_of,
    environment,
    run,
    run_code,
)
from cuda import pathfinder

USAGE = "usage: tmaTensorMap.py [-h] [--elements N] [--device N]"
PIP = f'"{sys.executable}" -m pip install -r "{ROOT / "requirements.txt"}"'

# The driver's answers that nobody here can get from a real one.
ANSWERS = """
from cuda.bindings import driver
driver.cuInit = lambda flags: (driver.CUresult.{status},)
driver.cuDriverGetVersion = lambda: (driver.CUresult.CUDA_SUCCESS, {version})
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elements", "0"], "argument --elements: 0 is not a positive multiple of 128"),
        (["--elements", "-256"], "argument --elements: -256 is not a positive multiple of 128"),
        (["--elements", "1000"], "argument --elements: 1000 is not a positive multiple of 128"),
        (["--elements", str(2**38)], "is not a positive multiple of 128, below 2^31 tiles"),
        (["--elements", "1e3"], "argument --elements: invalid int value: '1e3'"),
        (["--device", "-1"], "argument --device: -1 is negative; ids start at 0"),
        (["--tiles", "8"], "unrecognized arguments: --tiles 8"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    process = run(SCRIPT, *arguments)
    assert_fails(process, message, status=2)
    assert process.stderr.startswith(USAGE)
    assert process.stdout == ""


def test_help_without_docstrings() -> None:
    process = run("-OO", SCRIPT, "--help")
    assert process.returncode == 0
    assert process.stdout.startswith(USAGE)
    assert "a multiple of 128 (default: 1024)" in process.stdout
    assert process.stderr == ""


@pytest.mark.parametrize("script", [SCRIPT, *(ROOT / "recipes" / f"{r}.py" for r in RECIPES)])
def test_package_missing(script: Path) -> None:
    process = run("-S", script)  # -S: without site-packages
    assert_fails(process, f"{script.name}: error: No module named 'cupy'; install", PIP)
    assert process.stdout == ""


def test_cuda_core_missing(tmp_path: Path) -> None:
    """As next to CuPy alone. Other packages fill the namespace cuda too, so that one is found."""
    site = Path(pathfinder.__file__).parents[2]
    (tmp_path / "cuda").mkdir()
    for path in [*site.iterdir(), *(site / "cuda").iterdir()]:
        if path not in (site / "cuda", site / "cuda" / "core"):
            (tmp_path / path.relative_to(site)).symlink_to(path)
    process = run("-S", SCRIPT, env=environment(PYTHONPATH=str(tmp_path)))
    assert_fails(process, "cannot import name 'core' from 'cuda'", "; install", PIP)


def test_helper_missing(tmp_path: Path) -> None:
    process = run(shutil.copy(SCRIPT, tmp_path))
    assert process.returncode == 1
    assert process.stderr.endswith("ModuleNotFoundError: No module named 'cuda_samples_utils'\n")


def test_other_import_errors_keep_their_traceback(tmp_path: Path) -> None:
    """No command would fix a file that hides a package."""
    script = copy_of(SCRIPT, tmp_path)
    (tmp_path / "cupy.py").write_text("from os import nothing\n")
    process = run(script)
    assert process.returncode == 1
    assert "Traceback" in process.stderr
    assert str(tmp_path / "cupy.py") in process.stderr


def test_no_headers() -> None:
    process = run_code("""
sample.pathfinder.find_nvidia_header_directory = lambda name: None
sample.pathfinder.get_cuda_path_or_home = lambda: "/opt/cuda"
sample.include_directories()
""")
    assert_fails(process, "no CUDA headers (toolkit root: /opt/cuda); install", PIP)


def test_no_nvrtc() -> None:
    process = run_code("""
def missing(name):
    raise sample.pathfinder.DynamicLibNotFoundError("no libnvrtc.so.13\\n  in these folders")
sample.pathfinder.load_nvidia_dynamic_lib = missing
sample.compile_kernel("sm_90")
""")
    assert_fails(process, "NVRTC was not found: no libnvrtc.so.13 in these folders; install", PIP)


@pytest.mark.parametrize("script", [SCRIPT, *(ROOT / "recipes" / f"{r}.py" for r in RECIPES)])
@pytest.mark.no_driver
def test_no_driver(script: Path) -> None:
    process = run("-W", "error", script)
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, f"{script.name}: error: no usable NVIDIA driver: ", "driver 580")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.no_driver
def test_recipe_compiles_its_own_kernel(tmp_path: Path, recipe: str) -> None:
    """Without a driver the size of a CUBIN is printed, whichever kernel it has."""
    script = ROOT / "recipes" / f"{recipe}.py"
    process = run(copy_of(script, tmp_path, ('extern "C"', 'extern "D"')))
    assert process.returncode == 1
    assert "detected in the compilation" in process.stderr, process


@pytest.mark.parametrize(
    ("status", "version", "message"),
    [
        ("CUDA_SUCCESS", 12040, "the NVIDIA driver supports CUDA 12.4: update it to 580"),
        ("CUDA_ERROR_NO_DEVICE", 13000, "CUDA_ERROR_NO_DEVICE: no usable GPU: check nvidia-smi"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", 13000, "CUDA_ERROR_SYSTEM_NOT_READY: no usable GPU"),
    ],
)
def test_unusable_driver(status: str, version: int, message: str) -> None:
    process = run_code(ANSWERS.format(status=status, version=version))
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, message)


def test_driver_that_does_not_load() -> None:
    """Missing, too old to be loaded, or damaged: the message has the loader's own text."""
    process = run_code("""
from cuda.bindings import driver
def broken():
    raise RuntimeError("libcuda.so.1: undefined symbol: cuGetProcAddress_v2")
driver.cuDriverGetVersion = broken
""")
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, "no usable NVIDIA driver: libcuda.so.1: undefined symbol: cuGetProcAddr")


def test_gpu_older_than_hopper() -> None:
    process = run_code("""
from types import SimpleNamespace
device = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
sample.utils.open_device = lambda *_: device
""")
    assert process.stdout == (
        "Device: NVIDIA A100-SXM4-80GB\nCompute Capability: 8.0\n\n"
        "TMA needs compute capability 9.0 or higher (Hopper or later); this device has 8.0.\n"
    )
    assert process.stderr == ""
    assert process.returncode == 0


def test_gemm_needs_hopper() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "recipes")!r})
import gemm
from types import SimpleNamespace
device = SimpleNamespace(name="NVIDIA B200", compute_capability=(10, 0))
gemm.utils.open_device = lambda *_: device
gemm.main()
"""
    process = run("-c", code)
    assert process.stdout.endswith(
        "\nThis recipe needs wgmma, which only compute capability 9.0 has.\n"
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_kernel_that_does_not_compile(tmp_path: Path) -> None:
    script = copy_of(SCRIPT, tmp_path, ("const int first_tile = ", "const int first_tile := "))
    process = run(script)
    assert process.returncode == 1
    assert "first_tile := blockIdx.x" in process.stderr
    assert "detected in the compilation" in process.stderr
    assert "in compile_kernel" in process.stderr  # the traceback says where


def test_interrupt(tmp_path: Path) -> None:
    script = copy_of(
        SCRIPT,
        tmp_path,
        ("    device = utils.open", "    print('now', flush=True)\n    device = utils.open"),
    )
    with subprocess.Popen(
        [sys.executable, script], env=environment(), stdout=-1, stderr=-1, text=True
    ) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (-signal.SIGINT, "")  # a shell shows 130


def test_in_a_cuda_samples_tree(tmp_path: Path) -> None:
    """The helper is then two folders up, and the path may have spaces."""
    tree = tmp_path / "cuda samples"
    script = copy_of(SCRIPT, tree / "2_CoreConcepts" / "tmaTensorMap")
    (script.parent / "Utilities").rename(tree / "Utilities")
    process = run(script, "--help", cwd=tmp_path)
    assert process.stdout.startswith(USAGE)
