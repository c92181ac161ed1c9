# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The sample as its users run it, on a GPU."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import (
    RECIPES,
    ROOT,
    SCRIPT,
    assert_fails,
    assert_verified,
    copy_of,
    environment,
    run,
    run_code,
)

import tmaTensorMap as sample

pytestmark = pytest.mark.gpu

WRONG_BYTES = pytest.mark.pitfall("Wrong expected bytes are undefined behavior.")
MISALIGNED = pytest.mark.pitfall("A misaligned coordinate is an illegal instruction.")
HANG = ("&barrier, sizeof(box))", "&barrier, sizeof(box) + 16)")


@pytest.mark.parametrize("elements", [1024, 128, 512, 640, 8192, 2**20 + 384, 128 * 10**6])
def test_elements(elements: int) -> None:
    assert_verified(run(SCRIPT, "--elements", elements), elements)


@pytest.mark.parametrize("elements", [2**31 + 128, 2**32, 2**32 + 640])
def test_more_elements_than_32_bits_count(elements: int) -> None:
    assert_verified(run(SCRIPT, "--elements", elements), elements)


@pytest.mark.parametrize("option", [["-O"], ["-OO"], ["-W", "error"], ["-I"]], ids=str)
def test_interpreter_options(option: list[str]) -> None:
    assert_verified(run(*option, SCRIPT))


def test_check_does_not_rest_on_assert(tmp_path: Path) -> None:
    script = copy_of(SCRIPT, tmp_path, ("    fill(False, first", "    fill(True, first"))
    assert_fails(run("-O", script), "TMA copy: 1024 of 1024 elements differ")


def test_float16_is_one_line(tmp_path: Path) -> None:
    script = copy_of(SCRIPT, tmp_path, ('numpy.dtype("float32")', 'numpy.dtype("float16")'))
    assert_verified(run(script, "--elements", 8320), 8320)


# The second source is refilled for long, with wrong values at first, right before its launch.
RETARGET = "    tensor_map.replace_address(second)\n"
SLOW_FILL = (
    RETARGET,
    f"""{RETARGET}
    refill = cupy.ElementwiseKernel("T x", "T bits", "bits = ~i ^ x", "refill")
    for x in [1] * 500 + [0]:
        refill(numpy.uint32(x), second.view(BITS))
""",
)


@pytest.mark.parametrize("variables", [{}, {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}], ids=str)
def test_launch_waits_for_cupy(tmp_path: Path, variables: dict[str, str]) -> None:
    script = copy_of(SCRIPT, tmp_path, SLOW_FILL)
    assert_verified(run(script, "--elements", 2**26, env=environment(**variables)), 2**26)


