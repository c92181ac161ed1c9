# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks end in one line where they cannot run, and verify what they time."""

from __future__ import annotations

import importlib.util
import re

import pytest
from conftest import ROOT, assert_fails, compile_with_log, run

import tmaTensorMap as sample

SCRIPT = ROOT / "benchmarks" / "measure.py"
# README.md in benchmarks/ has this command.
QUICK = ["-b", "copies", "--device", "0", "--axis", "Bytes=[1048576,1073741824]"]
QUICK += ["--timeout", "0.3"]
HAS_NVBENCH = importlib.util.find_spec("cuda.bench") is not None
needs_nvbench = pytest.mark.skipif(not HAS_NVBENCH, reason="cuda-bench is not installed")


@pytest.mark.skipif(HAS_NVBENCH, reason="cuda-bench is installed")
def test_without_nvbench() -> None:
    process = run(SCRIPT)
    install = f'pip install -r "{ROOT}/benchmarks/requirements.txt"'
    assert_fails(process, "cannot import name 'bench'", install)


@needs_nvbench
@pytest.mark.no_driver
def test_without_gpu() -> None:
    assert_fails(run(SCRIPT), "measure.py: error: ")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_kernels_without_tma_compile(arch: str) -> None:
    source = (ROOT / "benchmarks" / "without_tma.cu").read_text()
    assert compile_with_log(source, sample.MACROS, arch)[1] == ""


@needs_nvbench
@pytest.mark.gpu
def test_quick() -> None:
    command = " ".join(QUICK).replace(QUICK[5], f'"{QUICK[5]}"')
    assert f"measure.py {command}\n" in (SCRIPT.parent / "README.md").read_text(encoding="utf-8")
    process = run(SCRIPT, *QUICK)
    assert process.returncode == 0, process
    for name in ("this sample", "cudaMemcpyAsync", "one tile per block", "plain loads"):
        assert len(re.findall(rf"^\| +{name} \|", process.stdout, re.MULTILINE)) == 2, process


@needs_nvbench
@pytest.mark.gpu
def test_wrong_copy_is_not_timed() -> None:
    code = f"""
import sys; sys.path[:0] = [{str(SCRIPT.parent)!r}]
import measure
measure.sample.launch_copy = lambda *arguments: None
sys.argv = ["measure.py", *{QUICK!r}, "--axis", "Copy=[this sample,cudaMemcpyAsync]"]
measure.main()
"""
    process = run("-c", code)
    assert process.returncode == 1, process
    assert "copies, this sample, 1048576: the result is wrong" in process.stdout
    timed = re.findall(r"^\| +(\S.*?) +\|", process.stdout, re.MULTILINE)[1:]  # below the head
    assert timed == ["cudaMemcpyAsync"] * 2, process
