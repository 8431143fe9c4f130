"""A pull's progress on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from toque.registry.progress import Progress, Report, silent

_WORDS = {
    "wait": "waiting for another process",
    "download": "downloading",
    "verify": "checking",
    "upload": "storing",
}


@contextmanager
def progress_bar(*, enabled: bool) -> Iterator[Report]:
    """A report that draws one bar for each file and stage; silent when not ``enabled``."""
    if not enabled:
        yield silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[tuple[str, str], TaskID] = {}
    bars = Bars(*columns, console=Console(stderr=True))

    def report(progress: Progress) -> None:
        if not bars.live.is_started:  # nothing is drawn, not even an empty line, where nothing is pulled
            bars.start()
        key = (progress.stage, progress.file)
        if key not in tasks:
            tasks[key] = bars.add_task(f"{_WORDS[progress.stage]} {progress.file}", total=progress.total)
        bars.update(tasks[key], completed=progress.done, total=progress.total)

    try:
        yield report
    finally:
        if bars.live.is_started:
            bars.stop()
