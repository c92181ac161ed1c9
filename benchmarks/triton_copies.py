# SPDX-FileCopyrightText: The tmaTensorMap contributors
# SPDX-License-Identifier: BSD-3-Clause
"""TMA copies in Triton and in Gluon, for copyBandwidth.py. Triton reads its kernels from a file."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@triton.jit
def triton_copy(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]))


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
