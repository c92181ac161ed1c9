# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The kernels compile, with an empty log, to the instructions that they are about."""

from __future__ import annotations

import re

import gemm
import pytest
import stencil
import transpose
from conftest import compile_with_log

import tmaTensorMap as sample

ARCHITECTURES = ["sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"]
BOX_BYTES = sample.TILES_PER_BOX * sample.TILE_ELEMENTS * sample.DTYPE.itemsize
KERNELS = {
    "tma_copy": (sample.KERNEL, sample.MACROS),
    "box_sum": (stencil.KERNEL, stencil.MACROS),
    "transpose": (transpose.KERNEL, transpose.MACROS),
}
CASES = [(name, *kernel, arch) for name, kernel in KERNELS.items() for arch in ARCHITECTURES]
GEMM = ("gemm", gemm.KERNEL, gemm.MACROS, "sm_90a")
CASES.append(GEMM)


@pytest.mark.parametrize(("name", "source", "macros", "arch"), CASES)
def test_cubin_and_empty_log(name: str, source: str, macros: dict[str, int], arch: str) -> None:
    code, log = compile_with_log(source, macros, arch)
    assert code.startswith(b"\x7fELF")
    assert name.encode() in code
    assert log == ""


def test_log_is_seen() -> None:
    """Otherwise an empty log would prove nothing."""
    source = sample.KERNEL.replace("const int first_tile", "int unused;\n    const int first_tile")
    assert 'variable "unused" was declared' in compile_with_log(source, sample.MACROS, "sm_90")[1]


def ptx_of(source: str, macros: dict[str, int], arch: str) -> str:
    """Return a kernel's PTX. Program.compile("ptx") would ask the driver whether it can load it."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"", 0, [], [])
    options = [f"-arch={arch}".encode(), b"-std=c++17"]
    options += [f"-I{directory}".encode() for directory in sample.include_directories()]
    options += [f"-D{macro}={value}".encode() for macro, value in macros.items()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode()


@pytest.fixture(scope="module")
def ptx() -> str:
    text = ptx_of(sample.KERNEL, sample.MACROS, "sm_90")
    return text[text.index(".entry tma_copy(") :]


SETUP = ["mbarrier.init", "fence.mbarrier_init.release.cluster"]
LOAD = ["mbarrier.arrive.expect_tx", "cp.async.bulk.tensor.2d.shared"]
WAIT = ["mbarrier.try_wait.parity"]
STORE = ["cp.async.bulk.tensor.2d.global", "cp.async.bulk.commit_group"]
STORE += ["cp.async.bulk.wait_group.read"]
CLUSTER_SYNC = ["barrier.cluster.arrive", "barrier.cluster.wait"]
MULTIPLY = ["wgmma.fence", "wgmma.mma_async", "wgmma.wait_group", "mbarrier.arrive.shared::cluster"]


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (("box_sum", *KERNELS["box_sum"], "sm_90"), [*SETUP, *LOAD, "bar.sync", *WAIT]),
        (
            ("transpose", *KERNELS["transpose"], "sm_90"),
            [*SETUP, *LOAD, "bar.sync", *WAIT, "fence.proxy.async", "bar.sync", *STORE],
        ),
        (GEMM, [*SETUP, *CLUSTER_SYNC, *WAIT, *LOAD, "multicast::cluster"]),
        (
            GEMM,
            [*SETUP, *CLUSTER_SYNC, *WAIT, *MULTIPLY]
            + ["cp.async.bulk.wait_group.read", "bar.warp.sync", "fence.proxy.async"]
            + ["bar.warp.sync", *STORE, *CLUSTER_SYNC],
        ),
    ],
    ids=["stencil", "transpose", "gemm, loads", "gemm, sums"],
)
def test_order_of_the_recipes_steps(case: tuple, steps: list[str]) -> None:
    """No run shows some of the missing ones."""
    name, *kernel = case
    text = ptx_of(*kernel)
    place = text.index(f".entry {name}(")
    for step in steps:
        place = text.index(step, place) + 1
    alignment = {"box_sum": 128, "transpose": 1024, "gemm": 1024}[name]
    assert f".shared .align {alignment} .b8" in text


def test_tensor_map_is_passed_by_value(ptx: str) -> None:
    parameters = ptx[: ptx.index(")")]
    assert re.search(r"\.param \.align 128 \.b8 tma_copy_param_0\[128\]", parameters)
    # TMA gets the address of the parameter: no copy of it is in local memory.
    assert ".local" not in ptx
    assert "st.param" not in ptx


def test_the_steps(ptx: str) -> None:
    """No run shows that a fence or the loop around the wait is missing. bra: one thread sets up
    and loads, those past the end of the output skip the rest, and the others repeat the wait."""
    names = "prefetch|mbarrier|fence|cp.async|bar.|bra|ld.shared|st."
    found = re.findall(rf"^\s*(?:@!?%p\d+ )?((?:{names})\S*)", ptx, re.MULTILINE)
    steps = ["bra", "prefetch.tensormap", *SETUP, *LOAD, "bar.sync", "bra", *WAIT, "bra"]
    steps += ["ld.shared", "st.global"]
    assert len(found) == len(steps), found
    assert all(map(str.startswith, found, steps)), found


def test_numbers_given_to_the_mbarrier(ptx: str) -> None:
    """One arrival, all bytes of the box, and phase 0."""
    values = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    for instruction, number in (("init", 1), ("arrive.expect_tx", BOX_BYTES), ("try_wait", 0)):
        operands = re.search(rf"mbarrier\.{re.escape(instruction)}\S*\s([^;]+);", ptx)[1]
        register = re.search(r"\], *(%r\d+)$", operands.strip())[1]
        assert values[register] == str(number), instruction


def test_box_is_aligned_for_tma(ptx: str) -> None:
    assert re.search(rf"\.shared \.align 128 \.b8 \w+box\[{BOX_BYTES}\];", ptx)
