# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests share: running scripts as processes, injecting faults, and finding the GPUs."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tmaTensorMap.py"
RECIPES = ["stencil", "transpose", "gemm"]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes"), str(ROOT / "benchmarks")]

COMPILED = re.compile(r"Kernel compiled for sm_90a?: a CUBIN of \d{4,} bytes. Nothing was run.\n")


@functools.cache
def driver_loads() -> bool:
    from cuda.bindings import driver

    try:
        driver.cuInit(0)
    except RuntimeError:
        return False
    return True


@functools.cache
def hopper_gpus() -> int:
    """Return how many GPUs of compute capability 9.0 or higher there are."""
    from cuda.bindings import driver

    if not driver_loads() or driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
        return 0
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    devices = range(driver.cuDeviceGetCount()[1])
    return sum(driver.cuDeviceGetAttribute(major, device)[1] >= 9 for device in devices)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=1): needs GPUs with TMA (Hopper or later)")
    config.addinivalue_line("markers", "pitfall(title): shows that a pitfall in README.md is real")
    config.addinivalue_line("markers", "no_driver: shows what happens without a driver")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    needed = marker.kwargs.get("count", 1) if marker else 0
    if hopper_gpus() < needed:
        pytest.skip(f"needs {needed} GPU(s) of compute capability 9.0, found {hopper_gpus()}")
    if item.get_closest_marker("no_driver") and driver_loads():
        pytest.skip("needs a machine without an NVIDIA driver")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    marker = item.get_closest_marker("pitfall")
    if marker and report.failed:
        report.sections.append(("README.md", f"Correct this pitfall: {marker.args[0]}"))
    return report


def environment(**changes: str) -> dict[str, str]:
    """Return this environment without what steers CUDA, CuPy, or argparse, and with changes."""
    steering = ("CUPY_", "CUDA_LAUNCH", "CUDA_PYTHON", "PYTHONWARN", "PYTHONOPT", "COLUMNS")
    return {k: v for k, v in os.environ.items() if not k.startswith(steering)} | changes


def run(*command: object, timeout: float = 120, **options: object) -> subprocess.CompletedProcess:
    """Run a Python command line to its end, with both streams as text."""
    options = {"env": environment(), "capture_output": True, "text": True} | options
    return subprocess.run([sys.executable, *map(str, command)], timeout=timeout, **options)


def run_code(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    """Run main() of the sample after `code`, which may replace parts of it, as `sample`."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'tmaTensorMap.py'\n"
        f"import tmaTensorMap as sample\n{code}\nsample.main()"
    )
    return run("-c", code, *arguments, **options)


def copy_of(script: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """Copy the sample, its helper, and a script of the repository. Replace texts in the script."""
    shutil.copytree(ROOT / "Utilities", folder / "Utilities", dirs_exist_ok=True)
    shutil.copy(SCRIPT, folder)
    text = script.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{text.count(old)} times in {script.name}: {old}"
        text = text.replace(old, new)
    target = folder / script.relative_to(ROOT)
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def assert_fails(process: subprocess.CompletedProcess, *parts: str, status: int = 1) -> None:
    """Check the status, and that the last line of standard error is the error with these parts.

    It is the only line, but for argparse's usage above it.
    """
    lines = process.stderr.splitlines()
    assert process.returncode == status, process
    assert len(lines) == (2 if status == 2 else 1), process
    assert re.match(r"\w+\.py: error: ", lines[-1]), process
    for part in parts:
        assert part in lines[-1], process


def verified(name: str, capability: str, elements: int = 1024) -> str:
    """Return the whole standard output of a successful run."""
    return (
        f"Device: {name}\nCompute Capability: {capability}\n\n"
        f"TMA copy verified: {elements} elements across {elements // 128} tiles\n"
        "replace_address verified: descriptor reused with new source tensor\n"
    )


def assert_verified(process: subprocess.CompletedProcess, elements: int = 1024) -> None:
    """Check for the exact output of a successful run on the first GPU, and nothing else."""
    from cuda.core import Device

    major, minor = Device(0).compute_capability
    assert process.returncode == 0, process
    assert process.stderr == "", process
    assert process.stdout == verified(Device(0).name, f"{major}.{minor}", elements), process


def compile_with_log(source: str, macros: dict, arch: str) -> tuple[bytes, str]:
    """Compile as the sample does, and return the CUBIN and the compiler's log."""
    import tmaTensorMap as sample

    with contextlib.redirect_stderr(io.StringIO()) as log:
        code = sample.compile_kernel(arch, source, macros).code
    return code, log.getvalue()


@pytest.fixture
def gpu() -> Iterator[str]:
    """Make the first GPU current, and return its architecture. Its work is done at the end."""
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    yield f"sm_{device.arch}"
    device.sync()
