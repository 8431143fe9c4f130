"""An engine that only pretends, and a replica around it: what the wire and everything in front of it is tested with.

``python -m toque.replica.fake --socket PATH`` is a real replica process in everything but the model. The first token
of a prompt may be one of the numbers below: then the request misbehaves, like models and engines sometimes do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from toque.errors import ContextLengthError, ModelError, RequestError
from toque.proto import replica_pb2 as pb
from toque.replica.process import Loaded, ReplicaOptions, run
from toque.types import EngineRequest, EngineStats, FinishReason, SequenceOutput, TokenLogprob

REFUSED = 1_000_001  # `add` raises RequestError
FAILS = 1_000_002  # its own output carries an error, nobody else's does
BREAKS_STEP = 1_000_003  # `step` raises
KILLS = 1_000_004  # the process ends in the middle of a step
HANGS = 1_000_005  # the step takes a minute


class FakeEngine:
    """Answers a prompt with its own tokens, over and over, one per step for each request, ``max_running`` at once.

    ``step_s`` is how long a step takes. Requests end at ``max_tokens`` (16 when None) or at a stop id.
    """

    def __init__(self, *, step_s: float = 0.0, max_running: int = 64, context_length: int = 4096) -> None:
        self.context_length = context_length
        self._step_s = step_s
        self._max_running = max_running
        self._open: dict[
            str, tuple[EngineRequest, int]
        ] = {}  # request and tokens generated so far, by arrival
        self._steps = self._prompt_tokens = self._generated = 0
        self.closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add(self, request: EngineRequest) -> None:
        if not request.prompt or request.prompt[0] == REFUSED:
            raise RequestError("the engine does not like this prompt", param="prompt")
        if len(request.prompt) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt)} tokens, the context takes {self.context_length}",
                param="prompt",
            )
        self._prompt_tokens += len(request.prompt)
        self._open[request.request_id] = (request, len(request.generated))

    def abort(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def step(self) -> list[SequenceOutput]:
        running = list(self._open.items())[: self._max_running]
        first_tokens = {request.prompt[0] for _, (request, _) in running}
        if KILLS in first_tokens:
            os._exit(9)
        if HANGS in first_tokens:
            time.sleep(60)
        if BREAKS_STEP in first_tokens:
            raise ZeroDivisionError("a step that breaks")
        time.sleep(self._step_s)
        self._steps += 1
        return [self._advance(key, request, done) for key, (request, done) in running]

    def stats(self) -> EngineStats:
        running = min(len(self._open), self._max_running)
        return EngineStats(
            running=running,
            waiting=len(self._open) - running,
            kv_blocks_used=len(self._open),
            kv_blocks_total=1024,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
        )

    def close(self) -> None:
        self.closed = True

    def _advance(self, key: str, request: EngineRequest, done: int) -> SequenceOutput:
        sampling = request.sampling
        limit = 16 if sampling.max_tokens is None else sampling.max_tokens
        output = SequenceOutput(key, [])
        if request.prompt[0] == FAILS:
            output.finish_reason, output.error = FinishReason.ERROR, "this request failed"
        elif done < limit:
            output.tokens.append(request.prompt[done % len(request.prompt)])
            if output.tokens[0] in sampling.stop_token_ids:
                output.finish_reason, output.stop_token = FinishReason.STOP, output.tokens[0]
        if not done and sampling.prompt_logprobs is not None:
            output.prompt_logprobs = [
                None,
                *(_logprob(t, sampling.prompt_logprobs) for t in request.prompt[1:]),
            ]
        if sampling.logprobs is not None:
            output.logprobs = [_logprob(token, sampling.logprobs) for token in output.tokens]
        self._generated += len(output.tokens)
        if output.finish_reason is None and done + 1 >= limit:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            del self._open[key]
        else:
            self._open[key] = (request, done + 1)
        return output


def _logprob(token: int, n: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, tuple((token + i, -0.5 - i) for i in range(n)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m toque.replica.fake", description=__doc__)
    parser.add_argument("--name", default="fake")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--grpc", default="")
    parser.add_argument("--parent-pid", type=int, default=0)
    parser.add_argument("--lease-s", type=float, default=0.0)
    parser.add_argument("--drain-s", type=float, default=5.0)
    parser.add_argument("--stall-s", type=float, default=1.0)
    parser.add_argument("--loaded-mark", type=Path)
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--refuse", default="", help="fail to load, with this message")
    args = parser.parse_args()

    def load() -> Loaded:
        time.sleep(args.load_s)
        if args.refuse:
            raise ModelError(args.refuse)
        engine = FakeEngine(step_s=args.step_s)
        model = pb.Model(
            architecture="fake", parameters=1, quantization="none", context_length=4096, vocab_size=1000
        )
        return Loaded(engine, model, max_sequences=64)

    names = ("name", "socket", "grpc", "parent_pid", "lease_s", "drain_s", "stall_s", "loaded_mark")
    return run(ReplicaOptions(**{name: getattr(args, name) for name in names}), load)


if __name__ == "__main__":
    sys.exit(main())
