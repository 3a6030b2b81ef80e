"""The verb `cluster`: what a scheduling policy makes of a workload."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from patrickstar.cli import flags
from patrickstar.errors import ConfigError


@click.group()
@flags.debug_option
def cluster() -> None:
    """Schedule elastic jobs: try policies on a workload."""


@cluster.command()
@click.argument("workload", metavar="TRACE.csv", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "name",
    metavar="NAME|all",
    default="soonest",
    show_default=True,
    help="`patrickstar cluster policies` lists the names; module:function takes your own.",
)
@flags.whole_number("--gpus", 64, says="GPUs of the cluster.")
@flags.whole_number("--gpus-per-node", 4, says="GPUs of a node.")
@flags.path("--profiles", "DIR", says="The tables of the Pollux artifact, for one of its workloads.")
@flags.seconds("--start-seconds", 30, says="A start, or a return after a stop, takes so long before work begins.")
@flags.seconds("--resize-seconds", 2, says="A change of a running job takes so long.")
@flags.seconds("--tick", 60, says="Seconds between two decisions where nothing else happens.", above=True)
@flags.whole_number("--seed", 0, least=0, says="What is drawn depends on it.")
@flags.path("--events", "FILE.jsonl", says="Every allocation, as JSON lines in order of time.")
@flags.path("--report", "FILE.html", says="A page with pictures and tables, and one picture beside it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object (with `all`, a list) instead of a table.")
@flags.debug_option
def simulate(workload: Path, name: str, **given: Any) -> None:
    """Say what a workload would have been like under a policy, or under all of them."""
    from patrickstar.cluster.figures import figures, table
    from patrickstar.cluster.job_view import Cluster
    from patrickstar.cluster.policies.catalogue import POLICIES, find_policy
    from patrickstar.cluster.simulation import simulate as run
    from patrickstar.cluster.workload import read_workload

    names = list(POLICIES) if name == "all" else [name]
    policies = [find_policy(one) for one in names]
    if len(names) > 1 and given["events"]:
        raise ConfigError("--events is of one policy: give its name, not `--policy all`")
    if given["report"] and find_spec("matplotlib") is None:
        raise ConfigError("--report needs matplotlib for its picture: pip install 'patrickstar[cluster]'")
    sizes = {"gpus": given["gpus"], "gpus_per_node": given["gpus_per_node"]}
    jobs = read_workload(workload, **sizes, profiles=given["profiles"])
    of = Cluster(**sizes, start_s=given["start_seconds"], resize_s=given["resize_seconds"])
    found, told = {}, []
    for one, policy in zip(names, policies, strict=True):
        found[one] = run(jobs, policy, cluster=of, tick_s=given["tick"], seed=given["seed"])
        told.append(figures(found[one], policy=one, seed=given["seed"]))
    if given["report"]:
        from patrickstar.cli.report_picture import write_picture
        from patrickstar.cluster.report import page

        given["report"].write_text(page(found, told), encoding="utf-8")
        write_picture(given["report"].with_suffix(".png"), found, told)
    if given["events"]:
        given["events"].write_text("".join(json.dumps(event) + "\n" for event in found[name].events))
    if given["as_json"]:
        click.echo(json.dumps(told if name == "all" else told[0], allow_nan=False))
    else:
        click.echo(f"{len(jobs)} jobs on {of.gpus} GPUs, simulated (JCT: from submission to end)")
        click.echo("\n".join(_columns([*table(told)])))


@cluster.command()
@flags.debug_option
def policies() -> None:
    """List the policies, where each comes from, and what it knows."""
    from patrickstar.cluster.policies.catalogue import POLICIES

    rows = [(name, one.source, "yes" if one.resizes else "no", one.knows) for name, one in POLICIES.items()]
    click.echo("\n".join(_columns([("name", "source", "resizes", "knows"), *rows])))


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
