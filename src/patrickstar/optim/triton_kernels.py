"""Triton kernels of the optimizer: one pass over the planes each. The one module that imports triton, and imported only where a GPU is used.

Note [Rounding on a GPU]
------------------------
Exactly where the definition in `reference.py` has an fma, a product is added without being rounded: there `tl.fma` is written. All other operations
round by themselves, to nearest, and keep subnormal numbers:

- options have `enable_fp_fusion=False`: by default `x * y + z` is contracted, by LLVM and once more by ptxas;
- `tl.div_rn`, `tl.sqrt_rn`: `/` and `tl.sqrt` are approximate;
- of whatever NaN an operation on fp32 makes 0x7FFFFFFF. Where parts of a master or bf16 are written, a NaN has torch's bits and its own sign.

Note [Offsets]
--------------
A launch covers at most `LAUNCH_NUMEL` elements: offsets in bytes stay below 2**31, in a kernel and in what a compiler makes of it. The host goes from
one launch to the next with slices, whose offsets have 64 bits (`triton_passes.py`).

Note [Variants]
---------------
What Triton compiles depends on types, on which arguments are None, and on which addresses and lengths are multiples of 16. Chunks pad tensors to
multiples of 16 elements, so that nearly all launches are of one variant, with loads of 16 bytes.
"""

from __future__ import annotations

from types import MappingProxyType

import triton
import triton.language as tl

BLOCK_NUMEL = 1_024
"""Elements of one program: 8 a thread, with 4 warps, so that 16 bits an element make loads of 16 bytes."""

LAUNCH_NUMEL = 1 << 28
"""Elements of one launch. See Note [Offsets]."""

SUBTREE_LEVELS = 7
"""Levels of the norm's tree that one program adds up, of 128 rows of 16 elements, twice. Another one adds up a block's other five."""

OPTIONS = MappingProxyType({"num_warps": 4, "enable_fp_fusion": False})
"""Options of a launch."""

TREE_OPTIONS = MappingProxyType({**OPTIONS, "num_warps": 1})
"""Options of a launch for the norm's tree. Of several warps each would add up the whole tree: the layout of its last row is the layout of all."""

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def shifted_up(weights):
    """The bits of bf16 values, widened to fp32."""
    return weights.to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def widened(values):
    """Values in fp32. bf16 by its bits: of a cast, Triton's interpreter loses subnormal numbers."""
    if values.dtype == tl.bfloat16:
        return shifted_up(values).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def scaled(values, factors, in_memory: tl.constexpr):
    """Values in fp32, multiplied with the factors in their order: each an fp32 number, or the address of one where `in_memory` says so."""
    values = widened(values)
    for index in tl.static_range(len(in_memory)):
        if in_memory[index]:
            values = values * tl.load(factors[index])
        else:
            values = values * factors[index]
    return values


