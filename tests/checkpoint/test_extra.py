"""What users save comes back as it was, type for type and bit for bit; what cannot is refused with its place."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.decode import decode_tree
from patrickstar.checkpoint.extra import encode_tree
from patrickstar.checkpoint.fields import parse_object
from patrickstar.errors import CheckpointError, ConfigError


def there_and_back(value: Any) -> Any:
    encoded = encode_tree(value, name="extra")
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in encoded.tensors.values())
    text = json.dumps({"tree": encoded.tree}, allow_nan=False).encode("ascii")
    tree = parse_object(text, where="index.json")["tree"]
    fetch = {name: tensor.clone() for name, tensor in encoded.tensors.items()}
    return decode_tree(tree, fetch=fetch.__getitem__, names=fetch.keys(), where="index.json: extra")


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case float():
            return struct.pack("d", one) == struct.pack("d", other)
        case complex():
            return same([one.real, one.imag], [other.real, other.imag])
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case dict():
            factories = [getattr(each, "default_factory", None) for each in (one, other)]
            return (
                factories[0] is factories[1]
                and same(list(one), list(other))
                and same([*one.values()], [*other.values()])
            )
        case torch.Tensor():
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                return False
            return not one.numel() or torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))
        case np.ndarray() | np.generic():
            return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
        case _:
            return bool(one == other)


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=3,
)
LEAVES = (
    KEYS | st.floats() | st.complex_numbers() | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2])])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.just("$tuple"), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=12,
)


@given(value=TREES)
def test_plain_values_come_back_type_for_type(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**53, -(2**53), 10**400, True, 1, 1.0, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf,
        struct.unpack("<d", bytes.fromhex("010000000000f4ff"))[0],  # a NaN with a payload and a sign
        "\ud800 half a pair", "\0", b"", b"x" * 10_000, {"$int": 1}, {"$": [], "a": 1}, {1: "a", "1": "b"}, {True: 1},
        {math.nan: torch.ones(1)}, {(1, ("a", b"b")): 1}, Counter({30: 1, 80: 2}), Counter("abca"), defaultdict(None, {1: 2}),
        OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}, set(), frozenset({1, "a", None}), [[], (), {}], None,
        complex(-0.0, math.nan), torch.Size([2, 0]), torch.bfloat16, torch.device("cuda:3"),
    ],
    ids=lambda value: f"{type(value).__name__} {sorted(map(str, value)) if isinstance(value, frozenset) else str(value)[:20]!a}",
)  # fmt: skip
def test_a_value_that_json_lacks_or_confuses_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)
    assert same(there_and_back({"in": [value]}), {"in": [value]})


@pytest.mark.parametrize(
    "dtype",
    [*(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
     *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
     *(torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_of_any_type_comes_back_bit_for_bit(dtype, shape):
    numel = math.prod(shape)
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    tensor = data.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)
    assert same(there_and_back([tensor])[0], tensor)


def test_a_tensor_comes_back_without_what_hangs_on_it():
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    value = {
        "parameter": parameter,
        "grown": parameter * 2,
        "transposed": base.t(),
        "strided": base[::2, 1],
        "expanded": base[0].expand(5, 4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    back = there_and_back(value)
    for name, tensor in value.items():
        assert torch.equal(back[name], tensor.detach())
        assert type(back[name]) is torch.Tensor
        assert not back[name].requires_grad


def test_one_tensor_in_two_places_is_stored_once_and_stays_one():
    tensor = torch.ones(3)
    assert len(encode_tree([tensor, {"a": tensor}], name="extra").tensors) == 1
    back = there_and_back([tensor, {"a": tensor}])
    assert back[0] is back[1]["a"]


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array(3.5), np.zeros((0, 2)),
        np.array([1, 2], dtype=">f4"), np.array(["a", "longer", ""]), np.array(["", ""]), np.array([b"x", b"yz"]),
        np.array(["2024-02-29", "NaT"], dtype="datetime64[D]"), np.array([5], dtype="timedelta64[ns]"),
        np.array([True, False]), np.array([1j]), np.arange(10)[::3], np.float64(0.1), np.float32("nan"), np.int64(-3),
        np.bool_(True), np.uint8(255), np.datetime64("2024-01-01T00:00", "m"), np.str_("text"), np.str_(""), np.bytes_(b"b"),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype.str}{list(value.shape)}",
)  # fmt: skip
def test_numpy_comes_back_type_for_type(value):
    assert same(there_and_back({"v": value})["v"], value)
    if isinstance(value, np.ndarray) and value.size:
        back = there_and_back(value)
        back[...] = back[0] if back.ndim else 1  # ordinary memory, to be written to


def test_numpy_numbers_may_be_keys():
    assert same(there_and_back({np.int64(3): "a"}), {np.int64(3): "a"})


def test_a_read_only_array_is_saved_without_a_warning():
    value = np.arange(4)
    value.flags.writeable = False
    assert same(there_and_back(value), value)


def test_an_object_with_a_state_is_saved_as_its_state_and_goes_on_from_it():
    def parts() -> tuple[Any, ...]:
        weights = [torch.nn.Parameter(torch.ones(3))]
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])  # keeps a Counter
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [3])
        return weights[0], optimizer, schedule

    def train(weight: torch.Tensor, optimizer: Any, schedule: Any, *, count: int) -> list[Any]:
        losses = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += [loss.item(), *schedule.get_last_lr()]
        return losses

    weight, optimizer, schedule = parts()
    train(weight, optimizer, schedule, count=4)
    extra = there_and_back({"optimizer": optimizer, "schedule": schedule, "weight": weight})
    expected = train(weight, optimizer, schedule, count=5)

    weight, optimizer, schedule = parts()
    optimizer.load_state_dict(extra["optimizer"])
    schedule.load_state_dict(extra["schedule"])
    weight.data.copy_(extra["weight"])
    assert train(weight, optimizer, schedule, count=5) == expected


def test_a_module_is_saved_as_its_state_dict():
    module = torch.nn.Linear(2, 3)
    fresh = torch.nn.Linear(2, 3)
    fresh.load_state_dict(there_and_back({"ema": module})["ema"])
    assert torch.equal(fresh.weight, module.weight)


class Colour(enum.IntEnum):
    RED = 1


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"file": self}}


class MyDict(dict):
    pass


Point = namedtuple("Point", "x")
LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _ in range(101):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"loader": {"rng": object()}}, 'extra["loader"]["rng"] is a builtins.object'),
        ({"a": [0, {1: lambda: 0}]}, 'extra["a"][0][1] is a'.replace("[0][1]", "[1][1]")),
        ({"kind": Stateful}, 'extra["kind"] is a builtins.type'),
        ({"s": Stateful()}, 'extra["s"].state_dict()["inner"]["file"] contains itself'),
        ([Colour.RED], "extra[0] is a"),
        ((1, MyDict()), "extra[1] is a"),
        (Point(1), "extra is a"),
        (bytearray(b"x"), "extra is a builtins.bytearray"),
        (iter([]), "extra is a builtins.list_iterator"),
        (LOOP, "extra[0] contains itself"),
        (DEEP, "nested more than 100 levels"),
        ({object(): 1}, "extra has a key or element"),
        ({Colour.RED: 1}, "extra has a key or element"),
        (defaultdict(Stateful), "extra is a defaultdict of"),
        (torch.eye(3).to_sparse(), "extra is a tensor without plain elements"),
        (torch.empty(2, device="meta"), "extra is a tensor without plain elements"),
        (np.array([object()]), "extra is a NumPy ndarray of type object"),
        (np.zeros(2, dtype=[("a", "i4")]), "extra is a NumPy ndarray"),
        (np.ma.masked_array([1, 2]), "extra is a NumPy MaskedArray"),
        (np.zeros(1, dtype=np.longdouble), "extra is a NumPy ndarray"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_saved_is_refused_with_its_place(value, place):
    with pytest.raises(ConfigError) as refused:
        encode_tree(value, name="extra")
    assert place in str(refused.value)


def test_values_that_stand_side_by_side_do_not_contain_each_other():
    shared = [1]
    assert there_and_back([shared, [shared, shared]]) == [[1], [[1], [1]]]


BLOB = torch.zeros(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    "tree",
    [
        {"$pickle": "gASV"}, {"$tuple": [], "$list": []}, {"$tuple": 1}, {"a": 1, "$b": 2}, {"$int": "12"}, {"$int": 12},
        {"$int": "0x"}, {"$float": "00"}, {"$float": "zz" * 8}, {"$complex": [1, 2]}, {"$complex": [1.0]}, {"$bytes": "0"},
        {"$bytes": "-1"}, {"$dict": [[1]]}, {"$dict": [[1, 2, 3]]}, {"$dict": [[[], 1]]}, {"$dict": [[{"$tensor": "t"}, 1]]},
        {"$set": [[]]}, {"$set": [{"$tensor": "t"}]}, {"$counter": 3}, {"$defaultdict": {"factory": "eval", "items": []}},
        {"$defaultdict": {"factory": "list"}}, {"$size": [-1]}, {"$size": [2**70]}, {"$dtype": "torch.load"},
        {"$dtype": "float32"}, {"$dtype": "os.system"}, {"$device": "there"}, {"$tensor": "other"}, {"$tensor": 0},
        {"$blob": "t"}, {"$typed": {"tensor": "b", "dtype": "torch.complex128", "shape": [1]}},
        {"$typed": {"tensor": "b", "dtype": "torch.load", "shape": [1]}},
        {"$typed": {"tensor": "b", "dtype": "torch.complex128", "shape": [10**12]}},
        {"$array": {"tensor": "b", "dtype": "|O", "shape": [1]}}, {"$array": {"tensor": "b", "dtype": "<f8", "shape": [2]}},
        {"$array": {"tensor": "b", "dtype": "<f8", "shape": [10**12]}}, {"$array": {"tensor": "b", "dtype": "f8,f8", "shape": [1]}},
        {"$array": {"tensor": "b", "dtype": "<U9", "shape": [10**15]}}, {"$array": {"tensor": "b", "dtype": "|S999999999", "shape": [1]}},
        {"$array": {"tensor": "t", "dtype": "<f8", "shape": [1]}}, {"$array": {"tensor": "b", "dtype": "<M8[q]", "shape": [1]}},
        {"$scalar": {"dtype": "<f8", "data": "00"}}, {"$scalar": {"dtype": "|O", "data": ""}}, {"$scalar": None},
    ],
    ids=lambda tree: json.dumps(tree)[:50],
)  # fmt: skip
def test_a_tree_that_encodes_nothing_is_refused_with_its_place(tree):
    tensors = {"t": torch.ones(2), "b": BLOB}
    with pytest.raises(CheckpointError, match=r'^index\.json: extra\["a"\]\[0\]'):
        decode_tree({"a": [tree]}, fetch=tensors.__getitem__, names=tensors.keys(), where="index.json: extra")


def test_a_tree_nested_without_end_is_refused():
    tree: Any = None
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(CheckpointError, match="nested too deep"):
        decode_tree(tree, fetch={}.__getitem__, names=(), where="x")
