"""One request while the engine works on it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from enum import IntEnum
from typing import TYPE_CHECKING

from toque.types import EngineRequest, SamplingParams, StepEvent, TokenLogprob

if TYPE_CHECKING:
    from toque.engine.grammars import Matcher
    from toque.engine.queue import Tenant


class SequenceState(IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2
    PREPARING = 3  # its grammar is being compiled; it is in no queue yet


class Sequence:
    """A request's tokens and how far they have been computed.

    ``tokens`` are all tokens known so far (prompt, then output) and ``computed`` of them have their KV written; every
    step closes the gap a little, and a sequence whose gap closes gets one more token. A scoring request
    (``max_tokens`` 0) leaves the last prompt token out of ``tokens``: nothing follows it, so it need not be computed.
    ``draft`` are guesses at what follows ``tokens``, to be verified by the step that is planned; none outlives it.
    ``blocks`` has room for ``room`` tokens. ``end`` is the number of known tokens at which the answer is complete.
    """

    __slots__ = (
        "aborted",
        "added_at",
        "arrival",
        "blocks",
        "cached_tokens",
        "computed",
        "decoding",
        "device_us",
        "draft",
        "end",
        "events",
        "first_sent",
        "id",
        "key",
        "matcher",
        "names",
        "priority",
        "prompt",
        "prompt_logprobs",
        "prompt_top",
        "published",
        "queue_seconds",
        "request",
        "room",
        "root",
        "sampling",
        "scoring",
        "slot",
        "state",
        "stop",
        "tenant",
        "tokens",
        "top",
    )

    def __init__(
        self,
        request: EngineRequest,
        sampling: SamplingParams,
        *,
        arrival: int,
        tenant: Tenant,
        root: bytes,
        end: int,
        scoring: bool,
    ) -> None:
        self.id = request.request_id
        self.device_us = 0  # attributed to it since its last output
        self.events: list[StepEvent] = []  # that no output has carried yet
        self.request = request
        self.sampling = sampling
        self.arrival = arrival
        self.priority = request.priority
        self.key = (request.priority, arrival)
        self.tenant = tenant
        self.prompt: Tokens[int] = request.prompt
        self.scoring = scoring
        self.tokens: list[int] = list(request.prompt[:-1] if scoring else request.prompt)
        self.tokens += request.generated
        self.computed = 0
        self.draft: Tokens[int] = ()
        self.end = end
        self.stop = frozenset(sampling.stop_token_ids)
        self.matcher: Matcher | None = None  # where the answer is in its grammar
        self.top = -1 if sampling.logprobs is None else sampling.logprobs
        self.prompt_top = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        # Entry i belongs to prompt token i; the first has nothing before it.
        self.prompt_logprobs: list[TokenLogprob | None] | None = None if self.prompt_top < 0 else [None]
        self.root = root
        self.names: list[bytes] = []  # of its full blocks, in order
        self.published = 0  # how many of its blocks have been offered to the prefix cache
        self.blocks: list[int] = []
        self.room = 0
        self.slot = -1
        self.state = SequenceState.WAITING
        self.decoding = False  # running, and only the newest token is not computed
        self.aborted = False
        self.first_sent = False
        self.added_at = 0.0  # when it came, on the clock of the engine's steps
        self.queue_seconds = -1.0  # -1: it has not been admitted yet
        self.cached_tokens = -1  # -1: the prefix cache has not been asked yet

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def unscored(self) -> bool:
        """Some prompt token's logprob is still missing."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt)

    @property
    def scored(self) -> int:
        """Positions whose logits are no longer needed: those may come from the prefix cache."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == len(self.prompt):
            return len(self.tokens)
        return len(self.prompt_logprobs) - 1
