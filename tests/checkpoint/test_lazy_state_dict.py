"""A state dict that is read tensor by tensor."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping

import pytest
import torch

from patrickstar.checkpoint.lazy_state_dict import LazyStateDict


class Shelf:
    """Makes tensors on request, and counts."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most_alive = 0

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        tensor = torch.full((3,), float(ord(name)))
        self.alive.add(tensor)
        self.most_alive = max(self.most_alive, len(self.alive))
        return tensor


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def mapping(shelf) -> LazyStateDict:
    return LazyStateDict(["b", "a", "c"], shelf.read)


def test_names_are_known_without_reading(mapping, shelf):
    assert isinstance(mapping, Mapping)
    assert list(mapping) == list(mapping.keys()) == ["b", "a", "c"]
    assert len(mapping) == 3
    assert "a" in mapping
    assert "d" not in mapping
    assert "3 tensors" in repr(mapping)
    assert mapping == mapping  # noqa: PLR0124 - not by reading and comparing
    assert mapping != dict.fromkeys("bac")
    assert shelf.reads == []


def test_a_tensor_is_read_when_it_is_asked_for(mapping, shelf):
    assert mapping["a"].tolist() == [97.0] * 3
    assert mapping.get("d") is None
    with pytest.raises(KeyError):
        mapping["d"]
    assert shelf.reads == ["a"]


def test_one_tensor_at_a_time_is_alive_while_they_are_walked(mapping, shelf):
    gc.collect()
    for name in mapping:
        tensor = mapping[name]
        assert tensor[0] == ord(name)
        del tensor
    assert shelf.most_alive == 1
    assert [(name, tensor[0].item()) for name, tensor in mapping.items()] == [("b", 98), ("a", 97), ("c", 99)]
    assert shelf.most_alive <= 2  # the loop's own variable holds the one before


def test_dict_takes_all_of_it(mapping, shelf):
    assert list(dict(mapping)) == ["b", "a", "c"]
    assert shelf.reads == ["b", "a", "c"]


def test_it_is_saved_and_copied_as_an_ordinary_dict(mapping, tmp_path):
    torch.save(mapping, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert isinstance(loaded, dict)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in mapping.items()
    }
    assert isinstance(copy.deepcopy(mapping), dict)


def test_a_module_loads_it():
    module, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    state = module.state_dict()
    other.load_state_dict(LazyStateDict(state, state.__getitem__))
    assert torch.equal(other.weight, module.weight)
