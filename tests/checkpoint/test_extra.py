"""What users save comes back as it was; what the restricted reader would refuse is refused when it is saved, with its place."""

from __future__ import annotations

import enum
import math
import os
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patrickstar.checkpoint.reader import open_step
from patrickstar.errors import CheckpointError
from tests.checkpoint.faults import FaultyFiles
from tests.checkpoint.samples import adopt, same_tensor, write


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("extra")


def there_and_back(directory: Path, value: Any) -> Any:
    write(directory, 1, {}, extra=value, io=FaultyFiles())  # which syncs nothing
    with open_step(directory) as reader:
        reader.verify()
        return reader.values["extra"]


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
            return same(list(one), list(other)) and same([*one.values()], [*other.values()])
        case torch.Tensor():
            return same_tensor(one, other)
        case _:
            return bool(one == other)


@pytest.mark.parametrize(
    "value",
    [
        2**63, -(2**64), 10**400, -0.0, 5e-324, math.inf, struct.unpack("<d", bytes.fromhex("010000000000f4ff"))[0],
        "\ud800 half a pair", "\0", b"x" * 10_000, bytearray(b"y"), {1: "a", "1": "b"}, {True: 1}, Counter({30: 1, 80: 2}),
        OrderedDict([("b", 1), ("a", 2)]), {"b": 1, "a": 2}, set(), [[], (), {}], complex(-0.0, math.nan), torch.Size([2, 0]),
        torch.bfloat16, torch.device("cuda:3"), {("key", 1): ({"deep": [None, (1.5, {2: "x"})]},), -1: b"\0", None: {1, "a"}},
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:20]!a}",
)  # fmt: skip
def test_a_value_that_json_lacks_comes_back_as_it_was(directory, value):
    assert same(there_and_back(directory, {"in": [value]}), {"in": [value]})


@pytest.mark.parametrize(
    "dtype",
    [*(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
     *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
     *(torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu)],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_tensor_of_any_type_comes_back_bit_for_bit(directory, dtype):
    given = []
    for shape in ((), (0,), (3,), (2, 0, 3), (2, 3)):
        numel = math.prod(shape)
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
        given.append(data.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype))
    assert same(there_and_back(directory, given), given)


def test_a_tensor_comes_back_without_what_hangs_on_it(directory):
    base = torch.arange(1_000_000.0).reshape(1000, 1000)
    parameter = torch.nn.Parameter(base[:3, :4].clone())
    value = {
        "parameter": parameter,
        "grown": parameter * 2,
        "transposed": base[:20, :30].t(),
        "row": base[1],
        "expanded": base[0].expand(5, 1000),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    back = there_and_back(directory, value)
    for name, tensor in value.items():
        assert torch.equal(back[name], tensor.detach())
        assert type(back[name]) is torch.Tensor
        assert not back[name].requires_grad
    size = (directory / "step-00000001" / "values.pt").stat().st_size
    assert size < 50_000, "of a view, its own elements are saved"


def test_one_tensor_in_two_places_stays_one_and_what_stands_side_by_side_is_no_circle(directory):
    tensor, shared = torch.ones(3), [1]
    back = there_and_back(directory, [tensor, {"a": tensor}, shared, [shared, shared]])
    assert back[0] is back[1]["a"]
    assert back[2:] == [[1], [[1], [1]]]


def test_numbers_of_numpy_come_back_as_numbers(directory):
    given = [np.float64(0.1), np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("text")]
    assert same(there_and_back(directory, given), [0.1, 0.5, -3, True, "text"])


class Colour(enum.IntEnum):
    RED = 1


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"file": self.inner}}


Point = namedtuple("Point", "x y")
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: Any = None
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (object(), "extra is a builtins.object, which torch.load(weights_only=True) does not read back: give JSON"),
        ({"a": [1, lambda: 0]}, 'extra["a"][1] is a builtins.function'),
        ({1: {"b": object}}, 'extra[1]["b"] is a builtins.type'),
        (Holder(print), 'extra.state_dict()["inner"]["file"] is a builtins.builtin_function_or_method'),
        (Point(1, 2), "extra is a tests.checkpoint.test_extra.Point"),
        ([Colour.RED], "extra[0] is a tests.checkpoint.test_extra.Colour"),
        ({"n": np.arange(3)}, 'extra["n"] is a numpy.ndarray'),
        (np.datetime64("2024-01-01"), "extra is a datetime.date"),
        (defaultdict(list), "extra is a collections.defaultdict"),
        ([frozenset({1})], "extra[0] is a builtins.frozenset"),
        (10**1000, "extra is a builtins.int"),
        ([b""], "extra[0] is a builtins.bytes"),  # of all bytes these alone
        ({object(): 1}, "key extra[<object object"),
        ((x for x in "ab"), "extra is a builtins.generator"),
        ([Path("x")], "extra[0] is a pathlib"),
        (CIRCLE, "extra contains itself, or is nested too deep"),
        (Holder(CIRCLE), "extra contains itself, or is nested too deep"),
        (DEEP, "extra contains itself, or is nested too deep"),
        (torch.eye(3).to_sparse(), "extra is a tensor without plain elements"),
        ([torch.empty(2, device="meta")], "extra[0] is a tensor without plain elements"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else type(value).__name__,
)
def test_what_could_not_be_read_back_is_refused_with_its_place_before_anything_is_written(tmp_path, value, problem):
    with pytest.raises(CheckpointError) as refused:
        write(tmp_path / "new", 1, extra=value)
    assert problem in str(refused.value)
    assert not (tmp_path / "new").exists()


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def forged(kind: str, target: Path) -> bytes:
    path = target.with_name("forged.pt")
    values = {"state": None, "extra": Bomb(target) if "bomb" in kind else torch.ones(100)}
    if kind == "a bomb in a bare pickle":
        return pickle.dumps(values)
    torch.save(values, path, _use_new_zipfile_serialization=kind != "a bomb in torch's old format")
    data = path.read_bytes()
    match kind:
        case "half":
            return data[: len(data) // 2]
        case "nothing":
            return b""
        case "noise":
            return bytes(range(256)) * 4
        case "other values":
            torch.save([1, 2], path)
            return path.read_bytes()
    return data


@pytest.mark.parametrize(
    "kind",
    ["a bomb", "a bomb in a bare pickle", "a bomb in torch's old format", "half", "nothing", "noise", "other values"],
)
def test_forged_values_under_a_right_checksum_are_refused_and_run_nothing(tmp_path, kind):
    step = write(tmp_path / "runs", 1)
    adopt(step, "values.pt", forged(kind, tmp_path / "executed"))
    with open_step(step) as reader:
        reader.verify()
        with pytest.raises(CheckpointError, match=r"^\S+/values\.pt: "):
            _ = reader.values
    assert not (tmp_path / "executed").exists()


def test_the_bomb_would_have_done_something(tmp_path):
    pickle.loads(forged("a bomb in a bare pickle", tmp_path / "executed"))
    assert (tmp_path / "executed").exists()
