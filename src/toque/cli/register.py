"""`toque register`: make a training run's output, a file, or what any reference stands for a version of a model."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("source")
@click.option("--model", required=True, help="The model that it becomes the next version of.")
@click.option("--parent", default="", metavar="REF", help="What it was made from, such as smollm2@v1.")
@click.option("--alias", default="", help="An alias that points to it as soon as it is complete.")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Repeatable.")
@click.option(
    "--dataset",
    "datasets",
    multiple=True,
    metavar="NAME|PATH",
    help="What it was trained on; the digest of a path is kept. Repeatable.",
)
@click.option("--metric", "metrics", multiple=True, metavar="NAME=NUMBER", help="An evaluation. Repeatable.")
@click.option("--git-commit", default="", help="The code's revision.  [default: of DIR's work tree]")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print the version as JSON.")
def command(
    source: str,
    model: str,
    parent: str,
    alias: str,
    tags: tuple[str, ...],
    datasets: tuple[str, ...],
    metrics: tuple[str, ...],
    git_commit: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Register SOURCE as the next version of a model: a folder, a GGUF file, or a reference as for `toque pull`.

    Of an output folder of Hugging Face's Trainer, TRL or PEFT, the lineage is read from its own files: parameters,
    metrics, evaluations, data sets, base model. A version never changes; the same files again are no new one.
    """
    from toque.cli.progress_bar import progress_bar
    from toque.cli.proposals import propose
    from toque.errors import RequestError
    from toque.registry.card import number
    from toque.registry.registry import Registry
    from toque.registry.training import dataset_input
    from toque.registry.version import EvalResult

    evaluations = []
    for name, text in pairs(metrics, "--metric").items():
        try:
            value = number(float(text))
        except ValueError:
            value = None
        if value is None:
            raise RequestError(f"--metric {name}: {text[:40]!r} is not a number", param="metric")
        evaluations.append(EvalResult(name, value, source="toque register"))
    inputs = tuple(map(dataset_input, datasets))
    labels = pairs(tags, "--tag")
    with progress_bar(enabled=not quiet and sys.stderr.isatty()) as report, Registry() as registry:
        done = registry.register(
            source,
            model,
            parent=parent,
            alias=alias,
            tags=labels,
            inputs=inputs,
            evaluations=tuple(evaluations),
            git_commit=git_commit,
            report=report,
        )
        proposed = propose(registry, model, alias, done.version) if alias else []
    version = done.version
    if as_json:
        click.echo(
            json.dumps({**version.to_dict(), "created": done.created, "path": str(done.path)}, indent=2)
        )
        return
    what = "registered" if done.created else "already registered as"
    aliases = f" ({', '.join(f'{model}@{name}' for name in version.aliases)})" if version.aliases else ""
    click.echo(f"{what} {version.reference}{aliases}: {version.size / 1e6:.1f} MB, {version.digest[:12]}")
    for name in proposed:
        click.echo(f"a rollout of {name} is proposed: toque rollout start {name}")
    if version.problem:
        click.echo(f"note: Toque cannot run it yet: {version.problem}", err=True)


def pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    """NAME=VALUE options as a mapping; a ConfigError-like usage message for anything else."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, got {text[:60]!r}", param_hint=option)
        found[name] = value
    return found
