# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Each fault planted into the kernel or the host's steps is caught, and its place named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import WRONG_BYTE_COUNT, assert_fails, plant, run

import tmaTensorMap as sample

TILE, BOX = sample.TILE_ELEMENTS, sample.TILE_ELEMENTS * sample.TILES_PER_BOX
ONE_BLOCK, MANY_BLOCKS, WITH_REST = BOX, 16 * BOX, 16 * BOX + TILE
ALL = (ONE_BLOCK, MANY_BLOCKS, WITH_REST)

# What the faults change. Each text stands once in the sample.
BYTES = "barrier_arrive_tx(barrier, 1, sizeof(box))"
COORDINATES = "coordinates[2] = {0, first_tile}"
BOUND = "    if (tile < tiles) {"
TARGET = "output[size_t{blockIdx.x} * blockDim.x + threadIdx.x]"
SOURCE = "(box)[threadIdx.x]"
DESCRIPTOR = "            tensor_map = build_tensor_map(first)\n"
RETARGET = "            tensor_map.replace_address(second)\n"
POISON = "            fill(guarded_output, POISON_PATTERN)\n"
LAUNCH = """            launch_copy(stream, kernel, tensor_map, output)
            utils.wait(stream, DEADLINE_SECONDS, HANG_CAUSE)
"""
FIRST_CHECK = '            check_copy("TMA copy", '
SECOND_CHECK = '            check_copy("replace_address", '


def after_the_load(statement: str) -> tuple[str, str]:
    return BOUND, f"    {statement}\n    __syncthreads();\n{BOUND}"


def last_block(size: int) -> int:
    """Return the first element of the last block."""
    return (size - 1) // BOX * BOX


class Fault(NamedTuple):
    change: tuple[str, str]
    first: Callable[[int], int]  # the first wrong element, by size
    count: Callable[[int], int]  # how many elements of the output are wrong, by size
    sizes: tuple[int, ...] = ALL  # where it changes the result
    overrun: int = 0  # how many elements past the ends of the output are written
    step: str = "TMA copy"


