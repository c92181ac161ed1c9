# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Where no kernel can run the sample still proves what it can, and says what is missing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    COMPILED,
    ROOT,
    SCRIPT,
    assert_as_usual,
    assert_fails,
    copy_sample,
    environment,
    plant,
    run,
    run_code,
    run_sample,
)

# Hardware and drivers that nobody here has, by stand-ins.
NO_DRIVER = """
import cuda.bindings.driver as driver
def no_library(flags):
    raise RuntimeError("libcuda.so.1 was not found")
driver.cuInit = no_library
"""


@pytest.mark.no_driver
def test_no_driver() -> None:
    process = run_sample()
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, "no NVIDIA driver was found: install one (CUDA 13.0 or newer)")


DRIVER = "import cuda.bindings.driver as driver\n"
STARTS = f"{DRIVER}driver.cuInit = lambda _: (driver.CUresult.CUDA_SUCCESS,)\n"


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (NO_DRIVER, "no NVIDIA driver was found"),
        (
            f"{STARTS}driver.cuDriverGetVersion = lambda: (driver.CUresult.CUDA_SUCCESS, 12040)",
            "the NVIDIA driver is too old: it supports CUDA 12.4, and 13.0 is needed",
        ),
        (
            f"{DRIVER}driver.cuInit = lambda _:"
            " (driver.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)",
            "the NVIDIA driver does not start (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)",
        ),
        (
            f"{DRIVER}driver.cuInit = lambda _: driver.CUresult(12345)",  # as of a newer driver
            "the NVIDIA driver does not start (12345 is not a valid CUresult)",
        ),
        (
            DRIVER + "driver.cuInit = lambda _: {}[12345]",  # likewise, cuda-bindings 13.0 and 13.1
            "the NVIDIA driver does not start (12345)",
        ),
        (
            f"{STARTS}driver.cuDriverGetVersion = lambda:"
            " (driver.CUresult.CUDA_ERROR_UNKNOWN, None)",
            "the NVIDIA driver does not start (CUDA_ERROR_UNKNOWN)",
        ),
        (
            f"{STARTS}driver.cuDriverGetVersion = lambda: (driver.CUresult.CUDA_SUCCESS, 13000)\n"
            "driver.cuDeviceGetCount = lambda: (driver.CUresult.CUDA_ERROR_UNKNOWN, None)",
            "the NVIDIA driver does not start (CUDA_ERROR_UNKNOWN)",
        ),
        (
            f"{STARTS}driver.cuDriverGetVersion = lambda: (driver.CUresult.CUDA_SUCCESS, 13000)\n"
            "driver.cuDeviceGetCount = lambda: (driver.CUresult.CUDA_SUCCESS, 0)",
            "the driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_unusable_driver(driver: str, message: str) -> None:
    process = run_code(driver)
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, message)


@pytest.mark.gpu
def test_no_visible_gpu() -> None:
    process = run_sample(env=environment(CUDA_VISIBLE_DEVICES=""))
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, "the driver shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")


def test_gpu_older_than_hopper() -> None:
    process = run_code("""
from types import SimpleNamespace
device = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
sample.utils.open_device = lambda *_: device
def compile_kernel(*_):
    raise AssertionError("nothing is to be compiled")
sample.compile_kernel = compile_kernel
""")
    assert process.stdout == (
        "Device: NVIDIA A100-SXM4-80GB\nCompute Capability: 8.0\n\n"
        "TMA needs compute capability 9.0 or higher (Hopper or later); this device has 8.0.\n"
    )
    assert process.stderr == ""
    assert process.returncode == 0


def test_kernel_that_does_not_compile(tmp_path: Path) -> None:
    script = plant(tmp_path, ("const int first_tile = ", "const int first_tile := "))
    process = run([sys.executable, script])
    assert process.returncode == 1
    assert process.stderr.startswith("tmaTensorMap.py: error: the compilation failed: ")
    assert "error: expected" in process.stderr
    assert "first_tile := blockIdx.x" in process.stderr
    assert re.search(r'\d+ errors? detected in the compilation of ".+"\.\n$', process.stderr)
    assert "\0" not in process.stderr
    assert "Traceback" not in process.stderr


def test_import_does_nothing() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tmaTensorMap;"
        "sys.exit(any(name.split('.')[0] in ('cupy', 'cuda', 'numpy') for name in sys.modules))"
    )
    process = run([sys.executable, "-c", code])
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_main_returns_its_status() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tmaTensorMap as sample\n"
    code += NO_DRIVER + "print('status', sample.main([]), 'and', sample.main([]))"
    process = run([sys.executable, "-c", code])
    assert process.stdout.endswith("\nstatus 1 and 1\n"), process


def test_main_in_a_thread() -> None:
    code = (
        f"import sys, threading; sys.path.insert(0, {str(ROOT)!r})\nimport tmaTensorMap as sample\n"
    )
    code += NO_DRIVER + "thread = threading.Thread(target=sample.main, args=([],))\n"
    process = run([sys.executable, "-c", code + "thread.start(); thread.join()"])
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, "no NVIDIA driver was found", status=0)


def test_fault_in_the_code_keeps_its_traceback() -> None:
    process = run_code("sample.utils.require_packages = lambda script: undefined_name")
    assert process.returncode == 1
    assert process.stderr.startswith("Traceback")
    assert "NameError" in process.stderr


def interrupt_when(marker: str, process: subprocess.Popen[str]) -> tuple[int, str]:
    """Send Ctrl-C once a line is printed on standard error, and return the status and the rest."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.strip() == marker:
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=20)
    return process.returncode, rest


@pytest.mark.parametrize("step", ["require_packages(__file__)", "open_device(arguments.device"])
def test_interrupt(tmp_path: Path, step: str) -> None:
    told = "(print('now', file=sys.stderr, flush=True), utils)[1]"
    script = plant(tmp_path, (f"utils.{step}", f"{told}.{step}"))
    with subprocess.Popen(
        [sys.executable, script], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert interrupt_when("now", process) == (130, "")


def test_interrupt_during_the_compilation(tmp_path: Path) -> None:
    told = "print('now', file=sys.stderr, flush=True)"
    script = plant(
        tmp_path,
        (
            "    with utils.compiler_errors():",
            f"    {told}\n" + "    with utils.compiler_errors():",
        ),
    )
    with subprocess.Popen(
        [sys.executable, script], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert interrupt_when("now", process) == (130, "")


def test_from_another_folder_with_spaces(tmp_path: Path) -> None:
    script = copy_sample(tmp_path / "a folder with spaces")
    code = f"import runpy, sys; sys.argv = sys.argv[1:]{NO_DRIVER}"
    process = run(
        [sys.executable, "-c", f"{code}runpy.run_path(sys.argv[0], run_name='__main__')", script],
        cwd=tmp_path,
    )
    assert COMPILED.fullmatch(process.stdout), process
    assert_fails(process, "no NVIDIA driver")


def test_in_a_cuda_samples_tree(tmp_path: Path) -> None:
    """The helper module is then at ../../Utilities."""
    tree = tmp_path / "python"
    sample = tree / "2_CoreConcepts" / "tmaTensorMap"
    copy_sample(sample)
    (sample / "Utilities").rename(tree / "Utilities")
    process = run([sys.executable, sample / SCRIPT.name, "--help"])
    assert process.returncode == 0
    process = run([sys.executable, sample / SCRIPT.name], cwd=tmp_path)
    assert_as_usual(process)
