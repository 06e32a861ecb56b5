"""`datasvc train | runs | report`: run the training program, and read the logs of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from datasvc.cli.terminal.output import JsonOption, RepoOption, print_facts, print_json, print_line, print_table

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="NAME/ID, or NAME for the newest run of this name.")]

app = typer.Typer(no_args_is_help=True, help="Logs of training runs: curves, events, outcomes.")


# The program parses all options itself, including `--help`.
PARSED_BY_PROGRAM: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def ls(
    repo: RepoOption,
    name: Annotated[str | None, typer.Argument(help="Only runs of this name.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Only so many of the newest runs.")] = 50,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many of these, the newest ones.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """List training runs, newest first.

    Example: datasvc runs ls digits-cnn --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.runs import list_runs
    from datasvc.views.run_words import time_text

    runs = list_runs(Repository.open(repo), name, last=last)[skip:]
    if as_json:
        print_json([run.to_dict() for run in runs])
        return
    rows = [
        (run.ref, run.state, run.step or 0, run.num_attempts, run.world_size or "", time_text(run.started_s),
         time_text(run.last_s), run.versions[-1] if run.versions else "")
        for run in runs
    ]  # fmt: skip
    print_table(["run", "state", "step", "attempts", "ranks", "started", "last written", "newest version"], rows)


@app.command()
def show(run: RunArgument, repo: RepoOption, as_json: JsonOption = False) -> None:
    """Show a training run: its outcome, problems, last metrics, and where its time went.

    Example: datasvc runs show digits-cnn --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.runs import read_run, resolve_run
    from datasvc.views.run_words import facts, mean_times, warnings
    from datasvc.views.view import fact_texts

    repository = Repository.open(repo)
    history = read_run(repository, *resolve_run(repository, run))
    if as_json:
        print_json(history.to_dict())
        return
    print_facts(fact_texts(facts(history)))
    for problem in (*warnings(history), *history.problems):
        print_line(f"problem: {problem}")
    means = {name: f"{1000 * value:.2f} ms" for name, value in mean_times(history).items()}
    last = {
        name: f"{series.values[-1]:.6g} at step {series.steps[-1]}" for name, series in history.evaluation.items()
    }
    shown = {name: value for name, value in history.summary.latest.items() if name not in means}
    print_facts({name: values for name, values in
                 {"newest step": shown, "evaluation": last, "time of a step": means}.items() if values})  # fmt: skip


@app.command()
def forecast(
    run: RunArgument,
    target: Annotated[float, typer.Argument(help="Value to which the curve should fall.")],
    repo: RepoOption,
    curve: Annotated[str, typer.Option(help="Curve of the steps or metric of the evaluations.")] = "loss",
    as_json: JsonOption = False,
) -> None:
    """Show when a run is expected to reach a loss, with a 90 % interval, from its curve so far.

    Example: datasvc runs forecast digits-cnn 0.05 --repo ./repo
    """
    from datasvc.repository import Repository
    from datasvc.runs import read_run, resolve_run

    repository = Repository.open(repo)
    found = read_run(repository, *resolve_run(repository, run)).forecast(target, curve)
    if as_json:
        print_json(found.to_dict())
    else:
        print_line(str(found))


@app.command()
def signal(
    run: RunArgument,
    repo: RepoOption,
    name: Annotated[str | None, typer.Argument(help="Signal, such as loss; without it, list the signals.")] = None,
    data: Annotated[
        str | None, typer.Option(metavar="SPLIT", help="One of the splits that it read, such as pets@3/train.")
    ] = None,
    num: Annotated[int, typer.Option("-n", min=1, help="Number of samples with the largest values.")] = 24,
    as_json: JsonOption = False,
) -> None:
    """Show the last epoch of a signal, such as the losses: the distribution, and the samples with the largest values.

    Example: datasvc runs signal digits-cnn loss --repo ./repo
    """
    from datasvc.api import DataRepository

    runs = DataRepository.open(repo).runs
    if name is None:
        names = runs.signals(run)
        if as_json:
            print_json(names)
        else:
            print_table(["signal"], [(each,) for each in names])
        return
    found = runs.signal_summary(run, name, data=data, count=num)
    if as_json:
        print_json(found.to_json())
        return
    nonfinite = f", {found.num_nonfinite:,} of them not finite" if found.num_nonfinite else ""
    print_facts(
        {"run": found.run, "data": found.data, "epoch": found.epoch,
         "values": f"{found.num_values:,} of {found.num_samples:,} samples{nonfinite}"}
    )  # fmt: skip
    print_table(
        ["from", "to", "values"], [(f"{each.start:.4g}", f"{each.stop:.4g}", each.num_values) for each in found.bins]
    )
    rows = [(each.number, each.key, each.class_name or "-", f"{each.value:.4g}") for each in found.largest]
    print_table(["number", "key", "class", name], rows)


def report(
    run: RunArgument,
    repo: RepoOption,
    html: Annotated[Path, typer.Option(metavar="FILE", help="Write the report to this file.")],
) -> None:
    """Write the report of a training run as one HTML file to send: curves, data, versions, configuration, diagnosis.

    Example: datasvc report digits-cnn --html digits-cnn.html --repo ./repo
    """
    from datasvc.cli.terminal.output import write_output_file
    from datasvc.repository import Repository
    from datasvc.runs import read_run, resolve_run

    repository = Repository.open(repo)
    history = read_run(repository, *resolve_run(repository, run))
    write_output_file(html, history.to_html().encode())
    print_line(f"wrote {html}")


def train(context: typer.Context) -> None:
    """Train a model, like `python -m datasvc.trainer`; `datasvc train --help` lists the options.

    Example: datasvc train --data digits@1 --repo ./repo --name digits-cnn

    Several ranks: datasvc-run -np 2 datasvc train ...
    """
    from datasvc.trainer.__main__ import main

    main(context.args, prog="datasvc train")
