"""What to measure, as one value: the flags of `toque bench`, checked and turned into loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, get_args

from toque.bench.arrivals import Process
from toque.bench.dataset import Dataset, FromFile, Synthetic, WordRate
from toque.bench.lengths import Lengths
from toque.bench.run import ClosedLoop, Load, OpenLoop, Profile
from toque.bench.session import Sweep
from toque.errors import ConfigError

STANDARD = ("sequential", "concurrent", "shared-prefix")
PROFILES = ("synchronous", "concurrent", "constant", "poisson", "sweep")
SHARED_PREFIX, TURNS = 1000, "4"  # what the data sets of these names have where nothing is said
UNBOUNDED = 10_000_000  # requests, where a duration ends the run


@dataclass(frozen=True, slots=True)
class Plan:
    """Each field is the flag of that name; None or empty is "not given". Raises ConfigError for what is wrong."""

    loads: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    levels: int | None = None
    dataset: str = "random"
    inputs: str = "99"
    outputs: str = "64"
    prefix_tokens: int | None = None
    turns: str = ""
    requests: int | None = None
    duration: float | None = None
    seed: int = 0

    def validate(self, *, chat: bool) -> None:
        """Refuse what no load can be made of, before anything is started or sent."""
        self.check()
        self.build(WordRate(), chat=chat)

    def check(self) -> None:
        """Refuse flags that contradict each other, by name."""
        open_loops = [p for p in self.profiles if p in get_args(Process)]
        if self.loads and self.profiles:
            _refuse("--workload", "names a whole load; give it or --profile, not both")
        if open_loops and not self.rates:
            _refuse("--rate", f"is needed with --profile {open_loops[0]}")
        if self.rates and not open_loops:
            _refuse("--rate", "is for --profile constant and poisson")
        if self.levels is not None and "sweep" not in self.profiles:
            _refuse("--levels", "is for --profile sweep")
        if self.concurrency and self.profiles and not {"concurrent", "sweep"} & set(self.profiles):
            _refuse("--concurrency", "is for --profile concurrent and sweep")
        if len(self.concurrency) > 1 and ("sweep" in self.profiles or not self.profiles):
            _refuse("--concurrency", "takes several numbers only with --profile concurrent")
        if self.profiles:
            return
        given = {
            "--duration": self.duration is not None,
            "--prefix-tokens": self.prefix_tokens is not None,
            "--dataset": self.dataset != "random",
            "--turns": bool(self.turns),
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            _refuse(flag, "needs --profile; the standard loads have their own")

    def build(self, rate: WordRate, *, chat: bool) -> tuple[list[Load], Sweep | None]:
        """The loads in order, and the sweep if there is one. ``chat``: else the endpoint takes one prompt."""
        if not self.profiles:
            return self._standard(rate, chat), None
        dataset = self._dataset(self.dataset, rate, chat)
        duration = float("inf") if self.duration is None else self.duration
        requests = self.requests or (100 if self.duration is None else UNBOUNDED)
        profiles: list[Profile] = []
        sweep = None
        for kind in dict.fromkeys(self.profiles):
            if kind == "synchronous":
                profiles.append(ClosedLoop())
            elif kind == "concurrent":
                profiles += [ClosedLoop(n) for n in self.concurrency or (8,)]
            elif kind == "sweep":
                streams = self.concurrency[0] if self.concurrency else 64
                sweep = Sweep(dataset, requests, duration, streams, self.levels or 5)
            else:
                process: Process = "poisson" if kind == "poisson" else "constant"
                profiles += [OpenLoop(process, r) for r in self.rates]
        return [Load(str(p), dataset, p, requests, duration) for p in profiles], sweep

    def _standard(self, rate: WordRate, chat: bool) -> list[Load]:
        """The loads whose figures are published: one chat after another, many at once, a long common beginning."""
        streams = self.concurrency[0] if self.concurrency else None
        text = self._dataset("random", rate, chat)
        shared = self._dataset("shared-prefix", rate, chat)
        every = [
            Load("sequential", text, ClosedLoop(), self.requests or 20),
            Load("concurrent", text, ClosedLoop(streams or 100), self.requests or 100),
            Load("shared-prefix", shared, ClosedLoop(streams or 8), self.requests or 50),
        ]
        return [load for load in every if load.name in (self.loads or STANDARD)]

    def _dataset(self, name: str, rate: WordRate, chat: bool) -> Dataset:
        inputs = Lengths.parse(self.inputs, "--input-tokens")
        outputs = Lengths.parse(self.outputs, "--output-tokens")
        if name not in ("random", "shared-prefix", "multi-turn"):
            if not name.endswith(".jsonl"):
                _refuse(
                    "--dataset",
                    f"must be random, shared-prefix, multi-turn or a .jsonl file, got {name[:80]!r}",
                )
            file = FromFile.load(Path(name), outputs, str(self.seed))
            if not chat and not file.single_prompts:
                _refuse("--endpoint", f"completions takes one prompt a line, and {name} has conversations")
            return file
        turns = Lengths.parse(self.turns or (TURNS if name == "multi-turn" else "1"), "--turns")
        if not chat and str(turns) != "1":
            _refuse("--endpoint", "completions has no turns; --turns and multi-turn need chat")
        prefix = self.prefix_tokens
        if prefix is None:
            prefix = SHARED_PREFIX if name == "shared-prefix" else 0
        return Synthetic(inputs, outputs, prefix, turns, rate)


def _refuse(flag: str, why: str) -> NoReturn:
    raise ConfigError(f"{flag} {why}", param=flag.removeprefix("--").replace("-", "_"))
