import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.oracle import different, fma, round_to_fp32


@given(st.floats(allow_nan=False, allow_infinity=False).filter(bool))
def test_rounding_is_that_of_the_hardware(value):
    with np.errstate(all="ignore"):
        want = float(np.float32(value))
    got = round_to_fp32(Fraction(value))
    assert struct.pack("d", got) == struct.pack("d", want)


def test_an_fma_is_rounded_once_where_two_roundings_meet_a_tie():
    a, b, c = 2.0**-12 * (1 + 2.0**-20), 2.0**-12 * (1 - 2.0**-20), 1 + 2.0**-23
    assert fma(a, b, c) == np.float32(1 + 2.0**-23)  # the sum lies just below the tie
    assert np.float32(a * b + c) == np.float32(1 + 2.0**-22)  # which a double rounds up to, and then on


@pytest.mark.parametrize("zeros", [(0.0, 1.0, -0.0), (-0.0, 1.0, -0.0), (1.0, 1.0, -1.0), (-1.0, 1.0, 1.0)])
def test_an_fma_that_is_zero_has_ieee_sign(zeros):
    a, b, c = zeros
    assert math.copysign(1.0, fma(a, b, c)) == math.copysign(1.0, a * b + c)


def test_a_difference_of_one_bit_or_of_a_sign_of_zero_is_seen_and_nan_equals_nan():
    base = torch.tensor([1.0, 0.0, math.nan, math.inf])
    assert different(base, torch.tensor([1.0, 0.0, -math.nan, math.inf])) == 0
    assert different(base, torch.tensor([1.0 + 2**-23, -0.0, 0.0, -math.inf])) == 4
