# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests share: running the sample as a process, planting faults, finding the GPUs."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tmaTensorMap.py"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

# No run inherits these of the surroundings. COLUMNS would break argparse's lines.
STEERING = ("CUPY_", "CUDA_PYTHON_", "CUDA_HOME", "CUDA_PATH")
STEERING += ("PYTHONWARNINGS", "PYTHONOPTIMIZE", "COLUMNS")

COMPILED = re.compile(r"Kernel compiled for sm_90: a CUBIN of \d{4,} bytes. Nothing was run.\n")

# Pitfalls in README.md that several files show.
WRONG_BYTE_COUNT = "A wrong byte count hangs the kernel."
JAX_STREAM = "JAX arrays need a stream."
MISALIGNED_COORDINATE = "A misaligned coordinate is an illegal instruction."


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
    # A shell makes its background jobs ignore Ctrl-C, and the runs that are sent one inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "gpu(count=1): needs GPUs with TMA (Hopper or later)")
    config.addinivalue_line("markers", "pitfall(title): shows that a pitfall in README.md is real")
    config.addinivalue_line("markers", "no_driver: shows what happens where there is no driver")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    needed = marker.kwargs.get("count", 1) if marker else 0
    if hopper_gpus() < needed:
        pytest.skip(f"needs {needed} GPU(s) of compute capability 9.0, found {hopper_gpus()}")
    if item.get_closest_marker("no_driver") and driver_loads():
        pytest.skip("needs a machine without an NVIDIA driver")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    marker = item.get_closest_marker("pitfall")
    if marker and report.failed:
        report.sections.append(("README.md", f"Mend what Pitfalls says of: {marker.args[0]}"))
    return report


def environment(**changes: str | None) -> dict[str, str]:
    """Return the environment for a run; a change to None removes a variable."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(STEERING)}
    clean |= {k: v for k, v in changes.items() if v is not None}
    return {k: v for k, v in clean.items() if k not in changes or changes[k] is not None}


def run(
    command: Sequence[object], timeout: float = 60, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with both streams as text."""
    options = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run([str(part) for part in command], text=True, timeout=timeout, **options)


def run_sample(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, SCRIPT, *arguments], **options)


def run_code(code: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the sample after `code`, which may replace parts of it, as `sample`."""
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
        f"import tmaTensorMap as sample\n{code}\nsys.exit(sample.main(sys.argv[1:]))"
    )
    return run([sys.executable, "-c", program, *arguments], **options)


def copy_sample(folder: Path) -> Path:
    """Copy the script and its helper into a folder, and return the script there."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SCRIPT, folder)
    shutil.copytree(ROOT / "Utilities", folder / "Utilities", dirs_exist_ok=True)
    return folder / SCRIPT.name


def plant(folder: Path, *changes: tuple[str, str]) -> Path:
    """Copy the sample with texts replaced, each of which must stand in it exactly once."""
    script = copy_sample(folder)
    text = script.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"stands {text.count(old)} times in the sample: {old}"
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")
    return script


def assert_fails(
    process: subprocess.CompletedProcess[str], *parts: str, status: int = 1, lines: int = 1
) -> None:
    """Check the exit status, and that standard error is the one error line with these parts."""
    told = process.stderr.splitlines()
    assert process.returncode == status, process
    assert "Traceback" not in process.stdout + process.stderr, process
    assert len(told) == lines, process
    assert told[-1].startswith("tmaTensorMap.py: error: "), process
    for part in parts:
        assert part in told[-1], process


def verified(name: str, capability: str, elements: int = 1024) -> str:
    """Return the whole standard output of a successful run."""
    return (
        f"Device: {name}\nCompute Capability: {capability}\n\n"
        f"TMA copy verified: {elements} elements across {elements // 128} tiles\n"
        "replace_address verified: descriptor reused with new source tensor\n"
    )


def assert_verified(process: subprocess.CompletedProcess[str], elements: int = 1024) -> None:
    """Check for the exact output of a successful run on the first GPU, and silence otherwise."""
    from cuda.core import Device

    device = Device(0)
    capability = "{}.{}".format(*device.compute_capability)
    assert process.returncode == 0, process
    assert process.stderr == "", process
    assert process.stdout == verified(device.name, capability, elements), process


def assert_as_usual(process: subprocess.CompletedProcess[str]) -> None:
    """Check that the sample did what it does on this machine, whatever GPU and driver it has."""
    if hopper_gpus():
        assert_verified(process)
    elif process.returncode == 0:
        assert "TMA needs compute capability 9.0 or higher" in process.stdout
    else:
        assert COMPILED.fullmatch(process.stdout), process
        assert_fails(process, "driver")


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A copy of site-packages made of links, of which a test may take away and add.

    Use it with `python -S`, which leaves the real one out, and PYTHONPATH.
    """
    import numpy

    real = Path(numpy.__file__).parent.parent
    mirror = tmp_path / "site-packages"
    mirror.mkdir()
    for entry in real.iterdir():
        if entry.name != "cuda":
            (mirror / entry.name).symlink_to(entry)
    (mirror / "cuda").mkdir()  # a namespace: its parts come from several packages
    for entry in (real / "cuda").iterdir():
        (mirror / "cuda" / entry.name).symlink_to(entry)
    return mirror
