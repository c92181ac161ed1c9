# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""TMA copies in Triton and in Gluon. Triton reads the source of its kernels from a file."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def triton_copy(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]))


def bind_triton(*pair, rows, columns):
    tensors = [tensor.view(-1, columns) for tensor in pair]
    maps = [TensorDescriptor.from_tensor(tensor, [rows, columns]) for tensor in tensors]
    return lambda: triton_copy[(-(-len(tensors[0]) // rows),)](*maps, rows, columns)


@gluon.jit
def gluon_copy(source, target, ELEMENTS: gl.constexpr):
    begin = gl.program_id(0) * ELEMENTS
    block = gl.allocate_shared_memory(source.dtype, [ELEMENTS], source.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [begin], barrier, block)
    mbarrier.wait(barrier, phase=0)
    mbarrier.invalidate(barrier)
    tma.async_copy_shared_to_global(target, [begin], block)
    tma.store_wait(pendings=0)


def bind_gluon(*pair, elements):
    layout = gl.NVMMASharedLayout.get_default_for([elements], gl.float32)
    maps = [hopper.TensorDescriptor.from_tensor(tensor, [elements], layout) for tensor in pair]
    return lambda: gluon_copy[(-(-len(pair[0]) // elements),)](*maps, elements)
