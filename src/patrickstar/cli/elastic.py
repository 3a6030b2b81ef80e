"""The verb `elastic`: runs a job whose ranks come and go, changes their number, and says how it stands."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from patrickstar.cli.flags import path, whole_number
from patrickstar.config.kinds import refuse


@click.group()
def elastic() -> None:
    """Train on as many ranks as there are now, with the same bits: `elastic run`, `resize`, `status`."""


@elastic.command(context_settings={"ignore_unknown_options": True})
@whole_number("--min", 1, says="The fewest ranks.")
@whole_number("--max", 1, says="The most ranks.")
@whole_number("--size", says="Ranks to begin with; the fewest by default.")
@whole_number("--save-every", 0, least=0, says="Steps from checkpoint to checkpoint; 0: none.")
@path("--job-dir", "DIR", says="Log, checkpoints, and where others find the job; made anew by default.")
@whole_number(
    "--warm", least=0, says="Processes that wait beside the ranks; by default as many as may come to be ranks."
)
@whole_number("--threads", says="Threads of each rank, at every size; cores / max by default.")
@click.option("--at", metavar="STEP:N,...", default="", help="Resizes planned beforehand.")
@click.option("--ray", "address", hidden=True)  # `cluster ray` gives these
@click.option("--resources", hidden=True)
@click.option("--replace", is_flag=True, help="Start another process for one that is lost.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], at: str, address: str | None, resources: str | None, **given: Any) -> int:
    """Run a program as an elastic job: `patrickstar elastic run --min 1 --max 4 -- python train.py`."""
    least, most = given["min"], given["max"]
    size = given["size"] or least
    sizes = [one.partition(":")[::2] for one in at.split(",") if one]
    problems = []
    if least > most:
        problems.append(f"--min {least} --max {most}: the fewest ranks are at most as many as the most")
    elif not least <= size <= most:
        problems.append(f"--size {size}: from {least} to {most} is expected")
    problems += [
        f"--at {step}:{ranks}: STEP:N is expected, with N from {least} to {most}"
        for step, ranks in sizes
        if not (step.isdigit() and ranks.isdigit() and least <= int(ranks) <= most)
    ]
    refuse(problems, of="elastic run")
    from patrickstar.elastic.job_directory import JobDirectory
    from patrickstar.elastic.rank_process import threads_of
    from patrickstar.elastic.ray_cluster import RayCluster
    from patrickstar.elastic.supervisor import JobRequest, Supervisor

    nodes = RayCluster(address, resources) if address else None
    directory = JobDirectory(
        given["job_dir"] or Path("runs") / f"elastic-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    request = JobRequest(
        command=command,
        least=least,
        most=most,
        size=size,
        warm=most if given["warm"] is None else given["warm"],
        threads=given["threads"] or threads_of(most),
        save_every=given["save_every"],
        replaces=given["replace"],
        planned=at,
    )
    click.echo(f"job in {directory.path}", err=True)
    return Supervisor(request, directory, nodes).run()


@elastic.command()
@click.argument("job_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("ranks", metavar="N", type=int)
@whole_number("--batch", says="Samples of a step from there on, of a job whose batches grow.")
def resize(job_dir: Path, ranks: int, batch: int | None) -> int:
    """Have the job in DIR go on with N ranks, from the next step on that all agree on."""
    from patrickstar.elastic.job_directory import JobDirectory

    JobDirectory(job_dir).ask({"do": "resize", "size": ranks, "batch": batch})
    return 0


@elastic.command()
@click.argument("job_dir", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(job_dir: Path, as_json: bool) -> int:
    """Say how the job in DIR stands."""
    from patrickstar.elastic.job_directory import JobDirectory

    known = JobDirectory(job_dir).ask({"do": "status"})
    if as_json:
        click.echo(json.dumps(known))
        return 0
    change = "" if known["want"] == known["size"] else f", {known['want']} asked for"
    click.echo(
        f"{known['size']} ranks of {known['min']} to {known['max']}{change}; {len(known['waiting'])} wait; at step {known['step']}"
    )
    click.echo(f"newest checkpoint: {known['checkpoint'] or 'none'}")
    return 0
