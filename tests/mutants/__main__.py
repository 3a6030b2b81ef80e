"""`python -m tests.mutants`: runs every mutant, or those named, and prints which test caught it. Exit code 1 where one survives."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import click

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import apart, copy_of_the_library, run_mutant, run_tests

# A mutant's tests take a fraction of what all of them take together: beyond this, they hang.
SLOWEST_S = 30.0


@click.command()
@click.argument("names", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="Print the mutants and their tests, and run nothing.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Mutants that run at once.")
def main(names: Sequence[str], listing: bool, jobs: int) -> None:
    """Break a copy of the library, one fault after the other, and see that tests notice."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"there is no mutant {', '.join(unknown)}; --list prints them")
    mutants = [known[name] for name in names] or list(MUTANTS)
    if listing:
        for mutant in mutants:
            click.echo(f"{mutant.name}\n    {mutant.place}")
            for test in mutant.tests:
                click.echo(f"    {test}")
        return
    sys.exit(run_all(mutants, jobs=jobs))


def run_all(mutants: Sequence[Mutant], *, jobs: int = 1) -> int:
    """Runs the tests on the library as it is, and then on each mutant. 0 where all of them were caught."""
    began = time.perf_counter()
    width = max(len(mutant.name) for mutant in mutants)
    alive: list[str] = []
    with copy_of_the_library() as copy, ThreadPoolExecutor(jobs) as pool:
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        seconds = 0.0
        for selected in filter(None, apart(tests)):
            run = run_tests(selected, copy)
            if not run.green:
                click.echo(f"{run.output}\nThe library as it is does not pass the tests that are to find its mutants.")
                return 1
            seconds += run.seconds
        click.echo(f"{len(tests)} selected tests pass on the library as it is, in {seconds:.0f} s")
        one = partial(run_mutant, unspoiled=copy, limit_s=SLOWEST_S + seconds)
        for mutant, verdict in zip(mutants, pool.map(one, mutants), strict=True):
            click.echo(f"{mutant.name:{width}}  {verdict.seconds:4.1f} s  {verdict.by}")
            if verdict.reason:
                click.echo(f"{'':{width}}          {verdict.reason}")
            if not verdict.caught:
                alive.append(mutant.name)
    click.echo(f"{len(mutants) - len(alive)} of {len(mutants)} caught in {time.perf_counter() - began:.0f} s")
    if alive:
        click.echo("not caught: " + ", ".join(alive))
    return 1 if alive else 0


if __name__ == "__main__":
    main()
