# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""The recipes' functions, at sizes of one tile, of many, and with odd remainders."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import gemm
import numpy
import pytest
import stencil
import transpose
from conftest import RECIPES, ROOT, run

SIZES = [(32, 128), (1, 4), (33, 132), (31, 4), (1000, 1004), (4096, 4096)]
SHAPES = [(64, 64), (4, 4), (68, 132), (4, 8192), (8192, 4), (1000, 1004), (4096, 4096)]
PRODUCTS = [(128, 256, 64), (1, 8, 8), (129, 264, 72), (3000, 8, 520), (1, 4096, 1032)]
PRODUCTS += [(2048, 4096, 512), (1000, 1048, 1000)]


def integers(*shape: int) -> numpy.ndarray:
    """Return integers whose sums and products below are exact in float32."""
    return numpy.random.default_rng(shape[0]).integers(-8, 9, shape).astype(numpy.float32)


def bfloat16_bits(x: numpy.ndarray) -> numpy.ndarray:
    """Round float32 to the nearest bfloat16, ties to even, and return its bits."""
    bits = x.view(numpy.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)


def box_sum(x: numpy.ndarray) -> numpy.ndarray:
    padded, (rows, columns) = numpy.pad(x, 1), x.shape
    shifts = [(i, j) for i in range(3) for j in range(3)]
    return sum(padded[i : i + rows, j : j + columns] for i, j in shifts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_script(gpu: str, name: str) -> None:
    process = run("-W", "error", ROOT / "recipes" / f"{name}.py")
    assert (process.returncode, process.stderr) == (0, ""), process
    assert " verified: " in process.stdout.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_stencil(gpu: str, shape: tuple[int, int]) -> None:
    import cupy

    x = integers(*shape)
    assert numpy.array_equal(stencil.box_sum(cupy.array(x)).get(), box_sum(x))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transpose(gpu: str, shape: tuple[int, int]) -> None:
    import cupy

    x = numpy.arange(shape[0] * shape[1], dtype=numpy.uint32).reshape(shape)
    output = transpose.transpose(cupy.array(x).view(cupy.float32))
    assert numpy.array_equal(output.view(cupy.uint32).get(), x.T)


@pytest.mark.gpu
@pytest.mark.parametrize("sides", PRODUCTS, ids=str)
def test_gemm(gpu: str, sides: tuple[int, int, int]) -> None:
    import cupy

    m, n, k = sides
    a, b = integers(m, k), integers(n, k)
    c = gemm.matmul(*(cupy.array(bfloat16_bits(x)) for x in (a, b)))
    assert numpy.array_equal(c.get(), bfloat16_bits(a @ b.T))


CALLS = {
    "stencil": lambda x: stencil.box_sum(x),
    "transpose": lambda x: transpose.transpose(x),
    "gemm": lambda x: gemm.matmul(x.view("uint16"), x.view("uint16")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_current_stream(gpu: str, name: str) -> None:
    """Queued behind a long fill on CuPy's current stream, and before what follows there."""
    import cupy

    expected = CALLS[name](cupy.full((512, 512), 3, cupy.float32))
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        with stream:
            x = cupy.zeros((512, 512), cupy.float32)
            busy = cupy.zeros(2**28, cupy.float32)
            for _ in range(10):
                busy += 1
            x += 3
            assert (CALLS[name](x).view("uint16") == expected.view("uint16")).all()


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_tensors(gpu: str) -> None:
    import cupy
    import torch

    x = torch.randint(-8, 9, (136, 264), device="cuda")
    y = x.float()
    torch.cuda.synchronize()
    assert torch.equal(torch.from_dlpack(transpose.transpose(cupy.from_dlpack(y))), y.T)
    padded = torch.nn.functional.pad(y, (1, 1, 1, 1)).unfold(0, 3, 1).unfold(1, 3, 1)
    assert torch.equal(torch.from_dlpack(stencil.box_sum(cupy.from_dlpack(y))), padded.sum((2, 3)))
    bits = cupy.from_dlpack(x.bfloat16().view(torch.uint16))  # CuPy's DLPack has no bfloat16
    c = torch.from_dlpack(gemm.matmul(bits, bits)).view(torch.bfloat16)
    assert torch.equal(c, (x.double() @ x.double().T).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("module", [stencil, transpose, gemm], ids=lambda module: module.__name__)
def test_kernel_is_compiled_once(gpu: str, module: ModuleType) -> None:
    assert module.kernel_for(0) is module.kernel_for(0)


REFUSED = {
    "dtype": lambda zeros: zeros((64, 64), "float64"),
    "rank": lambda zeros: zeros((64,), "float32"),
    "empty": lambda zeros: zeros((0, 64), "float32"),
    "row length": lambda zeros: zeros((64, 65), "float32"),
    "transposed": lambda zeros: zeros((64, 128), "float32").T,
    "strided": lambda zeros: zeros((64, 128), "float32")[:, ::2],
    "pitch of one row": lambda zeros: zeros((10, 65), "float32")[:1, :64],
    "misaligned": lambda zeros: zeros(64 * 64 + 1, "float32")[1:].reshape(64, 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", CALLS)
def test_refused(gpu: str, name: str, case: str) -> None:
    import cupy

    def zeros(shape: tuple[int, ...], dtype: str) -> cupy.ndarray:
        if name == "gemm" and dtype == "float32":
            dtype = "uint16"
        return cupy.zeros(shape, dtype)

    x = REFUSED[case](zeros)
    call = {"stencil": stencil.box_sum, "transpose": transpose.transpose}.get(name)
    with pytest.raises(ValueError, match="^need "):
        call(x) if call else gemm.matmul(x, x)


@pytest.mark.gpu
def test_refused_shapes(gpu: str) -> None:
    import cupy

    with pytest.raises(ValueError, match="need a multiple of 4 rows"):
        transpose.transpose(cupy.zeros((66, 64), cupy.float32))
    a = cupy.zeros((64, 64), cupy.uint16)
    for b in (a[:, :32].copy(), a[:12]):
        with pytest.raises(ValueError, match=r"need \(M, K\) and \(N, K\), one dtype"):
            gemm.matmul(a, b)


@pytest.mark.gpu
def test_stencil_writes_nothing_past_the_end(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    x = cupy.zeros((33, 132), cupy.float32)
    memory = cupy.full(x.size + 8192, 7, cupy.float32)
    monkeypatch.setattr(cupy, "empty_like", lambda x: memory[: x.size].reshape(x.shape))
    stencil.box_sum(x)
    assert not memory[: x.size].any()
    assert (memory[x.size :] == 7).all()
