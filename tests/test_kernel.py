# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The kernel compiles, without a word from the compiler, to the instructions that it is about."""

from __future__ import annotations

import io
import re

import pytest

import tmaTensorMap as sample

ARCHITECTURES = ["sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cubin(arch: str) -> None:
    logs = io.StringIO()
    code = sample.compile_kernel(arch, logs=logs).code
    assert code.startswith(b"\x7fELF")
    assert b"tma_copy" in code
    assert logs.getvalue() == ""


def test_log_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an empty log would prove nothing."""
    unused = "const int unused = 1;\n    const int first_tile"
    source = sample.KERNEL_SOURCE.replace("const int first_tile", unused)
    monkeypatch.setattr(sample, "KERNEL_SOURCE", source)
    for target in ("cubin", "ptx"):
        logs = io.StringIO()
        sample.compile_kernel("sm_90", target, logs)
        assert 'variable "unused" was declared but never referenced' in logs.getvalue()


@pytest.fixture(scope="module")
def ptx() -> str:
    text = sample.compile_kernel("sm_90", target="ptx").code.decode()
    return text[text.index(".entry tma_copy(") :]


def test_descriptor_is_passed_by_value(ptx: str) -> None:
    parameters = ptx[: ptx.index(")")]
    assert re.search(r"\.param \.align (64|128) \.b8 tma_copy_param_0\[128\]", parameters)
    # Its address goes to the TMA unit as that of a parameter: there is no copy in local memory.
    assert ".local" not in ptx
    assert "st.param" not in ptx


def test_one_bulk_tensor_load_on_an_mbarrier(ptx: str) -> None:
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*", ptx)
    assert len(loads) == 1
    assert ".2d." in loads[0]
    assert loads[0].endswith(".mbarrier::complete_tx::bytes")
    assert "mbarrier.init.shared" in ptx
    assert "mbarrier.arrive.expect_tx" in ptx
    assert "mbarrier.try_wait.parity" in ptx


def test_order_of_the_steps(ptx: str) -> None:
    """No run shows that the fence is missing. The load comes before the block synchronises."""
    steps = ("mbarrier.init", "fence.mbarrier_init.release.cluster", "mbarrier.arrive.expect_tx")
    steps += ("cp.async.bulk.tensor", "bar.sync", "mbarrier.try_wait.parity")
    places = [ptx.index(step) for step in steps]
    assert places == sorted(places)


def test_numbers_given_to_the_barrier(ptx: str) -> None:
    """One arrival, all bytes of the box, and phase 0."""
    values = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", ptx))
    box_bytes = 4 * sample.TILES_PER_BOX * sample.TILE_ELEMENTS
    for instruction, number in (("init", 1), ("arrive.expect_tx", box_bytes), ("try_wait", 0)):
        operands = re.search(rf"mbarrier\.{re.escape(instruction)}\S*\s([^;]+);", ptx)[1]
        register = re.search(r"\], *(%r\d+)$", operands.strip())[1]
        assert values[register] == str(number), instruction


def test_shared_memory_is_aligned_for_tma(ptx: str) -> None:
    box_bytes = 4 * sample.TILES_PER_BOX * sample.TILE_ELEMENTS
    assert re.search(rf"\.shared \.align 128 \.b8 \w+box\[{box_bytes}\];", ptx)


def test_tile_size_comes_from_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "TILE_ELEMENTS", 64)
    ptx = sample.compile_kernel("sm_90", target="ptx").code.decode()
    assert f"box[{4 * sample.TILES_PER_BOX * 64}]" in ptx


def test_no_deprecated_name_and_no_handwritten_ptx() -> None:
    assert not re.search(r"\basm\b|experimental", sample.KERNEL_SOURCE)


def test_matrix_instructions_of_hopper_need_sm_90a(monkeypatch: pytest.MonkeyPatch) -> None:
    """As README.md says."""
    source = 'extern "C" __global__ void wgmma() { asm volatile("wgmma.fence.sync.aligned;"); }'
    monkeypatch.setattr(sample, "KERNEL_SOURCE", source)
    assert sample.compile_kernel("sm_90a").code
    with pytest.raises(sample.utils.SampleError, match="wgmma"):
        sample.compile_kernel("sm_90")


def test_unknown_architecture() -> None:
    for target in ("cubin", "ptx"):
        with pytest.raises(
            sample.utils.SampleError, match=r"invalid value.*sm_12345|INVALID_OPTION"
        ):
            sample.compile_kernel("sm_12345", target)
