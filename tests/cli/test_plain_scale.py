"""The plain side's loss scale against DeepSpeed's, whose values stand here as its description gives them."""

import pytest
import torch

from patrickstar import LossScale
from patrickstar.cli.plain_scale import PlainScale, Scaling
from patrickstar.optim.scale_rule import ScaleRule

FINE, OVERFLOW = 1.0, float("inf")


def scales(given, steps):
    """The scale after each step; "o" overflows, "." does not."""
    scale, found = PlainScale(given), []
    for step in steps:
        overflowed = scale.unscale_([torch.tensor([FINE]), torch.tensor([OVERFLOW if step == "o" else FINE])])
        assert overflowed is (step == "o")
        found.append(scale.scale)
    assert scale.scaling == Scaling(found[-1], steps.count("o"))
    return found


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [
        # The first overflow is forgiven, each of the next ones halves.
        ({"window": 100}, "ooo.o", [64, 32, 16, 16, 8]),
        ({"window": 100, "hysteresis": 1}, "oo", [32, 16]),
        # It grows at the window's end, and has all its patience again.
        ({"window": 3}, "...oo...o", [64, 64, 128, 128, 64, 64, 64, 128, 128]),
        # Steps are counted from the last overflow, also one that was forgiven.
        ({"window": 2}, ".o.o.", [64, 64, 64, 32, 32]),
        ({"window": 100, "consecutive_hysteresis": True}, "o.o.oo", [64, 64, 64, 64, 64, 32]),
        ({"factor": 4.0, "hysteresis": 1, "minimum": 8.0}, "ooo", [16, 8, 8]),
        ({"dynamic": False, "window": 1}, "..oo.", [64] * 5),
    ],
)
def test_the_scale_after_every_step(given, steps, expected):
    assert scales(LossScale(initial=64.0, **given), steps) == expected


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_librarys_rule_gives_the_same(window, consecutive):
    given = LossScale(initial=64.0, window=window, factor=3.0, consecutive_hysteresis=consecutive)
    for number in range(1 << 9):
        steps = f"{number:09b}".replace("0", ".").replace("1", "o")
        rule, expected = ScaleRule(given), []
        for step in steps:
            rule.update(overflowed=step == "o")
            expected.append(rule.scale)
        assert scales(given, steps) == expected, steps


def test_a_loss_is_scaled_in_fp32_and_gradients_are_divided():
    scale = PlainScale(LossScale(initial=65536.0))
    scaled = scale.scaled(torch.tensor(3.0, dtype=torch.float16))
    assert (scaled.dtype, scaled.item()) == (torch.float32, 3 * 65536.0)
    gradient = torch.tensor([65536.0, -32768.0])
    assert not scale.unscale_([gradient])
    assert gradient.tolist() == [1.0, -0.5]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_any_element_of_any_gradient_overflows(bad):
    assert PlainScale(LossScale()).unscale_([torch.zeros(3), torch.tensor([0.0, bad, 0.0]), torch.zeros(3)])
