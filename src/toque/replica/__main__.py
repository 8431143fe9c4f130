"""``python -m toque.replica --model PATH --name NAME --socket PATH``: one engine as a process."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from toque.engine.options import EngineOptions
from toque.errors import ConfigError, ModelError
from toque.file_state import check_state
from toque.proto import replica_pb2 as pb
from toque.replica.process import EXIT_REFUSED, Loaded, ReplicaOptions, run

if TYPE_CHECKING:
    from toque.engine.embedding_steps import EmbeddingSteps
    from toque.engine.engine import Engine


def load(model: Path, options: EngineOptions, digest: str, state: str = "") -> Loaded:
    """Reads the model and makes its engine. Heavy imports happen here, after the socket is listening.

    ModelError if the files are in another ``state`` than this, before or after they were read."""
    check_state(model, state)
    # numpy's BLAS starts a thread per core as it is imported, which then spin beside the backend's own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from toque.formats import load_checkpoint

    checkpoint = load_checkpoint(model)
    engine: Engine | EmbeddingSteps
    at_rest = None
    if checkpoint.config.pooling:
        from toque.engine.embedding import load_embedding_engine
        from toque.engine.embedding_steps import EmbeddingSteps

        engine = EmbeddingSteps(load_embedding_engine(checkpoint, options), options)
    else:
        from toque.engine.loader import load_engine

        engine = load_engine(checkpoint, options)
        # Sorting the vocabulary holds up streams (the library keeps the GIL for 0.1 to 1 s, by the vocabulary's size),
        # and takes longer than all else here: neither the start nor, if there is a quiet moment, a stream waits for it.
        at_rest = engine.warm_grammars
    try:
        check_state(model, state)
    except ModelError:
        engine.close()
        raise
    return Loaded(
        engine,
        pb.Model(
            architecture=checkpoint.config.architecture,
            parameters=checkpoint.parameters,
            quantization=options.quantize or checkpoint.quantization,
            context_length=engine.limits.context_length,
            vocab_size=checkpoint.config.vocab_size,
            digest=digest,
        ),
        options.max_sequences,
        at_rest,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m toque.replica", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a folder with safetensors")
    parser.add_argument("--name", default="replica", help="for logs and messages")
    parser.add_argument(
        "--socket", type=Path, required=True, help="where sessions connect; its folder is made 0700"
    )
    parser.add_argument("--grpc", default="", metavar="unix:PATH", help="serve gRPC there too")
    parser.add_argument(
        "--parent-pid", type=int, default=0, help="exit when this process, the parent, is gone"
    )
    parser.add_argument(
        "--lease-s", type=float, default=0.0, help="exit when nobody has had a session for so long"
    )
    parser.add_argument("--drain-s", type=float, default=30.0, help="grace for running requests on SIGTERM")
    parser.add_argument(
        "--stall-s", type=float, default=3.0, help="without a step for so long, it is degraded"
    )
    parser.add_argument(
        "--loaded-mark", type=Path, metavar="PATH", help="a file to make once the model is loaded"
    )
    parser.add_argument("--digest", default="", help="of the model version, passed on to clients")
    parser.add_argument("--state", default="", help="of the model's files; others are refused")
    engine = parser.add_argument_group("engine options")
    for field in dataclasses.fields(EngineOptions):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            engine.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            engine.add_argument(flag, type=type(field.default), default=field.default)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        options = EngineOptions(**{f.name: getattr(args, f.name) for f in dataclasses.fields(EngineOptions)})
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_REFUSED
    replica = ReplicaOptions(
        name=args.name,
        socket=args.socket,
        grpc=args.grpc,
        parent_pid=args.parent_pid,
        lease_s=args.lease_s,
        drain_s=args.drain_s,
        stall_s=args.stall_s,
        loaded_mark=args.loaded_mark,
    )
    return run(replica, lambda: load(args.model, options, args.digest, args.state))


if __name__ == "__main__":
    sys.exit(main())
