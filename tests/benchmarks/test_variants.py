import pytest
from benchmarks.variants import ALL, DEFAULT, Variant
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
    "tile_rows": [None, 64],
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
        ("plain precision=bf16 compute=fp32", "plain PyTorch has no compute"),
        ("managed compute=fp32", "compute=fp32 without precision"),
        ("managed precision=bf16 compute=fp16", "compute=fp16: fp32, or bf16"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=says):
        Variant.parse(text)


def test_the_share_of_a_budget():
    shares = [Variant(budget=budget, disk="on").share for budget in ("all", "half", "minimum", "1.25")]
    assert shares == [None, 0.5, None, 1.25]


# types that a processor is slow in


def test_what_is_widened_says_so():
    variant = Variant.parse("managed precision=bf16 budget=half disk=on")
    assert str(variant.as_run({"fp32"})) == "managed precision=bf16 compute=fp32 budget=half disk=on"
    assert Variant.parse(str(variant.as_run({"fp32"}))).products == "fp32"
    assert variant.as_run({"fp32", "bf16"}) is variant
    assert variant.products == "bf16"


@pytest.mark.parametrize("text", ["plain", "plain precision=bf16", "managed", "managed precision=bf16 compute=bf16"])
def test_nothing_else_is_renamed(text):
    assert str(Variant.parse(text).as_run({"fp32"})) == text


# base lines


BASE_LINES = {
    "plain": None,
    "managed": "plain",
    "managed checkpointing=on": "managed",
    "managed step=in_backward": "managed",
    "managed precision=bf16": "managed",
    "managed precision=fp16": "managed",
    "managed budget=half disk=on": "managed",
    "managed eviction=lru budget=half disk=on": "managed budget=half disk=on",
    "managed budget=minimum disk=on": "managed budget=half disk=on",
    "managed budget=half device=emulated": "managed",
}


def base_lines(variants):
    found = [variant.base_line(variants[:at]) for at, variant in enumerate(variants)]
    return {str(variant): line and str(line) for variant, line in zip(variants, found, strict=True)}


def test_each_default_variant_has_the_base_line_that_shows_one_thing():
    assert base_lines(DEFAULT) == BASE_LINES


def test_base_lines_are_the_same_where_weights_are_widened():
    slow = base_lines([variant.as_run({"fp32"}) for variant in DEFAULT])
    assert list(slow.values()) == list(BASE_LINES.values())


def test_plain_pytorch_is_a_base_line_only_of_its_own_kind_or_where_there_is_no_other():
    lines = base_lines(ALL)
    assert lines["plain precision=bf16"] == "plain"
    assert lines["managed step=in_backward budget=half disk=on"] == "managed budget=half disk=on"
    assert lines.items() >= BASE_LINES.items()


@pytest.mark.parametrize("variants", [DEFAULT, ALL], ids=["default", "all"])
def test_every_optimization_is_switched_on_and_off(variants):
    assert len(set(variants)) == len(variants)
    assert str(variants[0]) == "plain"
    for name in ("managed", *WORDS, "disk"):
        # Chunks of another size and tiles are asked for by those who need them.
        if name not in ("chunk", "tile_rows") or variants is ALL:
            assert len({getattr(variant, name) for variant in variants}) > 1, name


def test_there_are_ten_at_most_by_default_and_all_has_them():
    assert len(DEFAULT) <= 10
    assert set(DEFAULT) < set(ALL)
