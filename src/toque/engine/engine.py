"""The engine: requests in, tokens out, one step at a time. Not thread-safe; one thread owns it."""

from __future__ import annotations

import contextlib
import heapq
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from toque.backends.base import BLOCK_SIZE, Executable, StepResult
from toque.engine.admission import Limits, check_request
from toque.engine.budget import StepBudget
from toque.engine.device_time import attribute
from toque.engine.grammars import Grammars
from toque.engine.kv.cache import KVCache
from toque.engine.logprobs import LogprobRows
from toque.engine.options import EngineOptions
from toque.engine.rate import TokenRate
from toque.engine.runner import RowSpan, Runner
from toque.engine.scheduler import Scheduler, StepPlan
from toque.engine.sequence import Sequence, SequenceState
from toque.engine.speculate.speculator import Speculator
from toque.engine.speculate.verify import accept_draft
from toque.engine.trail import note_chunks, note_plan, take
from toque.errors import DeadlineError, EngineError, GrammarError, RequestError, ToqueError
from toque.types import EngineRequest, EngineStats, FinishReason, SequenceOutput

_Outputs = list[SequenceOutput]
_GRAMMAR_WAIT_S = 0.01  # a new request waits so long at most while nothing but grammars is in the making


class Engine:
    """Runs requests on an executable, packing every step from all of them.

    Guarantees: the tokens of a request depend on its own prompt and parameters only; a request that fails ends with
    one output whose ``finish_reason`` is ERROR and disturbs nobody; a request that ends, for whatever reason, frees
    its KV blocks and its sampler slot before `step` returns; every request that `add` accepted gets exactly one
    output with a ``finish_reason`` (ABORT for aborted ones).

    An executable that fails in a step ends the requests of that step; the engine stays usable. After three failed
    steps in a row `step` raises EngineError: the device, not a request, is broken.
    """

    def __init__(
        self,
        executable: Executable,
        options: EngineOptions,
        *,
        context_length: int,
        n_blocks: int,
        block_size: int = BLOCK_SIZE,
        max_rows: int = 0,
        valid_vocab: int = 0,
        identity: str = "",
        weights: Mapping[str, float] | None = None,
        grammars: Grammars | None = None,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``n_blocks`` of the executable's KV are already allocated. ``max_rows`` bounds R (0: max_sequences)."""
        self.options = options
        self.executable = executable
        self.kv = KVCache(
            n_blocks, block_size=block_size, prefix_cache=options.prefix_cache, identity=identity
        )
        self.scheduler = Scheduler(
            self.kv,
            StepBudget(options.step_target_ms / 1000.0, options.max_batch_tokens),
            max_sequences=options.max_sequences,
            max_rows=max_rows or options.max_sequences,
            weights=options.weights if weights is None else weights,
        )
        self.runner = Runner(
            executable,
            max_tokens=options.max_batch_tokens,
            max_sequences=self.scheduler.max_sequences,
            max_rows=self.scheduler.max_rows,
            context_length=context_length,
            block_size=block_size,
        )
        self.limits = Limits(
            context_length=context_length,
            kv_tokens=n_blocks * block_size,
            vocab_size=executable.vocab_size,
            valid_vocab=valid_vocab or executable.vocab_size,
        )
        self._grammars = grammars
        self.speculator = speculator
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._ready: _Outputs = []  # outputs that need no step
        self._aborted: list[Sequence] = []
        self._deadlines: list[
            tuple[float, int, str]
        ] = []  # (when, arrival, request id); stale entries stay until due
        self._arrivals = 0
        self._steps = self._prompt_tokens = self._generated = self._failures = 0
        self._step_seconds = self._schedule_seconds = 0.0
        self._device_us = 0
        self.load_seconds = 0.0  # set by whoever loaded it
        self._created = time.perf_counter()
        self._rate = TokenRate()

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError (or ContextLengthError) when it can never be served; then nothing
        was queued."""
        if request.request_id in self._sequences:
            raise RequestError(f"request_id {request.request_id!r} is already running", param="request_id")
        if request.grammar is not None and self._grammars is None:
            raise RequestError("this engine follows no grammars", param="response_format")
        new_tokens = check_request(request, self.limits)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        self._prompt_tokens += len(request.prompt)
        scoring = new_tokens == 0
        if scoring and (sampling.prompt_logprobs is None or len(request.prompt) == 1):
            output = SequenceOutput(request.request_id, [], finish_reason=FinishReason.LENGTH)
            if sampling.prompt_logprobs is not None:
                output.prompt_logprobs = [None]
            self._ready.append(output)
            return
        self._arrivals += 1
        sequence = Sequence(
            request,
            sampling,
            arrival=self._arrivals,
            tenant=self.scheduler.waiting.join(request.tenant),
            root=self.kv.names.root(request.tenant, request.cache_salt),
            end=len(request.prompt) + new_tokens,
            scoring=scoring,
        )
        sequence.added_at = time.perf_counter()
        self._sequences[sequence.id] = sequence
        if self._grammars is None or request.grammar is None or scoring:
            self.scheduler.add(sequence)
        else:
            sequence.state = SequenceState.PREPARING
            self._grammars.prepare(sequence, request.grammar)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.arrival, sequence.id))

    def check_grammar(self, grammar: str) -> None:
        """Raises GrammarError for what is no grammar, before a request is made of it. Any thread may call this."""
        if self._grammars is not None:
            self._grammars.check(grammar)

    def warm_grammars(self) -> threading.Thread | None:
        """Does what the first grammar would wait for, in a thread that is returned."""
        return None if self._grammars is None else self._grammars.warm()

    def abort(self, request_id: str) -> None:
        """Stop a request; unknown ids are ignored. O(1): the next `step` frees what it holds, before computing."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.aborted:
            sequence.aborted = True
            self._aborted.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._ready)

    # --- the step -----------------------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Advance the running requests; returns what each of them gained. Empty when there was nothing to do."""
        outputs, self._ready = self._ready, []
        if self._aborted:
            self._sweep_aborted(outputs)
        if self._deadlines:
            self._sweep_deadlines(outputs)
        if self._grammars is not None and self._grammars.pending:
            self._queue_prepared(self._grammars, outputs)
        if not self._sequences:
            return outputs
        started = time.perf_counter()
        plan = self.scheduler.plan()
        if plan.victims or plan.admitted:
            note_plan(plan, started, self._steps)
        for slot in plan.closed:
            self._close_slot(slot)
        for sequence in plan.admitted:
            if sequence.queue_seconds < 0:
                sequence.queue_seconds = started - sequence.added_at
            self._open(sequence, plan, outputs)
        if plan.empty:
            return outputs
        planned = time.perf_counter()
        self._schedule_seconds += planned - started
        if self.speculator is not None and plan.decodes:
            self.speculator.draft(plan, self.scheduler)
        try:
            result, spans = self.runner.run(plan)
        except Exception as error:
            self._fail_step(plan, error, outputs)
            return outputs
        self._failures = 0
        device_seconds = time.perf_counter() - started
        device_us = int(device_seconds * 1e6)
        attribute(device_us, plan.decodes, plan.chunks)
        if plan.chunks:
            note_chunks(plan, time.perf_counter(), self._steps)
        self._device_us += device_us
        if self.speculator is not None:
            self.speculator.observe(plan, device_seconds)
        generated = self._apply(plan, result, spans, outputs)
        now = time.perf_counter()
        self.scheduler.observe(plan, now - started)
        self._steps += 1
        self._step_seconds += now - started
        self._generated += generated
        self._rate.add(generated, now)
        return outputs

    def _queue_prepared(self, grammars: Grammars, outputs: _Outputs) -> None:
        """Queue the sequences whose grammar is ready. Where nothing else is to be done, wait for one a little."""
        if not outputs and self._preparing == len(self._sequences):
            grammars.wait(_GRAMMAR_WAIT_S)
        for sequence, result in grammars.prepared():
            if sequence.state != SequenceState.PREPARING:
                continue  # it ended meanwhile
            if isinstance(result, Exception):
                self._end_with_error(sequence, result, outputs)
            else:
                sequence.matcher = result
                self.scheduler.add(sequence)

    def _open(self, sequence: Sequence, plan: StepPlan, outputs: _Outputs) -> None:
        try:
            self.runner.open(sequence)
            if self.speculator is not None:
                self.speculator.open(sequence)
        except Exception as error:
            plan.chunks = [chunk for chunk in plan.chunks if chunk[0] is not sequence]
            slot = sequence.slot
            self._end_with_error(sequence, error, outputs, close_slot=False)
            # It may be half open, or not open at all: closing it must not hide the reason.
            with contextlib.suppress(Exception):
                self._close_slot(slot)

    def _close_slot(self, slot: int) -> None:
        if self.speculator is not None:
            self.speculator.close(slot)
        self.runner.close(slot)

    def _fail_step(self, plan: StepPlan, error: Exception, outputs: _Outputs) -> None:
        self._failures += 1
        for sequence in [*plan.decodes, *(chunk[0] for chunk in plan.chunks)]:
            self._end_with_error(sequence, error, outputs)
        if self._failures >= 3:
            self._ready = outputs + self._ready
            raise EngineError(f"three steps in a row failed: {error}") from error

    def _apply(self, plan: StepPlan, result: StepResult, spans: list[RowSpan], outputs: _Outputs) -> int:
        """Write a step's results into the sequences; returns the number of generated tokens."""
        tokens = result.tokens.tolist()
        logprobs = LogprobRows(result)
        mask = self.kv.block_size - 1 if self.kv.block_size & (self.kv.block_size - 1) == 0 else 0
        publish = self.scheduler.publish
        append = outputs.append
        row = generated = accepted = 0
        for sequence in plan.decodes:
            first, row = row, row + 1 + len(sequence.draft)
            token = tokens[first]
            computed = sequence.computed = sequence.computed + 1
            if not computed & mask:
                publish(sequence)
            matcher = sequence.matcher
            if token < 0 or (matcher is not None and not matcher.accept(token)):
                stuck = SequenceOutput(sequence.id, [], device_us=sequence.device_us)
                self._end_stuck(sequence, token, stuck, outputs)
                continue
            sequence.tokens.append(token)
            output = SequenceOutput(sequence.id, [token])
            output.device_us, sequence.device_us = sequence.device_us, 0
            if sequence.top >= 0:
                output.logprobs = [logprobs.entry(first, sequence.top)]
            if sequence.draft:
                token = accept_draft(sequence, first, tokens, logprobs, output)
                computed = sequence.computed
                publish(sequence)
                accepted += len(output.tokens) - 1
                if matcher is not None and matcher.error:  # what followed was too much for the grammar
                    append(output)
                    self._end_stuck(sequence, token, SequenceOutput(sequence.id, []), outputs)
                    continue
            generated += len(output.tokens)
            if token in sequence.stop:
                output.finish_reason = FinishReason.STOP
                output.stop_token = token
                self._end(sequence)
            elif matcher is not None and matcher.complete:
                output.finish_reason = FinishReason.STOP
                self._end(sequence)
            elif computed + 1 >= sequence.end:
                output.finish_reason = FinishReason.LENGTH
                self._end(sequence)
            append(output)
        if self.speculator is not None:
            self.speculator.drafted += plan.drafted
            self.speculator.accepted += accepted
        for (sequence, count), span in zip(plan.chunks, spans, strict=True):
            generated += self._apply_chunk(sequence, count, span, tokens, logprobs, outputs)
        return generated

    def _apply_chunk(
        self,
        sequence: Sequence,
        count: int,
        span: RowSpan,
        tokens: list[int],
        logprobs: LogprobRows,
        outputs: _Outputs,
    ) -> int:
        sequence.computed += count
        self.scheduler.publish(sequence)
        row = span.first
        if span.scored and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs += [
                logprobs.entry(r, sequence.prompt_top) for r in range(row, row + span.scored)
            ]
            row += span.scored
        if sequence.computed < len(sequence.tokens):
            return 0
        output = SequenceOutput(sequence.id, [], events=take(sequence))
        output.device_us, sequence.device_us = sequence.device_us, 0
        if not sequence.first_sent:
            sequence.first_sent = True
            output.cached_tokens = sequence.cached_tokens
            output.prompt_logprobs = sequence.prompt_logprobs
            output.queue_seconds = sequence.queue_seconds
        if not span.sampled:
            outputs.append(output)
            output.finish_reason = FinishReason.LENGTH
            self._end(sequence)
            return 0
        token, matcher = tokens[row], sequence.matcher
        if token < 0 or (matcher is not None and not matcher.accept(token)):
            self._end_stuck(sequence, token, output, outputs)
            return 0
        outputs.append(output)
        output.tokens.append(token)
        if sequence.top >= 0:
            output.logprobs = [logprobs.entry(row, sequence.top)]
        sequence.tokens.append(token)
        sequence.decoding = True
        if token in sequence.stop:
            output.finish_reason = FinishReason.STOP
            output.stop_token = token
            self._end(sequence)
        elif matcher is not None and matcher.complete:
            output.finish_reason = FinishReason.STOP
            self._end(sequence)
        elif len(sequence.tokens) >= sequence.end:
            output.finish_reason = FinishReason.LENGTH
            self._end(sequence)
        return 1

    # --- endings ------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, *, close_slot: bool = True) -> None:
        """Free everything a sequence holds and forget it."""
        slot = sequence.slot
        self.scheduler.finish(sequence)
        del self._sequences[sequence.id]
        if slot >= 0 and close_slot:
            self._close_slot(slot)

    def _end_stuck(self, sequence: Sequence, token: int, output: SequenceOutput, outputs: _Outputs) -> None:
        """No token is left (-1), or the grammar has no use for it: the end where the answer may end, else an error."""
        matcher = sequence.matcher
        if matcher is None:
            self._end_with_error(sequence, _nothing_left(), outputs)
        elif token < 0 and not matcher.error and matcher.may_end:
            output.finish_reason = FinishReason.STOP
            self._end(sequence)
            outputs.append(output)
        else:
            why = matcher.error or "no token can follow"
            error = GrammarError(f"the answer's grammar cannot be followed any further: {why}")
            self._end_with_error(sequence, error, outputs)

    def _end_with_error(
        self, sequence: Sequence, error: Exception, outputs: _Outputs, *, close_slot: bool = True
    ) -> None:
        self._end(sequence, close_slot=close_slot)
        if isinstance(error, ToqueError):
            message, code = error.message, error.error_code
        else:
            message, code = f"{type(error).__name__}: {error}", EngineError.code
        outputs.append(
            SequenceOutput(
                sequence.id,
                [],
                finish_reason=FinishReason.ERROR,
                device_us=sequence.device_us,
                error=message,
                error_code=code or EngineError.code,
                events=take(sequence),
            )
        )

    def _sweep_aborted(self, outputs: _Outputs) -> None:
        for sequence in self._aborted:
            if sequence.state != SequenceState.FINISHED:
                self._end(sequence)
                outputs.append(
                    SequenceOutput(
                        sequence.id,
                        [],
                        finish_reason=FinishReason.ABORT,
                        device_us=sequence.device_us,
                        events=take(sequence),
                    )
                )
        self._aborted.clear()

    def _sweep_deadlines(self, outputs: _Outputs) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                done = len(sequence.tokens) - len(sequence.prompt)
                error = DeadlineError(f"the request's deadline passed after {max(done, 0)} tokens")
                self._end_with_error(sequence, error, outputs)
        if len(self._deadlines) > 2 * len(self._sequences) + 64:
            live = self._sequences
            self._deadlines = [d for d in self._deadlines if d[2] in live and live[d[2]].arrival == d[1]]
            heapq.heapify(self._deadlines)

    @property
    def _preparing(self) -> int:
        """Sequences that wait for their grammar, and are in no queue."""
        if self._grammars is None or not self._grammars.pending:
            return 0
        return sum(sequence.state == SequenceState.PREPARING for sequence in self._sequences.values())

    # --- the outside --------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self._preparing,
            queued_tokens=scheduler.waiting.tokens,
            kv_blocks_used=self.kv.held,
            kv_blocks_total=self.kv.n_blocks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            preemptions=scheduler.preemptions,
            prefix_hits=scheduler.prefix_hits,
            prefix_queries=scheduler.prefix_queries,
            tokens_per_second=self._rate.per_second(time.perf_counter()),
            step_seconds=self._step_seconds,
            device_seconds=self._device_us / 1e6,
            drafted_tokens=0 if self.speculator is None else self.speculator.drafted,
            accepted_tokens=0 if self.speculator is None else self.speculator.accepted,
            load_seconds=self.load_seconds,
            up_seconds=self.load_seconds + time.perf_counter() - self._created,
            schedule_seconds=self._schedule_seconds,
        )

    def check(self) -> None:
        """Raises EngineError unless every KV block and sampler slot is accounted for. For idle moments and tests."""
        self.scheduler.check()
        if (
            len(self._sequences)
            != len(self.scheduler.running) + len(self.scheduler.waiting) + self._preparing
        ):
            raise EngineError(f"{len(self._sequences)} requests are known, but not all of them run or wait")

    def close(self) -> None:
        """End everything and release the executable. Nothing may be called afterwards."""
        for sequence in list(self._sequences.values()):
            self._end(sequence)
        self._aborted.clear()
        if self._grammars is not None:
            self._grammars.close()
        if self.speculator is not None:
            self.speculator.close_all()
        self.executable.close()


def _nothing_left() -> EngineError:
    return EngineError(
        "no token is left to sample: the model's logits are not finite, or every token was ruled out"
    )
