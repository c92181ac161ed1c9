# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""Tensor maps of arrays from other packages than CuPy, also through replace_address()."""

from __future__ import annotations

import importlib.util

import pytest
from conftest import ROOT, environment, run

JAX_STREAM = "JAX arrays need a stream."

# Copies two arrays, the second through replace_address(), and compares them bit for bit. (The sum
# of a large int and a float32 array is float64 where CuPy 13 meets NumPy 2: hence the ranges.)
COPY = """
import sys
sys.path.insert(0, {root!r})
import tmaTensorMap as sample
import cupy
from cuda.core import Device, Stream
from cuda.core.utils import StridedMemoryView
{make}
device = Device(0)
device.set_current()
kernel = sample.compile_kernel(f"sm_{{device.arch}}").get_kernel("tma_copy")
rows = 65
box = (sample.TILES_PER_BOX, sample.TILE_ELEMENTS)
# What another package still does on its own stream is done before the launch.
first, second = make(0, rows), make(1_000_000, rows)
device.sync()
view = StridedMemoryView.from_any_interface(first, stream_ptr={stream_ptr})
tensor_map = view.as_tensor_map(box_dim=box)
for start in (0, 1_000_000):
    output = cupy.zeros(rows * 128, cupy.float32)
    sample.launch_copy(kernel, tensor_map, output)
    device.sync()
    expected = cupy.arange(start, start + output.size, dtype=cupy.float32)
    assert cupy.array_equal(output, expected), start
    tensor_map.replace_address({retarget})
print("copied", type(first).__name__)
"""

MAKERS = {
    "cupy": """
def make(start, rows):
    return cupy.arange(start, start + rows * 128, dtype=cupy.float32).reshape(rows, 128)
""",
    "torch": """
import torch
def make(start, rows):
    return start + torch.arange(rows * 128, dtype=torch.float32, device="cuda").reshape(rows, 128)
""",
    "jax": """
import jax
def make(start, rows):
    return start + jax.numpy.arange(rows * 128, dtype="float32").reshape(rows, 128)
""",
    "numba": """
import numba.cuda, numpy
def make(start, rows):
    values = start + numpy.arange(rows * 128, dtype="float32")
    return numba.cuda.to_device(values.reshape(rows, 128))
""",
    "__cuda_array_interface__": """
class Bare:
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = dict(
            shape=array.shape, typestr="<f4", data=(array.data.ptr, False), version=3, strides=None
        )
def make(start, rows):
    array = cupy.arange(start, start + rows * 128, dtype=cupy.float32)
    return Bare(array.reshape(rows, 128))
""",
}


@pytest.mark.gpu
@pytest.mark.parametrize("producer", MAKERS)
def test_producer(producer: str) -> None:
    if not producer.startswith("_") and importlib.util.find_spec(producer) is None:
        pytest.skip(f"{producer} is not installed")
    # JAX needs a stream: see the next test.
    stream_ptr = 1 if producer == "jax" else -1
    retarget = "second"
    if producer == "jax":
        retarget = "StridedMemoryView.from_any_interface(second, stream_ptr=1)"
    code = COPY.format(
        root=str(ROOT), make=MAKERS[producer], stream_ptr=stream_ptr, retarget=retarget
    )
    # Otherwise JAX takes three quarters of the memory when it starts.
    process = run(
        "-c",
        code,
        env=environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"),
        timeout=120,
    )
    assert process.returncode == 0, process
    assert process.stdout.startswith("copied ")


@pytest.mark.gpu
@pytest.mark.pitfall(JAX_STREAM)
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
@pytest.mark.parametrize(
    "use",
    [
        "StridedMemoryView.from_any_interface(jax.numpy.zeros((64, 128)), stream_ptr=-1)",
        "sample.build_tensor_map(cupy.zeros(8192, 'float32'))"
        ".replace_address(jax.numpy.zeros((64, 128)))",
    ],
)
def test_jax_refuses_to_do_without_a_stream(use: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tmaTensorMap as sample
import cupy, jax
from cuda.core import Device
from cuda.core.utils import StridedMemoryView
Device(0).set_current()
{use}
"""
    process = run(
        "-c",
        code,
        env=environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"),
        timeout=120,
    )
    assert process.returncode == 1, process
    assert "CUDA_ERROR_INVALID_HANDLE" in process.stderr, process
