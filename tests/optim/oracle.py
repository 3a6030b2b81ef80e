"""The update of one element in exact arithmetic, sharing nothing with the library and no rounding with torch.

Products and sums that the definition rounds once are taken over fractions and rounded here; the operations that it
rounds one by one are NumPy's on fp32 scalars, which are IEEE's.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import torch

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-39, -3e-39, 3.4e38, -3.4e38, 1e-30, -1e30, 1.0)


def round_to_fp32(exact):
    """The fp32 number nearest to a non-zero fraction, ties to even, as a Python float; subnormal and infinite too."""
    sign, exact = (-1.0, -exact) if exact < 0 else (1.0, exact)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if exact < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    units = round(exact / quantum)  # of a fraction: exact, ties to even
    return sign * float(units * quantum) if units * quantum < Fraction(2) ** 128 else sign * math.inf


def fma(a, b, c):
    """a * b + c of fp32 numbers, rounded once."""
    a, b, c = float(a), float(b), float(c)
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact:
            return np.float32(round_to_fp32(exact))
    return np.float32(a * b + c)  # NaN, Inf, and zeros with their sign: no rounding


def update_element(p, g, m, v, *, step, lr, beta1, beta2, eps, weight_decay, decoupled):
    """The definition, line by line, on fp32 scalars: the new p, m, v."""
    f = np.float32
    if weight_decay and decoupled:
        p = p * f(1 - lr * weight_decay)
    if weight_decay and not decoupled:
        g = fma(f(weight_decay), p, g)
    blend = f(1 - beta1)
    m = fma(blend, g - m, m) if blend < 0.5 else fma(blend - f(1), g - m, g)
    v = fma(f(1 - beta2) * g, g, v * f(beta2))
    d = np.sqrt(v) / f(math.sqrt(1 - beta2**step)) + f(eps)
    p = p + (f(-lr / (1 - beta1**step)) * m) / d
    return p, m, v


def update(planes, **hyper):
    """The new (weight, exp_avg, exp_avg_sq) of flat fp32 tensors (weight, grad, exp_avg, exp_avg_sq)."""
    with np.errstate(all="ignore"):
        rows = [update_element(*element, **hyper) for element in zip(*(plane.numpy() for plane in planes), strict=True)]
    return tuple(torch.from_numpy(np.array(column, dtype=np.float32)) for column in zip(*rows, strict=True))


def different(got, want):
    """Elements whose bits differ; one NaN is like another."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if not got.is_floating_point():
        return int((got != want).sum())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    differ = got.contiguous().view(bits) != want.contiguous().view(bits)
    return int((differ & ~(got.isnan() & want.isnan())).sum())


def special_planes():
    """Every special number as gradient with every other as moment, over all special weights."""
    grads, moments = zip(*itertools.product(SPECIAL, repeat=2), strict=True)
    numel = len(grads)
    weights = [SPECIAL[index % 11] for index in range(numel)]
    squares = [abs(SPECIAL[index % 13]) for index in range(numel)]
    return [torch.tensor(plane) for plane in (weights, grads, moments, squares)]


def sum_of_squares(block):
    """The sum of squares of up to 65,536 elements, one number of Python's at a time."""
    squares = [float(x) ** 2 for x in block.tolist()]
    squares += [0.0] * (65_536 - len(squares))
    rows = [squares[start : start + 16] for start in range(0, 65_536, 16)]
    while len(rows) > 1:
        rows = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(rows[0::2], rows[1::2], strict=True)]
    row = rows[0]
    while len(row) > 1:
        half = len(row) // 2
        row = [row[i] + row[i + half] for i in range(half)]
    return row[0]