def test_launch_on_another_stream_does_not_wait(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    other = (
        "Stream.from_handle(cupy.cuda.get_current_stream().ptr)",
        "core.Device().create_stream()",
    )
    process = run(copy_of(SCRIPT, tmp_path, SLOW_FILL, other), "--elements", 2**26)
    assert_fails(process, " elements differ")


def test_device_that_is_not_there() -> None:
    assert_fails(run(SCRIPT, "--device", 99), "argument --device: ", "99", "[0, ", status=2)


def test_no_visible_gpu() -> None:
    process = run(SCRIPT, env=environment(CUDA_VISIBLE_DEVICES=""))
    assert process.stdout.startswith("Kernel compiled for sm_90: a CUBIN of ")
    assert_fails(process, "CUDA_ERROR_NO_DEVICE: no usable GPU")


def test_too_little_device_memory() -> None:
    process = run(SCRIPT, "--elements", 2**38 - 128)
    assert_fails(process, "Out of memory allocating 1,099,511,627,264 bytes", "fewer --elements")


@pytest.mark.parametrize("elements", [128, 640, 2**20 + 128])
def test_nothing_is_written_past_the_output(gpu: str, elements: int) -> None:
    """Into the middle of a larger buffer, whose other elements must keep their poison."""
    assert overrun(gpu, sample.KERNEL, elements) == 0
    # And an overrun is seen: a kernel without the bound writes whole boxes.
    unbounded = sample.KERNEL.replace("if (tile >= tiles) return;", "")
    assert overrun(gpu, unbounded, elements) == -elements % 512


def overrun(arch: str, source: str, elements: int) -> int:
    import cupy

    kernel = sample.compile_kernel(arch, source).get_kernel("tma_copy")
    buffer = cupy.full(elements + 4096, 7, cupy.float32)
    tensor_map = sample.build_tensor_map(cupy.zeros(elements, cupy.float32))
    sample.launch_copy(kernel, tensor_map, buffer[2048:-2048])
    assert not buffer[2048:-2048].any()
    return int((buffer[:2048] != 7).sum() + (buffer[-2048:] != 7).sum())


@MISALIGNED
def test_kernel_that_faults(tmp_path: Path) -> None:
    """As observed on an H200 with driver 580. The traceback names the line."""
    process = run(copy_of(SCRIPT, tmp_path, ("{0, first_tile}", "{1, first_tile}")))
    assert process.returncode == 1
    assert "cudaErrorIllegalInstruction" in process.stderr
    assert (
        "launch_copy(kernel, tensor_map, output)" in process.stderr
        or "finish_within" in process.stderr
    )


@WRONG_BYTES
@pytest.mark.parametrize("variables", [{}, {"CUDA_LAUNCH_BLOCKING": "1"}], ids=str)
def test_kernel_that_hangs(tmp_path: Path, variables: dict[str, str]) -> None:
    process = run(copy_of(SCRIPT, tmp_path, HANG), env=environment(**variables))
    assert process.returncode == 1
    assert process.stderr.startswith("Timeout (0:00:10)!\n")
    assert "in main\n" in process.stderr  # where it waits
    assert re.search(r"Compute Capability: \d+\.\d\n", process.stdout)  # what was printed is kept
    assert_verified(run(SCRIPT))  # the GPU is well


def test_interrupt_while_a_kernel_hangs(tmp_path: Path) -> None:
    script = copy_of(SCRIPT, tmp_path, HANG)
    with subprocess.Popen(
        [sys.executable, script], env=environment(), stdout=-1, stderr=-1
    ) as process:
        assert process.stdout.readline().startswith(b"Device: ")  # flushed before the launch
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
        assert (process.returncode, errors) == (-signal.SIGINT, b"")  # a shell shows 130


@pytest.mark.gpu(count=2)
def test_second_gpu() -> None:
    """It is used and named, and the first one is left alone."""
    process = run_code(
        "import atexit\nfrom cuda.bindings import driver\natexit.register(lambda: print("
        "[driver.cuDevicePrimaryCtxGetState(i)[2] for i in (0, 1)]))",
        *("--device", 1, "--elements", 8320),
    )
    from cuda.core import Device

    assert process.returncode == 0, process
    lines = process.stdout.splitlines()
    assert lines[0] == f"Device: {Device(1).name}"
    assert lines[3] == "TMA copy verified: 8320 elements across 65 tiles"
    assert lines[5] == "[0, 1]", "device 0's primary context is active"


# initcheck itself hangs where a kernel stores through TMA (compute-sanitizer 2025.3, driver 580).
TOOLS = ["memcheck", "racecheck", "synccheck", "initcheck"]
HANGS = {("initcheck", "transpose"), ("initcheck", "gemm")}
SCRIPTS = [(SCRIPT, "--elements", 8320), *((ROOT / "recipes" / f"{name}.py",) for name in RECIPES)]


@pytest.mark.parametrize(
    ("tool", "command"),
    [(tool, s) for s in SCRIPTS for tool in TOOLS if (tool, s[0].stem) not in HANGS],
    ids=str,
)
def test_compute_sanitizer(tool: str, command: tuple[object, ...]) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not installed")
    process = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, *map(str, command)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process
    assert "verified" in process.stdout
    assert re.search(r"SUMMARY: 0 (errors|hazards)", process.stdout), process
