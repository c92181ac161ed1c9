# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Faults injected into the scripts are caught by their own checks, which name the place."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, SCRIPT, assert_fails, copy_of, run

SIZE = 16 * 512 + 128  # 16 full boxes, and a last one with one tile

COPY = "    *target = box[threadIdx.x];"
COORDINATES = "coordinates[2] = {0, first_tile}"
NO_WAIT = ("    while (!ptx::mbarrier_try_wait_parity(&barrier, 0)) {}\n", "")
OTHER_PARITY = ("try_wait_parity(&barrier, 0)", "try_wait_parity(&barrier, 1)")
RETARGET = "    tensor_map.replace_address(second)\n"
LAUNCH = "    with utils.finish_within(10):\n        launch_copy(kernel, tensor_map, output)\n"
FIRST, SECOND = '    verify("TMA copy"', '    verify("replace_address"'


class Fault(NamedTuple):
    change: tuple[str, str]
    message: str = "TMA copy: "


def differ(count: int, first: int, step: str = "TMA copy") -> str:
    return (
        f"tmaTensorMap.py: error: {step}: {count} of {SIZE} elements differ; the first is element"
        f" {first} (tile {first // 128}): expected bits 0x"
    )


FAULTS = {
    "the last tile is not copied": Fault(
        (COPY, "if (tile < tiles - 1)" + COPY), differ(128, SIZE - 128)
    ),
    "a tile is copied twice": Fault(
        (COPY, COPY.replace("]", " - (blockIdx.x == 0 && threadIdx.x / 32 == 1 ? 32 : 0)]")),
        differ(128, 128),
    ),
    "the boxes of two blocks are swapped": Fault(
        (COORDINATES, "coordinates[2] = {0, first_tile ^ (blockIdx.x < 2 ? TILES_PER_BOX : 0)}"),
        differ(1024, 0),
    ),
    "every tile comes from one further on": Fault(
        (COORDINATES, "coordinates[2] = {0, first_tile + 1}"), differ(SIZE, 0)
    ),
    "one bit of one element is wrong": Fault(
        (COPY, "if (blockIdx.x + threadIdx.x == 0) box[0].z = __int_as_float(3);\n" + COPY),
        differ(1, 2) + "00000002, found 0x00000003",
    ),
    "half of each tile is copied": Fault(
        (COPY, "if (threadIdx.x % 32 < 16)" + COPY), differ(SIZE // 2, 64)
    ),
    "a partly filled box is dropped": Fault(
        (COPY, "if (first_tile + TILES_PER_BOX <= tiles)" + COPY), differ(128, SIZE - 128)
    ),
    "the wait is missing": Fault(NO_WAIT),
    "the wait is for the other parity": Fault(OTHER_PARITY),
    "the kernel is not launched": Fault((LAUNCH + FIRST, FIRST), differ(SIZE - 1, 1)),
    "replace_address is not called": Fault((RETARGET, ""), differ(SIZE, 0, "replace_address")),
    "the second launch is missing": Fault(
        (LAUNCH + SECOND, SECOND), differ(SIZE, 0, "replace_address")
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(tmp_path: Path, name: str) -> None:
    process = run(copy_of(SCRIPT, tmp_path, FAULTS[name].change), "--elements", SIZE)
    assert_fails(process, FAULTS[name].message, " elements differ; the first is element ")


# Of each recipe: a missing wait, a wrong parity, too many expected bytes, a swapped coordinate;
# of some: a missing fence, a wrong place in both blocks.
RECIPE_FAULTS = {
    ("stencil", "wait"): NO_WAIT,
    ("stencil", "parity"): OTHER_PARITY,
    ("stencil", "bytes"): ("&barrier, sizeof(box));", "&barrier, sizeof(box) + 16);"),
    ("stencil", "coordinate"): (
        "{tile_column - 4, tile_row - 1}",
        "{tile_row / 4 * 4, tile_column - 1}",
    ),
    ("transpose", "wait"): NO_WAIT,
    ("transpose", "parity"): OTHER_PARITY,
    ("transpose", "bytes"): ("&barrier, sizeof(in));", "&barrier, sizeof(in) + 16);"),
    ("transpose", "coordinate"): ("{column + 32 * i, row}", "{row + 32 * i, column}"),
    ("transpose", "fence"): ("    ptx::fence_proxy_async(ptx::space_shared);\n", ""),
    ("gemm", "wait"): (
        "            while (!mbarrier_try_wait_parity(&full[step % 4], step / 4 % 2)) {}\n",
        "",
    ),
    ("gemm", "parity"): ("&full[step % 4], step / 4 % 2)", "&full[step % 4], step / 4 % 2 ^ 1)"),
    ("gemm", "bytes"): ("sizeof(stages[i]));", "sizeof(stages[i]) + 16);"),
    ("gemm", "coordinate"): ("a_at[2] = {k, row}", "a_at[2] = {row, k}"),
    ("gemm", "fence"): ("            fence_proxy_async(space_shared);", "            "),
    ("gemm", "multicast"): ("rank * 128], &b_map", "0], &b_map"),
}


def test_faults_can_be_injected(tmp_path: Path) -> None:
    """Without a GPU too: copy_of() fails if a text is no longer in its script."""
    for fault in FAULTS.values():
        copy_of(SCRIPT, tmp_path, fault.change)
    for (recipe, _), change in RECIPE_FAULTS.items():
        copy_of(ROOT / "recipes" / f"{recipe}.py", tmp_path, change)


@pytest.mark.gpu
@pytest.mark.parametrize(("recipe", "fault"), RECIPE_FAULTS)
def test_recipe_fault_is_caught(tmp_path: Path, recipe: str, fault: str) -> None:
    script = copy_of(ROOT / "recipes" / f"{recipe}.py", tmp_path, RECIPE_FAULTS[recipe, fault])
    process = run(script)
    assert process.returncode == 1, process
    assert "verified" not in process.stdout
    if fault == "bytes":
        assert process.stderr.startswith("Timeout (0:00:10)!\n")
    elif fault == "coordinate" or recipe != "gemm":
        assert_fails(process, " elements differ; ")
