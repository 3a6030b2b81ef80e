"""The verb `cluster`: what a scheduling policy makes of a workload, and of jobs that run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from patrickstar.cli import flags
from patrickstar.cli.display import print_table
from patrickstar.elastic.ray_cluster import RayCluster
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from patrickstar.cluster.simulation import Outcome


@click.group()
@flags.debug_option
def cluster() -> None:
    """Schedule elastic jobs: try policies on a workload, or run jobs that share GPUs."""


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

    policies = {one: find_policy(one) for one in (POLICIES if name == "all" else [name])}
    if name == "all" and given["events"]:
        raise ConfigError("--events is of one policy: give its name, not `--policy all`")
    if given["report"] and find_spec("matplotlib") is None:
        raise ConfigError("--report needs matplotlib for its picture: pip install 'patrickstar[cluster]'")
    sizes = {"gpus": given["gpus"], "gpus_per_node": given["gpus_per_node"]}
    jobs = read_workload(workload, **sizes, profiles=given["profiles"])
    of = Cluster(**sizes, start_s=given["start_seconds"], resize_s=given["resize_seconds"])
    how = {"cluster": of, "tick_s": given["tick"], "seed": given["seed"]}
    found = {one: run(jobs, policy, **how) for one, policy in policies.items()}
    told = [figures(outcome, policy=one, seed=given["seed"]) for one, outcome in found.items()]
    if given["report"]:
        from patrickstar.cluster.report import page

        given["report"].write_text(page(found, told), encoding="utf-8")
        write_picture(given["report"].with_suffix(".png"), found, told)
    if given["events"]:
        given["events"].write_text("".join(json.dumps(event) + "\n" for event in found[name].events))
    if given["as_json"]:
        click.echo(json.dumps(told if name == "all" else told[0], allow_nan=False))
    else:
        click.echo(f"{len(jobs)} jobs on {of.gpus} GPUs, simulated (JCT: from submission to end)")
        print_table([*table(told)], flush_left=9)


def write_picture(path: Path, outcomes: Mapping[str, Outcome], told: Sequence[Mapping[str, Any]]) -> None:
    """Writes means, times of jobs, and GPUs held over time, by policy, as a PNG; needs matplotlib, the extra `cluster`."""
    import numpy as np
    from matplotlib.figure import Figure

    from patrickstar.cluster.figures import timeline

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    means, times, load = figure.subplots(1, 3)
    for number, ((name, outcome), one) in enumerate(zip(outcomes.items(), told, strict=True)):
        jct = np.sort([job["jct"] for job in one["jobs"]])
        moments, held, _ = timeline(outcome)
        means.barh(name, one["mean_jct"], color=f"C{number}")
        times.step(jct, np.arange(1, len(jct) + 1) / len(jct), where="post", color=f"C{number}", label=name)
        load.step(moments / 3600, held, where="post", color=f"C{number}", linewidth=0.8)
    means.invert_yaxis()
    means.set(xlabel="mean job completion time, s (simulated)")
    times.set(xscale="log", xlabel="job completion time, s", ylabel="share of jobs")
    times.legend(fontsize=8)
    load.set(xlabel="hours", ylabel="GPUs held", ylim=(0, None))
    figure.savefig(path, dpi=110, metadata={"Software": None})


_jobs_options = flags.all_of(
    click.argument("jobs_file", metavar="JOBS.yaml", type=click.Path(path_type=Path)),
    click.option("--policy", "name", metavar="NAME", default="soonest", show_default=True, help="As in `simulate`."),
    flags.path("--report", "FILE.html", says="A page with pictures and tables."),
    click.option("--resume", is_flag=True, help="Go on with what was ended or killed."),
    flags.debug_option,
)


@cluster.command()
@flags.whole_number("--gpus", says="GPUs of this machine, or its slots; the file's own by default.")
@_jobs_options
def share(jobs_file: Path, gpus: int | None, **given: Any) -> int:
    """Run jobs that share the GPUs of this machine. JOBS.yaml may be edited meanwhile; all else is in JOBS.share beside it."""
    return _run_jobs(jobs_file, gpus, **given)


@cluster.command()
@click.option("--address", metavar="ADDR", help="Of the cluster; by default RAY_ADDRESS, or that of this machine.")
@click.option(
    "--resources", metavar="JSON", help="What a rank takes of a node, such as '{\"rank\": 1}'; a GPU by default."
)
@_jobs_options
def ray(jobs_file: Path, address: str | None, resources: str | None, **given: Any) -> int:
    """Run jobs as `share` does, on nodes of a Ray cluster, which may come and go, and must all see the directory of JOBS.yaml."""
    return _run_jobs(jobs_file, None, RayCluster(address, resources), **given)


def _run_jobs(
    jobs_file: Path, gpus: int | None, nodes: RayCluster | None = None, *, name: str, report: Path | None, resume: bool
) -> int:
    from patrickstar.cluster.figures import figures
    from patrickstar.cluster.job_view import Cluster
    from patrickstar.cluster.policies.catalogue import find_policy
    from patrickstar.cluster.report import page
    from patrickstar.sharing.dispatcher import Dispatcher
    from patrickstar.sharing.elastic_runs import ElasticRuns
    from patrickstar.sharing.jobs_file import read_jobs
    from patrickstar.sharing.sharing_directory import SharingDirectory

    policy = find_policy(name)
    most, jobs = read_jobs(jobs_file, gpus=gpus, otherwise=1 << 16 if nodes else None)  # all that nodes have
    directory = SharingDirectory(jobs_file.with_suffix(".share"))
    with directory.held(resume=resume, say=click.echo) as lock:
        executor = ElasticRuns(directory.path, gpus=most, lock=lock, nodes=nodes)
        gpus = executor.gpus
        click.echo(f"{len(jobs)} jobs on {gpus} GPUs or slots, {name}; state and output in {directory.path}")
        dispatcher = Dispatcher(
            path=jobs_file,
            policy=policy,
            cluster=Cluster(gpus=gpus, gpus_per_node=max(1, gpus), start_s=10.0),
            executor=executor,
            directory=directory,
            say=click.echo,
            limit=most,
        )
        dispatcher.run(resume=resume)
    rows: list[tuple[str, ...]] = [("job", "state", "submitted", "started", "predicted end", "end", "resizes")]
    for key, job in dispatcher.jobs.items():
        times = (job.submit, job.start, job.predicted, job.finish)
        rows.append((key, job.state, *("-" if t is None else f"{t:.1f} s" for t in times), str(job.resizes)))
    print_table(rows, flush_left=7)
    outcome = dispatcher.outcome()
    if report and outcome.jobs:
        told = [figures(outcome, policy=name, seed=0)]
        report.write_text(page({name: outcome}, told, is_simulated=False), encoding="utf-8")
    return int(any(job.state == "failed" for job in dispatcher.jobs.values()))


@cluster.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("job", required=False)
@flags.debug_option
def why(directory: Path, job: str | None) -> None:
    """Say what each job that is shared in DIR has, waits for, and would gain by one GPU more."""
    from patrickstar.sharing.sharing_directory import SharingDirectory, explain

    click.echo("\n".join(explain(SharingDirectory(directory).read(), job)))


@cluster.command()
@flags.debug_option
def policies() -> None:
    """List the policies, where each comes from, and what it knows."""
    from patrickstar.cluster.policies.catalogue import POLICIES

    rows = [(name, one.source, "yes" if one.resizes else "no", one.knows) for name, one in POLICIES.items()]
    print_table([("name", "source", "resizes", "knows"), *rows], flush_left=4)
