"""`print(session.stats())`: a table with units."""

from __future__ import annotations

import re

from torch.profiler import ProfilerActivity, profile

import patrickstar
from patrickstar.units import KIB, MIB
from tests.memory.stores import keep_log
from tests.session.builders import TIGHT, Pair, adamw, batch, mlp, store_of, train_step


def test_statistics_print_as_a_table_with_units() -> None:
    stats = patrickstar.session.stats.Stats(
        peak={"device": 3 * MIB, "host": 2560, "disk": 0},
        moved={"H>D": MIB, "D>H": 512, "H>K": 3 * KIB, "K>H": 0},
        sent={},
        model_data={"weight": 2 * MIB, "grad": MIB},
        steps=3,
        planned_steps=2,
        reactive_steps=1,
        reason="another shape",
        seconds={"forward": 0.25, "backward": 1.5},
        bytes_per_parameter=12.5,
        binding="whole",
    )
    assert [re.split(" {2,}", line.strip()) for line in str(stats).splitlines()] == [
        ["device", "host", "disk"],
        ["peak", "3.00 MiB", "2.50 KiB", "0 B"],
        ["fetched", "1.00 MiB", "0 B", "-"],
        ["offloaded", "512 B", "3.00 KiB", "-"],
        ["model states", "3.00 MiB, 12.50 bytes per parameter: weight 2.00 MiB, grad 1.00 MiB"],
        ["steps", "3, 2 as planned, 1 not (another shape)"],
        ["last step", "forward 0.250 s, backward 1.500 s"],
        ["parameters", "whole"],
    ]


def test_a_session_that_has_done_nothing_prints_them_too() -> None:
    model = mlp()
    with patrickstar.manage(model, adamw(model), precision="fp32") as session:
        assert "steps         0, 0 as planned" in str(session.stats())
        model(batch()).sum().backward()
        assert re.search(r"last step .* s\nparameters    by use: ", str(session.stats()))


def test_every_action_is_shown_by_its_text_where_a_profiler_looks_on() -> None:
    pair = Pair(device="emulated", device_memory=TIGHT)
    pair.train(1)
    store = keep_log(store_of(pair.session))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        pair.each(train_step, 1)
        pair.session.optimizer.state_dict()
    names = {event.name for event in profiled.events()}
    assert store.log
    assert {str(action) for action in store.log} <= names
    pair.expect_same()
