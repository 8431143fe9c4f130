"""Version 2 of a model takes over while clients stream answers: ``python examples/rollout_under_load.py chat v2.gguf``.

Needs a server, such as ``toque serve chat=smollm2``. Starts traffic from the official client, rolls the deployment out
to the second argument (a file, a folder, a name or an alias) and back, and says what the clients saw of it: nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from traffic import Traffic


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("deployment")
    parser.add_argument("model")
    parser.add_argument("--url", default=os.environ.get("TOQUE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--key", default="none")
    parser.add_argument("--strategy", default="auto", choices=["auto", "surge", "canary", "swap"])
    parser.add_argument("--keep", action="store_true", help="stay on the new version")
    given = parser.parse_args()
    path = Path(given.model)
    model = str(path.absolute()) if path.exists() else given.model
    with Traffic(given.url, given.key, given.deployment) as traffic:
        time.sleep(2)
        print(f"before:   {traffic.line()}")
        policy = {"strategy": given.strategy, "steps": [0.25, 0.5], "step_s": 5, "min_requests": 20}
        _call(given, f"rollouts/{given.deployment}", {"model": model, "policy": policy})
        ended = _follow(given)
        print(
            f"to {ended['new']}: {ended['phase']}{ended['reason'] and ' (' + ended['reason'] + ')'}; {traffic.line()}"
        )
        if not given.keep and ended["phase"] == "done":
            _call(given, f"rollouts/{given.deployment}/undo", {})
            back = _follow(given)
            print(f"back to {back['new']}: {back['phase']}; {traffic.line()}")
    print(f"in all:   {traffic.line()}")
    for failure in traffic.failures[:5]:
        print(f"  {failure}", file=sys.stderr)
    return 1 if traffic.failures or ended["phase"] != "done" else 0


def _follow(given: argparse.Namespace) -> Any:
    """The rollout at its end, one line for each of its steps."""
    last = ""
    while True:
        seen = _call(given, f"rollouts/{given.deployment}", None)
        line = f"  {seen['phase']}, {seen['share']:.0%} of the requests to {seen['new']}"
        if line != last:
            print(line, flush=True)
            last = line
        if seen["phase"] in ("done", "returned"):
            return seen
        time.sleep(0.1)


def _call(given: argparse.Namespace, path: str, body: object) -> Any:
    request = urllib.request.Request(
        f"{given.url}/admin/v1/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {given.key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
