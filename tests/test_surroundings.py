# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Hostile surroundings end in the right result or in one line, with a GPU and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    SCRIPT,
    assert_as_usual,
    assert_fails,
    assert_verified,
    environment,
    hopper_gpus,
    run,
    run_code,
    run_sample,
)


@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": "/proc/no-home"},  # cannot be created, not even by root
        {"HOME": None},
        {"CUPY_CACHE_DIR": "/proc/no-cache"},
        {"LANG": "C", "LC_ALL": "C"},
        {"LANG": "C", "LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"},
        {"CUDA_HOME": "/nowhere"},
        {"CUDA_PATH": "/nowhere"},
        {"CUDA_HOME": "/nowhere", "CUDA_PATH": "/elsewhere"},
    ],
    ids=str,
)
def test_variables(variables: dict[str, str | None]) -> None:
    assert_as_usual(run_sample(env=environment(**variables)))


def test_two_toolkits_named_under_dash_w_error() -> None:
    variables = environment(CUDA_HOME="/nowhere", CUDA_PATH="/elsewhere")
    assert_as_usual(run([sys.executable, "-W", "error", SCRIPT], env=variables))


def test_toolkit_of_another_cuda(tmp_path: Path) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 12090\n")
    (include / "cuda.h").write_text("#define CUDA_VERSION 12090\n")
    variables = environment(CUDA_HOME=str(tmp_path), CUDA_PATH=str(tmp_path))
    assert_as_usual(run_sample(env=variables))


def test_a_home_that_cannot_be_written_stays_empty(tmp_path: Path) -> None:
    """Nor is anything left in the folder for temporary files."""
    home = tmp_path / "home"
    home.write_text("a file, where CuPy would make folders")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = environment(HOME=str(home), TMPDIR=str(temporary))
    assert_as_usual(run_sample(env=variables))
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [([], ""), ([], "1"), (["--help"], "")], ids=str
)
def test_full_disk(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        process = run_sample(*arguments, stdout=full, env=environment(PYTHONUNBUFFERED=unbuffered))
    assert process.returncode == 1, process
    told = process.stderr.splitlines()
    assert len(told) == 1, process
    assert told[0].startswith("tmaTensorMap.py: error: [Errno 28] No space left on device")


def test_output_closed_early() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = run_sample(stdout=writing)
    os.close(writing)
    assert process.returncode == 1, process
    assert process.stderr == "tmaTensorMap.py: error: standard output was closed early\n"


def test_output_closed_from_the_start() -> None:
    process = run(["sh", "-c", 'exec "$0" "$1" >&-', sys.executable, SCRIPT])
    assert_fails(process, "standard output is closed: nothing could be printed")


def test_no_standard_error() -> None:
    process = run(["sh", "-c", 'exec "$0" "$1" 2>&-', sys.executable, SCRIPT])
    assert process.returncode in ((0,) if hopper_gpus() else (0, 1))
    assert "error" not in process.stdout


@pytest.mark.gpu
def test_another_process_holds_the_memory() -> None:
    """All but 2 GiB of it: too little for three arrays of 1 GiB."""
    hog = """
import sys, cupy
free, _ = cupy.cuda.runtime.memGetInfo()
held = cupy.cuda.alloc(free - 2 * 2**30)
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            assert_verified(run_sample())
            assert_fails(run_sample("--elements", 2**28), "3,073 MiB of device memory are needed")
        finally:
            process.stdin.close()


@pytest.mark.gpu
def test_memory_taken_after_it_was_counted() -> None:
    """Another process may be faster: then the allocation itself fails."""
    process = run_code(
        "sample.utils.require_device_memory = lambda needed: None", "--elements", 2**38
    )
    assert_fails(process, "out of memory: Out of memory allocating")
