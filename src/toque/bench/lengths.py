"""How long prompts and answers are: one number, or a distribution that a seed makes repeatable."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Literal

from toque.errors import ConfigError

_LARGEST = 1_000_000
_FORMS = "128, 64-256, normal:128,32 or lognormal:128,64 (mean and standard deviation, in tokens)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers of at least 1. ``uniform`` includes both ends; the two normals have mean ``a`` and standard
    deviation ``b`` of the length itself before rounding and before what is below 1 becomes 1."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Read what a command line says. Raises ConfigError, which names ``flag``."""
        wrong = ConfigError(f"{flag} must be like {_FORMS}, got {text[:80]!r}", param=flag)
        if match := re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text):
            low, high = int(match[1]), int(match[2] or match[1])
            if not 1 <= low <= high <= _LARGEST:
                raise wrong
            return cls("uniform", low, high) if match[2] else cls("fixed", low)
        if match := re.fullmatch(r"(normal|lognormal):(\d{1,7}(?:\.\d+)?),(\d{1,7}(?:\.\d+)?)", text):
            mean, deviation = float(match[2]), float(match[3])
            if not 1 <= mean <= _LARGEST or deviation > _LARGEST:
                raise wrong
            return cls("normal" if match[1] == "normal" else "lognormal", mean, deviation)
        raise wrong

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "normal":
            return max(1, round(rng.gauss(self.a, self.b)))
        spread = math.log(1 + (self.b / self.a) ** 2)  # of the logarithm, from the moments of the length
        return max(1, round(rng.lognormvariate(math.log(self.a) - spread / 2, math.sqrt(spread))))

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.a:g}"
        if self.kind == "uniform":
            return f"{self.a:g}-{self.b:g}"
        return f"{self.kind}:{self.a:g},{self.b:g}"