FAULTS = {
    "the last tile is never copied": Fault(
        (BOUND, BOUND.replace("< tiles", "< tiles - 1")), lambda n: n - TILE, lambda n: TILE
    ),
    "one tile is copied twice": Fault(
        (SOURCE, "(box)[threadIdx.x - (blockIdx.x == 0 && threadIdx.x / 32 == 1 ? 32 : 0)]"),
        lambda n: TILE,
        lambda n: TILE,
    ),
    "two tiles are swapped": Fault(
        (SOURCE, "(box)[threadIdx.x ^ (blockIdx.x == 0 && threadIdx.x < 64 ? 32 : 0)]"),
        lambda n: 0,
        lambda n: 2 * TILE,
    ),
    "the boxes of two blocks are swapped": Fault(
        (COORDINATES, "coordinates[2] = {0, first_tile ^ (blockIdx.x < 2 ? TILES_PER_BOX : 0)}"),
        lambda n: 0,
        lambda n: 2 * BOX,
        sizes=(MANY_BLOCKS, WITH_REST),
    ),
    "every tile lands one further on": Fault(
        (TARGET, TARGET.replace("threadIdx", "TILE_ELEMENTS / 4 + threadIdx")),
        lambda n: 0,
        lambda n: n,
        overrun=TILE,
    ),
    "every tile comes from one further on": Fault(
        (COORDINATES, "coordinates[2] = {0, first_tile + 1}"), lambda n: 0, lambda n: n
    ),
    "one element of one tile is wrong": Fault(
        after_the_load("if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) box[5] = 1.0f;"),
        lambda n: last_block(n) + 5,
        lambda n: 1,
    ),
    "one bit of one element is wrong": Fault(
        after_the_load("if (blockIdx.x + threadIdx.x == 0) reinterpret_cast<int*>(box)[77] ^= 1;"),
        lambda n: 77,
        lambda n: 1,
    ),
    "half of each tile is copied": Fault(
        (BOUND, BOUND.replace(") {", " && threadIdx.x % 32 < 16) {")),
        lambda n: TILE // 2,
        lambda n: n // 2,
    ),
    "the last, partly filled block is dropped": Fault(
        (BOUND, BOUND.replace("if (", "if (first_tile + TILES_PER_BOX <= tiles && ")),
        last_block,
        lambda n: TILE,
        sizes=(WITH_REST,),
    ),
    "only the first block works": Fault(
        (BOUND, BOUND.replace("if (", "if (blockIdx.x == 0 && ")),
        lambda n: BOX,
        lambda n: n - BOX,
        sizes=(MANY_BLOCKS, WITH_REST),
    ),
    "the last block is not held back": Fault(
        (BOUND, BOUND.replace("< tiles", "< tiles + TILES_PER_BOX")),
        lambda n: n,
        lambda n: 0,
        sizes=(WITH_REST,),
        overrun=BOX - TILE,
    ),
    "a write past the end of the output": Fault(
        after_the_load("if (threadIdx.x == 0) output[size_t{tiles} * 32] = float4{};"),
        lambda n: n,
        lambda n: 0,
        overrun=4,
    ),
    "a write before the start of the output": Fault(
        after_the_load("if (threadIdx.x == 0) output[-1] = float4{};"),
        lambda n: -4,
        lambda n: 0,
        overrun=4,
    ),
    "the kernel is not launched": Fault(
        (LAUNCH + FIRST_CHECK, FIRST_CHECK), lambda n: 0, lambda n: n
    ),
    "the source is modified before the launch": Fault(
        (DESCRIPTOR, DESCRIPTOR + "            first[300] = 1\n"), lambda n: 300, lambda n: 1
    ),
    "replace_address is not called": Fault(
        (RETARGET, ""), lambda n: 0, lambda n: n, step="replace_address"
    ),
    "replace_address gets the first source again": Fault(
        (RETARGET, RETARGET.replace("second", "first")),
        lambda n: 0,
        lambda n: n,
        step="replace_address",
    ),
    "the second launch is left out": Fault(
        (LAUNCH + SECOND_CHECK, SECOND_CHECK), lambda n: 0, lambda n: n, step="replace_address"
    ),
    "the second launch and the poisoning are left out": Fault(
        (POISON + LAUNCH + SECOND_CHECK, SECOND_CHECK),
        lambda n: 0,
        lambda n: n,
        step="replace_address",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted(tmp_path: Path, name: str) -> None:
    """Also where no GPU shows it: a text that no longer stands in the sample plants nothing."""
    plant(tmp_path, FAULTS[name].change)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, fault in FAULTS.items() for size in fault.sizes]
)
def test_fault_is_caught(tmp_path: Path, name: str, size: int) -> None:
    fault = FAULTS[name]
    script = plant(tmp_path, fault.change)
    process = run([sys.executable, script, "--elements", size])
    first = fault.first(size)
    problems = [f"{fault.count(size)} of {size} elements differ"] if fault.count(size) else []
    if fault.overrun:
        problems.append(f"{fault.overrun} elements were written past the ends of the output")
    assert_fails(
        process,
        f": error: {fault.step}: {' and '.join(problems)}"
        f"; the first is element {first} (tile {first // TILE}): expected bits 0x",
    )
    found = r"0x[0-9a-f]{8}, found 0x[0-9a-f]{8}( \(poison: never written\))?\n$"
    assert re.search(found, process.stderr)
    assert ("TMA copy verified" in process.stdout) == (fault.step != "TMA copy")
    assert "replace_address verified" not in process.stdout


@pytest.mark.gpu
@pytest.mark.pitfall(WRONG_BYTE_COUNT)
@pytest.mark.parametrize("size", ALL)
@pytest.mark.parametrize("bytes_more", ["+ 16", "- 16"])
def test_wrong_byte_count_ends_by_itself(tmp_path: Path, bytes_more: str, size: int) -> None:
    """Too many never come; with too few, the count of those to come never is 0 when looked at."""
    script = plant(
        tmp_path,
        (BYTES, BYTES.replace("sizeof(box)", f"sizeof(box) {bytes_more}")),
        ("DEADLINE_SECONDS = 10 ", "DEADLINE_SECONDS = 2 "),  # test_gpu.py has one at full length
    )
    process = run([sys.executable, script, "--elements", size])
    assert_fails(process, "the kernel did not finish within 2 s: the classic cause is a byte count")
    assert "verified" not in process.stdout
