"""A profile of a step speaks the plan's words."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from tests.session.builders import TIGHT, Pair, store_of, train_step


def test_every_action_is_shown_by_its_text_where_a_profiler_looks_on() -> None:
    pair = Pair(device="emulated", device_memory=TIGHT)
    pair.train(1)
    store = store_of(pair.session)
    store.keep_log = True
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        pair.each(train_step, 1)
        pair.session.optimizer.state_dict()
    names = {event.name for event in profiled.events()}
    assert store.log
    assert {str(action) for action in store.log} <= names
    pair.expect_same()
