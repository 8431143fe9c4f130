"""How long the registry takes: to list 10,000 versions, to find one, to move an alias.

python -m benchmarks.registry [--url postgresql://…]     # default: SQLite in a temporary folder
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

from sqlalchemy import insert

from toque.registry.database import RegistryDatabase
from toque.registry.record import StoredFile
from toque.registry.tables import model_version
from toque.registry.version import ModelVersion, Status

VERSIONS = 10_000
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="")
    url = parser.parse_args().url
    with tempfile.TemporaryDirectory() as folder:
        database = RegistryDatabase(url or f"sqlite:///{folder}/registry.db")
        fill(database)
        print(
            f"{database.dialect}, {VERSIONS} versions, medians of {ROUNDS} (ms): on the clock, of this process on a CPU"
        )
        show("list every version", lambda: database.versions("bench"))
        show("list the models", database.models)
        show("find a version", lambda: database.find("bench", VERSIONS // 2))
        show("find by alias", lambda: database.aliased("bench", "live"))
        moves = iter(range(1, VERSIONS))
        show("move an alias", lambda: database.move_alias("bench", "live", next(moves)))
        database.close()


def fill(database: RegistryDatabase) -> None:
    files = tuple(StoredFile(f"model-{n:05}-of-00004.safetensors", 10**9, f"{n}" * 64) for n in range(4))
    draft = ModelVersion(
        "bench", 0, Status.PENDING, "a" * 64, 4 * 10**9, time.time_ns() // 1000,
        created_by="bench@host", source_uri="file:/models/out", format="safetensors", arch="llama", params=10**9,
        quantization="BF16", context_length=8192, license="Apache-2.0", base_model="base/1", base_relation="finetune",
        files=files, card={"tags": ["a", "b"], "license": "apache-2.0"}, tags={"team": "x"},
    )  # fmt: skip
    database.add(draft)
    database.ready("bench", 1, alias="live")
    with database.write() as connection:
        row = dict(connection.execute(model_version.select()).mappings().one())
        connection.execute(insert(model_version), [row | {"version": n} for n in range(2, VERSIONS + 1)])


def show(what: str, act: Callable[[], object]) -> None:
    act()
    walls, cpus = [], []
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        act()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    print(f"  {what:<20} {statistics.median(walls) * 1e3:8.2f} {statistics.median(cpus) * 1e3:8.2f}")


if __name__ == "__main__":
    main()
