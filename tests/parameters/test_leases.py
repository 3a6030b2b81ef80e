"""Storages over slots: what keeps a slot where it is, and what must never be taken for one."""

from __future__ import annotations

import torch

from patrickstar.core.planes import PlaneRef
from patrickstar.memory.leases import Leases

A, B = PlaneRef(0, "weight"), PlaneRef(1, "weight")


def make():
    memory = {A: bytearray(64), B: bytearray(64)}
    return Leases(lambda ref: torch.frombuffer(memory[ref], dtype=torch.float32))


def test_a_lease_lives_as_long_as_any_view():
    leases = make()
    view = leases.take(A).view(4, 4).t()[1:]
    assert set(leases.held()) == {A}
    assert leases.locate(view) == (A, 4)
    del view
    assert not leases.held()


def test_units_are_told_apart():
    leases = make()
    first, second = leases.take(A), leases.take(B)
    assert (leases.locate(first).key, leases.locate(second[3:]).key) == (A, B)
    del first
    assert set(leases.held()) == {B}


def test_while_a_lease_lives_it_is_taken_again():
    leases = make()
    first = leases.take(A)
    assert leases.take(A) is first


def test_an_ordinary_tensor_is_never_taken_for_a_slot_that_was_let_go():
    """Storages are small objects: an ordinary tensor soon gets the address that a dead lease's storage had."""
    leases = make()
    reused = 0
    for _ in range(200):
        lease = leases.take(A)
        address = lease.untyped_storage()._cdata
        del lease
        ordinary = torch.zeros(4)
        reused += ordinary.untyped_storage()._cdata == address
        assert leases.locate(ordinary) is None
    assert reused, "no address was reused, which shows nothing"


def test_leases_made_in_inference_mode_are_ordinary_tensors():
    leases = make()
    with torch.inference_mode():
        lease = leases.take(A)
    assert not lease.is_inference()
