"""Regenerates src/toque/proto/*_pb2.py(i) from the .proto files: ``python proto/generate.py [--out FOLDER]``.

Needs grpcio-tools (in the dev extra). The result is committed; a test checks that it is up to date.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("toque/replica/v1/replica.proto", "grpc/health/v1/health.proto")


def generate(out: Path) -> list[Path]:
    """Writes the generated modules into ``out`` and returns their paths."""
    written = []
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE}"),
                *(f"--python_out={scratch}", f"--pyi_out={scratch}", *SOURCES),
            ],
            cwd=HERE,
            check=True,
        )
        for made in sorted([*Path(scratch).rglob("*_pb2.py"), *Path(scratch).rglob("*_pb2.pyi")]):
            target = out / made.name
            shutil.copyfile(made, target)
            written.append(target)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE.parent / "src" / "toque" / "proto")
    for path in generate(parser.parse_args().out):
        print(path)
