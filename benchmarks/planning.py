"""How long it takes to know: the offline trace of a training step by block, and the plans made from it.

    python benchmarks/planning.py [--model NAME] [--rounds N] [--write]

Nothing is run: the model is on the meta device. Times are of one thread, the median and the range over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from patrickstar.cli.models import ModelSource
from patrickstar.core.chunk_size import search_chunk_numel
from patrickstar.core.formats import FP32, SessionFormats
from patrickstar.core.layout import TensorSpec, build_layout
from patrickstar.core.machine import Machine, Tier
from patrickstar.core.planes import GradientUse
from patrickstar.parameters.blocks import places_in
from patrickstar.parameters.bound import names_by_id
from patrickstar.plan.fit import worst_moment
from patrickstar.plan.make import make_plan
from patrickstar.plan.residency import Residency
from patrickstar.plan.touches import Touches, gradients_freed, step_trace
from patrickstar.plan.weave import weave
from patrickstar.tracing.offline import OfflineTracer

WANTED_TRACE_S, WANTED_PLAN_S = 10.0, 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = ModelSource.find(arguments.model).build()
    named = dict(model.named_parameters())
    specs = [TensorSpec(name, tuple(p.shape), p.requires_grad) for name, p in named.items()]
    layout = build_layout(specs, chunk_numel=search_chunk_numel(specs))
    formats = SessionFormats(FP32)
    tracer = OfflineTracer(
        layout=layout,
        make_touches=lambda: Touches(layout, gradients=GradientUse.CHUNK, updates=named.__contains__, formats=formats),
    )
    blocks = [place.path for place in places_in(model, names_by_id(named))]
    tokens = torch.zeros(1, arguments.tokens, dtype=torch.long)
    seconds: dict[str, list[float]] = {"trace": [], "plan": []}
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        forward = tracer.foresee(model, named, (), {"input_ids": tokens, "labels": tokens}, blocks=blocks).trace
        seconds["trace"].append(time.perf_counter() - began)
        updates = step_trace(layout, named, formats=FP32, in_plane=True)
        home = dict.fromkeys(layout.units(("weight", "grad", "exp_avg", "exp_avg_sq")), Tier.DISK)
        state = Residency.at_rest(
            layout, compute=Tier.HOST, home=home, formats=FP32, free=[ref for ref in home if ref.plane == "grad"]
        )
        need = max(worst_moment(trace, start=state).nbytes for trace in (forward, updates))
        machine = Machine(Tier.HOST, {Tier.HOST: need * 3 // 2, Tier.DISK: 1 << 50})
        first = make_plan(forward, layout=layout, machine=machine, start=state, prefetch=None)
        state = Residency.of(first.end)
        began = time.perf_counter()
        woven = weave(forward, updates, state=state, capacity_bytes=machine.budget[Tier.HOST])
        make_plan(woven, layout=layout, machine=machine, start=state, frees=gradients_freed(woven), prefetch=None)
        seconds["plan"].append(time.perf_counter() - began)
    result: dict[str, Any] = {
        "what": "seconds to trace a training step offline, and to plan its update, forward and backward",
        "model": arguments.model,
        "parameters": sum(p.numel() for p in named.values()),
        "chunks": layout.n_chunks,
        "moments": len(woven.moments),
        "wanted": {"trace": WANTED_TRACE_S, "plan": WANTED_PLAN_S},
        "seconds": seconds,
        "command": " ".join(["python", "benchmarks/planning.py", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    for name, taken in seconds.items():
        print(f"{name}: median {statistics.median(taken):.3f} s, {min(taken):.3f} to {max(taken):.3f}")
    if arguments.write:
        (Path(__file__).parent / "results" / "planning.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