@triton.jit
def joined(weights, rests):
    """Masters from their parts: the bits of the weight in fp32, plus the rest. The inverse of `parted`."""
    return (widened(weights).to(tl.int32, bitcast=True) + rests.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def bits_of(values):
    """The bits of fp32 values; of a NaN those of torch's, with its sign."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where((bits & _MAGNITUDE) > _INFINITY, (bits & _SIGN) | _NAN, bits)


@triton.jit
def parted(masters, dtype: tl.constexpr):
    """Masters as weights and rests, as `masters.py` has them for this type. A NaN has no rest."""
    bits = bits_of(masters)
    if dtype == tl.bfloat16:
        weights = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        rests = bits.to(tl.int16)
    else:
        is_nan = (bits & _MAGNITUDE) > _INFINITY
        weights = rounded_to_half(bits, is_nan)
        rests = tl.where(is_nan, 0, bits - weights.to(tl.float32).to(tl.int32, bitcast=True))
    return weights, rests


@triton.jit
def rounded_to_half(bits, is_nan):
    """fp32 values, given by their bits, in fp16, rounded to nearest, ties to even; of a NaN the one that torch makes, with its sign."""
    weights = bits.to(tl.float32, bitcast=True).to(tl.float16)
    nan = ((bits >> 16) & 0x8000) | 0x7E00
    return (
        tl.where(is_nan, nan, weights.to(tl.int16, bitcast=True).to(tl.int32)).to(tl.int16).to(tl.float16, bitcast=True)
    )


@triton.jit
def rounded_to_even(values, dtype: tl.constexpr):
    """fp32 values in another type, rounded to nearest, ties to even. bf16 by its bits: of a cast to it, Triton's interpreter truncates."""
    if dtype == tl.bfloat16:
        bits = bits_of(values)  # a NaN's lower half is 0, and stays a NaN's
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


@triton.jit
def flag_overflow(values, mask, is_finite):
    """Writes 0 at the address `is_finite` where one of the values is Inf or NaN. All programs write the same."""
    overflows = mask & ((values.to(tl.int32, bitcast=True) & _INFINITY) == _INFINITY)
    if tl.max(overflows.to(tl.int32), axis=0) != 0:
        tl.store(is_finite, 0)


@triton.jit
def update_kernel(
    weight,
    rest,
    grad,
    exp_avg,
    exp_avg_sq,
    numel,
    factors,
    shrink,
    l2,
    blend,
    keep_sq,
    add_sq,
    root,
    eps,
    move,
    in_memory: tl.constexpr,
    is_nearer_grad: tl.constexpr,
    block_numel: tl.constexpr,
):
    """An update of AdamW or Adam: the formulas of `reference.py`, line by line.

    Where `rest` is None, weights are fp32; else masters are in two parts. `shrink` and `l2` are None without that decay.
    `blend` is what goes into the product: from the gradient's end (Note [Lerp]) that is f(f(1 - b1) - 1).
    """
    offsets = tl.program_id(0) * block_numel + tl.arange(0, block_numel)
    mask = offsets < numel
    if rest is None:
        w = tl.load(weight + offsets, mask=mask, other=0.0)
    else:
        w = joined(tl.load(weight + offsets, mask=mask, other=0.0), tl.load(rest + offsets, mask=mask, other=0))
    g = scaled(tl.load(grad + offsets, mask=mask, other=0.0), factors, in_memory)
    m = tl.load(exp_avg + offsets, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + offsets, mask=mask, other=0.0)

    if shrink is not None:
        w = w * shrink
    if l2 is not None:
        g = tl.fma(w, l2, g)
    if is_nearer_grad:
        m = tl.fma(g - m, blend, g)
    else:
        m = tl.fma(g - m, blend, m)
    v = tl.fma(g * add_sq, g, v * keep_sq)
    d = tl.div_rn(tl.sqrt_rn(v), root) + eps
    w = w + tl.div_rn(m * move, d)

    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if rest is None:
        tl.store(weight + offsets, w, mask=mask)
    else:
        shown, left = parted(w, weight.dtype.element_ty)
        tl.store(weight + offsets, shown, mask=mask)
        tl.store(rest + offsets, left, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["is_finite"])  # flags lie side by side
def put_kernel(
    target, source, numel, is_finite, factors, in_memory: tl.constexpr, adds: tl.constexpr, block_numel: tl.constexpr
):
    """Values times factors, added to what is there or written over it, in fp32, then rounded to the target's type, ties to even.

    Where `is_finite` is no None, it becomes 0 for an Inf or NaN in what the target then holds.
    """
    offsets = tl.program_id(0) * block_numel + tl.arange(0, block_numel)
    mask = offsets < numel
    values = scaled(tl.load(source + offsets, mask=mask, other=0.0), factors, in_memory)
    if adds:
        values = widened(tl.load(target + offsets, mask=mask, other=0.0)) + values
    kept = rounded_to_even(values, target.dtype.element_ty)
    tl.store(target + offsets, kept, mask=mask)
    if is_finite is not None:
        flag_overflow(widened(kept), mask, is_finite)


@triton.jit(do_not_specialize_on_alignment=["is_finite"])
def look_kernel(piece, numel, is_finite, block_numel: tl.constexpr):
    """Looks for Inf and NaN in a piece, for which `is_finite` becomes 0."""
    offsets = tl.program_id(0) * block_numel + tl.arange(0, block_numel)
    mask = offsets < numel
    flag_overflow(widened(tl.load(piece + offsets, mask=mask, other=0.0)), mask, is_finite)


@triton.jit
def added_neighbours(values, levels: tl.constexpr, width: tl.constexpr):
    """A row: the sums of each of 2**levels rows with its neighbour, of these with theirs, until one is left: [2**levels, width] -> [width]."""
    for level in tl.static_range(levels):
        pairs = tl.reshape(values, (1 << (levels - level - 1), 2, width))
        even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
        values = even + odd
    return tl.reshape(values, (width,))


@triton.jit
def subtrees_kernel(piece, numel, factors, subtrees, in_memory: tl.constexpr, levels: tl.constexpr):
    """The lower levels of the norm's tree: from 2**levels rows of 16 elements a row of sums of squares, fp64. Zeros stand beyond the end.

    A program has two such subtrees side by side, so that the last rows keep all threads of a warp busy.
    """
    program = tl.program_id(0)
    column = tl.arange(0, 32)[None, :]
    subtree = program * 2 + column // 16
    offsets = ((subtree << levels) + tl.arange(0, 1 << levels)[:, None]) * 16 + column % 16
    values = scaled(tl.load(piece + offsets, mask=offsets < numel, other=0.0), factors, in_memory).to(tl.float64)
    tl.store(subtrees + program * 32 + tl.arange(0, 32), added_neighbours(values * values, levels, 32))


@triton.jit
def trees_kernel(subtrees, n_subtrees, rows, levels: tl.constexpr):
    """The upper levels: from 2**levels rows of a block, its last row. Rows of zeros stand beyond the end."""
    program = tl.program_id(0)
    row = (program << levels) + tl.arange(0, 1 << levels)[:, None]
    values = tl.load(subtrees + row * 16 + tl.arange(0, 16)[None, :], mask=row < n_subtrees, other=0.0)
    tl.store(rows + program * 16 + tl.arange(0, 16), added_neighbours(values, levels, 16))


@triton.jit
def numbers_kernel(rows, numbers, n_blocks, block_numel: tl.constexpr):
    """The numbers of blocks: the halves of their last rows are added, and theirs, until one number is left."""
    block = tl.program_id(0) * block_numel + tl.arange(0, block_numel)
    offsets = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = tl.load(rows + offsets, mask=block[:, None] < n_blocks, other=0.0)
    for level in tl.static_range(4):
        halves = tl.reshape(values, (block_numel, 2, 8 >> level))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        values = left + right
    tl.store(numbers + block, tl.reshape(values, (block_numel,)), mask=block < n_blocks)
