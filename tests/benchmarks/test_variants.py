import pytest
from benchmarks.variants import DEFAULT, Variant
from hypothesis import given
from hypothesis import strategies as st

WORDS = {
    "precision": ["fp32", "bf16", "fp16"],
    "checkpointing": ["off", "on"],
    "step": ["deferred", "in_backward"],
    "eviction": ["next-use", "lru"],
    "budget": ["all", "half", "minimum", "0.75"],
    "device": ["cpu", "emulated"],
    "chunk": [None, 1024],
}


@given(st.fixed_dictionaries({name: st.sampled_from(words) for name, words in WORDS.items()}))
def test_a_variant_prints_and_parses_back(given):
    variant = Variant(disk="on", **given)
    assert Variant.parse(str(variant)) == variant


def test_only_what_is_not_as_by_default_is_said():
    assert str(Variant(budget="half", disk="on", eviction="lru")) == "managed eviction=lru budget=half disk=on"
    assert str(Variant(managed=False)) == "plain"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Plain", "begins with plain or managed"),
        ("managed evict=lru", "evict=lru.*with a name of .*eviction"),
        ("managed eviction", "NAME=VALUE"),
        ("managed managed=False", "NAME=VALUE"),
        ("managed eviction=fifo", "eviction=fifo: one of next-use, lru"),
        ("managed budget=tiny disk=on", "budget=tiny: all, half, minimum, or a share"),
        ("managed budget=-0.5 disk=on", "budget=-0.5"),
        ("managed budget=half", "without disk=on"),
        ("plain step=in_backward", "plain PyTorch has no step"),
        ("plain precision=fp16", "plain PyTorch in fp16"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=says):
        Variant.parse(text)


def test_the_share_of_a_budget():
    shares = [Variant(budget=budget, disk="on").share for budget in ("all", "half", "minimum", "1.25")]
    assert shares == [None, 0.5, None, 1.25]


def test_by_default_every_optimization_is_switched_on_and_off():
    assert len(set(DEFAULT)) == len(DEFAULT)
    assert str(DEFAULT[0]) == "plain"
    for name in ("managed", *WORDS, "disk"):
        assert len({getattr(variant, name) for variant in DEFAULT}) > 1, name
