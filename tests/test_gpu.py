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
    MISALIGNED_COORDINATE,
    ROOT,
    SCRIPT,
    WRONG_BYTE_COUNT,
    assert_fails,
    assert_verified,
    copy_sample,
    environment,
    plant,
    run,
    run_code,
    run_sample,
)

import tmaTensorMap as sample

pytestmark = pytest.mark.gpu
BOX = sample.TILE_ELEMENTS * sample.TILES_PER_BOX


def test_default() -> None:
    assert_verified(run_sample())


@pytest.mark.parametrize(
    "elements", [128, 256, BOX, BOX + 128, 1152, 8192, 2**20, 2**20 + 384, 10**6 * 128]
)
def test_elements(elements: int) -> None:
    assert_verified(run_sample("--elements", elements), elements)


@pytest.mark.parametrize("elements", [2**31 + 128, 2**32, 2**32 + 640])
def test_more_elements_than_32_bits_count(elements: int) -> None:
    """More than 2^31 elements, where a signed 32-bit coordinate ends, and 2^32."""
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 13 * elements:
        pytest.skip(f"needs {13 * elements // 2**30} GiB of device memory")
    assert_verified(run_sample("--elements", elements, timeout=120), elements)


@pytest.mark.parametrize("option", [["-OO"], ["-W", "error"], ["-I"]])
def test_interpreter_options(option: list[str]) -> None:
    assert_verified(run([sys.executable, *option, SCRIPT]))


# The second launch is queued while its source still is filled for long, with wrong values at
# first. (Not the first launch: the driver loads the kernel for it, and waits for the GPU then.)
RETARGET = "            tensor_map.replace_address(second)\n"
SLOW_FILL = (
    RETARGET,
    f"""{RETARGET}
            for _ in range(500):
                fill(second, 1)
            fill(second, SECOND_PATTERN)
""",
)


@pytest.mark.parametrize(
    "variable",
    ["CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"],
)
def test_per_thread_default_stream(tmp_path: Path, variable: str) -> None:
    script = plant(tmp_path, SLOW_FILL)
    process = run([sys.executable, script, "--elements", 2**26], env=environment(**{variable: "1"}))
    assert_verified(process, 2**26)


def test_launch_waits_for_the_fill(tmp_path: Path) -> None:
    script = plant(tmp_path, SLOW_FILL)
    assert_verified(run([sys.executable, script, "--elements", 2**26]), 2**26)
    # On another stream it would not: this shows that the runs above prove something.
    other = ("Stream.from_handle(cupy_stream.ptr)", "device.default_stream")
    process = run([sys.executable, plant(tmp_path, SLOW_FILL, other), "--elements", 2**26])
    assert_fails(process, "replace_address: ", " elements differ")


def test_from_another_folder_and_a_path_with_spaces(tmp_path: Path) -> None:
    script = copy_sample(tmp_path / "a folder with spaces")
    assert_verified(run([sys.executable, script], cwd=tmp_path))


def test_python_dash_o_still_checks(tmp_path: Path) -> None:
    script = plant(tmp_path, ("fill(first, FIRST_PATTERN)", "fill(first, 1)"))
    assert_fails(run([sys.executable, "-O", script]), "TMA copy: 1024 of 1024 elements differ")


def test_main_leaves_the_process_usable() -> None:
    """main() can be called again, and CuPy's stream is again what it was before."""
    process = run_code(
        "import cupy\nbefore = cupy.cuda.get_current_stream()\n"
        "for n in ('256', '1152'):\n    assert sample.main(['--elements', n]) == 0\n"
        "assert cupy.cuda.get_current_stream() == before"
    )
    assert process.returncode == 0, process
    assert process.stdout.count("replace_address verified") == 3


def test_device_memory_for_arrays_is_bounded() -> None:
    """At most three arrays, one byte an element and 1 MiB."""
    elements = 2**24
    process = run_code(
        "import atexit, os\n"
        "def tell():\n"
        "    import cupy\n"
        "    print(cupy.get_default_memory_pool().total_bytes())\n"
        "atexit.register(tell)",
        "--elements",
        elements,
    )
    assert process.returncode == 0, process
    peak = int(process.stdout.splitlines()[-1])  # the pool gives nothing back
    assert 3 * 4 * elements < peak <= (3 * 4 + 1) * elements + 2**20


@pytest.mark.pitfall(MISALIGNED_COORDINATE)
def test_kernel_that_faults(tmp_path: Path) -> None:
    """A CUDA error is one line, although it breaks the context for all that follows."""
    script = plant(
        tmp_path, ("coordinates[2] = {0, first_tile}", "coordinates[2] = {1, first_tile}")
    )
    assert_fails(run([sys.executable, script]), "CUDA: CUDA_ERROR_ILLEGAL_INSTRUCTION")


HANG = (
    "barrier_arrive_tx(barrier, 1, sizeof(box))",
    "barrier_arrive_tx(barrier, 1, sizeof(box) + 16)",
)


@pytest.mark.pitfall(WRONG_BYTE_COUNT)
@pytest.mark.parametrize("variables", [{}, {"CUDA_LAUNCH_BLOCKING": "1"}], ids=str)
def test_kernel_that_hangs(tmp_path: Path, variables: dict[str, str]) -> None:
    process = run(
        [sys.executable, plant(tmp_path, HANG)],
        timeout=sample.DEADLINE_SECONDS + 30,
        env=environment(**variables),
    )
    assert_fails(
        process,
        f"the kernel did not finish within {sample.DEADLINE_SECONDS} s",
        "a byte count given to barrier_arrive_tx that is not what the load brings",
    )
    assert re.search(r"Compute Capability: \d+\.\d\n", process.stdout)  # what was told is not lost
    assert_verified(run_sample())  # the GPU is well


def test_interrupt_while_a_kernel_hangs(tmp_path: Path) -> None:
    waiting = "    while not done.is_done:"
    script = plant(tmp_path, HANG)
    helper = script.parent / "Utilities" / "cuda_samples_utils.py"
    text = helper.read_text()
    assert text.count(waiting) == 1
    helper.write_text(
        text.replace(waiting, f"    print('now', file=sys.stderr, flush=True)\n{waiting}")
    )
    with subprocess.Popen(
        [sys.executable, script], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr.readline() == "now\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=5)[1] == ""
            assert process.returncode == 130
        finally:
            process.kill()


@pytest.mark.gpu(count=2)
def test_second_gpu() -> None:
    """It is used and named, and the first one is left alone."""
    process = run_code(
        "import atexit\n"
        "def tell():\n"
        "    from cuda.bindings import driver\n"
        "    print([driver.cuDevicePrimaryCtxGetState(i)[2] for i in (0, 1)])\n"
        "atexit.register(tell)",
        "--device",
        1,
        "--elements",
        8320,
    )
    from cuda.core import Device

    assert process.returncode == 0, process
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    assert lines[0] == f"Device: {Device(1).name}"
    assert lines[3] == "TMA copy verified: 8320 elements across 65 tiles"
    assert lines[5] == "[0, 1]", "device 0's primary context is active"


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    process = run(
        [*command, sys.executable, ROOT / "tmaTensorMap.py", "--elements", 8320], timeout=300
    )
    assert process.returncode == 0, process
    assert "replace_address verified" in process.stdout
    assert re.search(r"SUMMARY: 0 (errors|hazards)", process.stdout), process
