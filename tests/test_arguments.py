# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Arguments are judged first, and end in argparse's own form with status 2."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import SCRIPT, assert_fails, run, run_sample

USAGE = "usage: tmaTensorMap.py [-h] [--elements N] [--device N]"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--elements", "0"], ["0 is not a positive multiple of 128", "nearest: 128"]),
        (["--elements", "-256"], ["-256 is not a positive multiple of 128", "nearest: 128"]),
        (["--elements", "100"], ["nearest: 128"]),
        (["--elements", "1000"], ["nearest: 896 or 1024"]),
        (["--elements", "1e3"], ["argument --elements: invalid int value: '1e3'"]),
        (["--elements", ""], ["argument --elements: invalid int value: ''"]),
        (["--elements"], ["argument --elements: expected one argument"]),
        (["--device", "-1"], ["argument --device: -1 is negative, and ids start at 0"]),
        (["--device", "zero"], ["argument --device: invalid int value: 'zero'"]),
        (["--tiles", "8"], ["unrecognized arguments: --tiles 8"]),
    ],
)
def test_wrong_arguments(arguments: list[str], parts: list[str]) -> None:
    process = run_sample(*arguments)
    assert_fails(process, *parts, status=2, lines=2)
    assert process.stderr.splitlines()[0] == USAGE
    assert process.stdout == ""


def test_arguments_come_before_packages_and_the_helper(tmp_path: Path) -> None:
    # -S leaves out site-packages: no third-party package is there.
    assert_fails(run([sys.executable, "-S", SCRIPT, "--elements", "5"]), status=2, lines=2)
    alone = shutil.copy(SCRIPT, tmp_path)
    assert_fails(run([sys.executable, alone, "--elements", "5"]), status=2, lines=2)


def test_help_needs_no_package() -> None:
    process = run([sys.executable, "-S", "-OO", SCRIPT, "--help"])  # -OO: without docstrings
    assert process.returncode == 0
    assert process.stdout.startswith(USAGE)
    assert "a multiple of 128" in process.stdout
    assert process.stderr == ""


@pytest.mark.gpu
def test_device_that_is_not_there() -> None:
    process = run_sample("--device", "99")
    assert_fails(process, "there is no GPU 99; valid ids: 0", status=2, lines=2)
    assert process.stderr.splitlines()[0] == USAGE


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [2**37, 2**60, 128 * 10**30])
def test_more_elements_than_memory(elements: int) -> None:
    process = run_sample("--elements", elements)
    needed = -(-4 * (3 * elements + 2 * 32 * 1024) // 2**20)
    assert_fails(process, f"{needed:,} MiB of device memory are needed")
    assert re.search(r"needed, and [\d,]+ MiB of [\d,]+ MiB are free", process.stderr)
