"""Prints how long the source files are: mean and largest. Long files are split by noun."""

from __future__ import annotations

import subprocess
from pathlib import Path

files = subprocess.run(
    ["git", "ls-files", "src/*.py", "native/*.cc", "native/*.h"], capture_output=True, text=True, check=True
).stdout.split()
sizes = sorted((len(Path(f).read_text(encoding="utf-8").splitlines()), f) for f in files if "_pb2" not in f)
counted = [n for n, _ in sizes if n]
longest, name = sizes[-1]
print(
    f"line budget: {len(counted)} files, mean {sum(counted) / len(counted):.0f}, largest {longest} ({name})"
)
