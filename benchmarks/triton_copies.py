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
def triton_copy(source, target, ROWS: tl.constexpr):
    target.store([tl.program_id(0) * ROWS, 0], source.load([tl.program_id(0) * ROWS, 0]))


@gluon.jit
def gluon_copy(source, target, ELEMENTS: gl.constexpr):
    block = gl.allocate_shared_memory(source.dtype, [ELEMENTS], source.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, source.block_type.nbytes)
    tma.async_copy_global_to_shared(source, [gl.program_id(0) * ELEMENTS], barrier, block)
    mbarrier.wait(barrier, phase=0)
    tma.async_copy_shared_to_global(target, [gl.program_id(0) * ELEMENTS], block)
    tma.store_wait(pendings=0)


def bind(name, *pair):
    if name == "Triton TMA":
        maps = [TensorDescriptor.from_tensor(x.view(-1, 128), [4, 128]) for x in pair]
        return lambda: triton_copy[(-(-pair[0].numel() // 512),)](*maps, 4)
    elements = int(name.split()[-1])
    layout = gl.NVMMASharedLayout.get_default_for([elements], gl.float32)
    maps = [hopper.TensorDescriptor.from_tensor(x.view(-1), [elements], layout) for x in pair]
    return lambda: gluon_copy[(-(-pair[0].numel() // elements),)](*maps, elements)
