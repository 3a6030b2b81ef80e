"""One page about simulations, in HTML that needs no network: who had which GPUs, the queue, times of jobs, and a table of policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any, Final

import numpy as np

from patrickstar.cluster.figures import table, timeline
from patrickstar.cluster.simulation import Outcome

WIDTH: Final = 1100
STYLE: Final = """body{font:14px system-ui,sans-serif;max-width:1140px;margin:2em auto;padding:0 1em;background:#fff;color:#222}
table{border-collapse:collapse}td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}
tr:first-child{font-weight:bold}svg{display:block;margin:.4em 0;background:#fafafa}svg text{font-size:11px;fill:#555}
.l{fill:none;stroke-width:1.5}rect:hover{stroke:#000}"""
COLOURS: Final = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2")


def page(outcomes: Mapping[str, Outcome], told: Sequence[Mapping[str, Any]], *, is_simulated: bool = True) -> str:
    """The page, of outcomes by policy and the figures of each in the same order."""
    some = next(iter(outcomes.values()))
    costs = f"{some.cluster.start_s:g} s a start, {some.cluster.resize_s:g} s a resize"
    how = f"Simulated, seed {told[0]['seed']}: {costs}." if is_simulated else "Jobs that ran, as they were measured."
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Scheduling</title>',
        f"<style>{STYLE}</style></head><body><h1>{len(some.jobs)} jobs on {some.cluster.gpus} GPUs</h1>",
        f"<p>{how}</p>",
        "<table>",
        *(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table(told)),
        "</table><h2>Times of jobs, from submission to end</h2>",
        *_distribution(told),
    ]
    for name, outcome in outcomes.items():
        parts += [f"<details {'open' if len(outcomes) == 1 else ''}><summary><b>{escape(name)}</b></summary>"]
        parts += ["<h3>Jobs over GPUs</h3>", *_gantt(outcome), "<h3>GPUs held, and jobs that wait</h3>"]
        parts += [*_queue(outcome), "</details>"]
    return "\n".join([*parts, "</body></html>", ""])


def _distribution(told: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Shares of jobs that have ended within a time, on a logarithmic axis."""
    spent = {one["policy"]: np.sort([job["jct"] for job in one["jobs"]]) for one in told}
    low, high = (np.log10(edge(list(map(edge, spent.values())))) for edge in (min, max))
    span = max(float(high - low), 1e-9)
    yield f'<svg width="{WIDTH}" height="240">'
    for power in range(int(np.ceil(low)), int(high) + 1):
        yield f'<text x="{(power - low) / span * WIDTH:.0f}" y="236">{10**power:g} s</text>'
    for number, (name, jct) in enumerate(spent.items()):
        colour = COLOURS[number % len(COLOURS)]
        shares = 220 - 210 * np.arange(1, len(jct) + 1) / len(jct)
        yield _line(zip(((np.log10(jct) - low) / span * WIDTH).tolist(), shares.tolist(), strict=True), colour, name)
        yield f'<text x="10" y="{16 + 14 * number}" style="fill:{colour}">{escape(name)}</text>'
    yield "</svg>"


def _gantt(outcome: Outcome) -> Iterator[str]:
    """A bar for every run of neighbouring GPUs that a job holds for a while, with its size and reason under the pointer."""
    begin, end = min(job.submission.submit for job in outcome.jobs), max(job.finish for job in outcome.jobs)
    scale, height = WIDTH / (end - begin), max(4, 400 // outcome.cluster.gpus)
    hues = {job.submission.name: number * 47 % 360 for number, job in enumerate(outcome.jobs)}
    yield f'<svg width="{WIDTH}" height="{height * outcome.cluster.gpus}">'
    held: dict[str, dict[str, Any]] = {}
    for event in outcome.events:
        if event["event"] != "allocate":
            continue
        before = held.get(event["job"])
        held[event["job"]] = event
        if not before or event["t"] == before["t"]:
            continue
        what = f"{event['job']}: {len(before['gpus'])} GPUs, {before['batch']:.3g} x its batch, "
        what += f"{before['t']:.0f} to {event['t']:.0f} s: {before['why']}"
        for _, run in groupby(enumerate(before["gpus"]), key=lambda pair: pair[1] - pair[0]):
            gpus = [gpu for _, gpu in run]
            x, width = (before["t"] - begin) * scale, (event["t"] - before["t"]) * scale
            place = f'x="{x:.1f}" y="{gpus[0] * height}" width="{width:.2f}" height="{len(gpus) * height}"'
            yield f'<rect {place} fill="hsl({hues[event["job"]]} 55% 62%)"><title>{escape(what)}</title></rect>'
    yield "</svg>"


def _queue(outcome: Outcome) -> Iterator[str]:
    moments, held, waiting = timeline(outcome)
    x = (moments - moments[0]) / (moments[-1] - moments[0]) * WIDTH
    yield f'<svg width="{WIDTH}" height="140">'
    for values, most, colour, name in (
        (held, outcome.cluster.gpus, COLOURS[0], "GPUs held"),
        (waiting, max(1, waiting.max()), COLOURS[2], "jobs that wait"),
    ):
        points = zip(np.repeat(x, 2)[1:].tolist(), (125 - 105 * np.repeat(values, 2)[:-1] / most).tolist(), strict=True)
        yield _line(points, colour, name)
        yield f'<text x="{10 if colour == COLOURS[0] else 200}" y="14" style="fill:{colour}">{name}, up to {most}</text>'
    yield "</svg>"


def _line(points: Iterable[tuple[float, float]], colour: str, name: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="l" stroke="{colour}" points="{path}"><title>{escape(name)}</title></polyline>'
