"""The engine over the fake executable: what ends a request, and what that leaves behind."""

from __future__ import annotations

import time

import pytest

from fixtures.engines import Answer, advance, alone, drain, make_engine, request
from toque.engine.engine import Engine
from toque.engine.fake import FakeExecutable
from toque.errors import EngineError, RequestError
from toque.types import FinishReason, SamplingParams

PROMPT = [5, 6, 7, 8, 9]


def fake(engine: Engine) -> FakeExecutable:
    assert isinstance(engine.executable, FakeExecutable)
    return engine.executable


def assert_clean(engine: Engine, total: int = 7) -> None:
    engine.check()
    assert not engine.has_work
    assert engine.kv.held == 0
    assert engine.kv.available == total
    assert fake(engine).open_slots == 0
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens, stats.kv_blocks_used) == (0, 0, 0, 0)


# --- endings ----------------------------------------------------------------------------------------------------


def test_max_tokens_ends_an_answer() -> None:
    answer = alone(PROMPT)
    assert len(answer.tokens) == 8
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.stop_token is None


def test_a_stop_id_ends_an_answer_and_is_its_last_token() -> None:
    plain = alone(PROMPT).tokens
    stop = plain[3]
    answer = alone(PROMPT, SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,)))
    assert answer.tokens == plain[: plain.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_token == stop


def test_a_stop_id_as_the_very_first_token() -> None:
    first = alone(PROMPT).tokens[0]
    answer = alone(PROMPT, SamplingParams(temperature=0, stop_token_ids=(first,)))
    assert answer.tokens == [first]
    assert answer.finish_reason is FinishReason.STOP


def test_a_stop_id_at_the_last_allowed_token_counts_as_stop() -> None:
    plain = alone(PROMPT).tokens
    assert plain[2] not in plain[:2]
    answer = alone(PROMPT, SamplingParams(temperature=0, max_tokens=3, stop_token_ids=(plain[2],)))
    assert answer.finish_reason is FinishReason.STOP


def test_min_tokens_holds_stop_ids_back() -> None:
    first = alone(PROMPT).tokens[0]
    sampling = SamplingParams(temperature=0, max_tokens=20, min_tokens=6, stop_token_ids=(first,))
    answer = alone(PROMPT, sampling)
    assert first not in answer.tokens[:6]
    assert len(answer.tokens) >= 6


def test_the_context_ends_an_answer() -> None:
    for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=0, max_tokens=10**9)):
        answer = alone(PROMPT, sampling, context_length=20)
        assert len(answer.tokens) == 15
        assert answer.finish_reason is FinishReason.LENGTH


def test_no_tokens_asked_for_is_an_answer_without_a_step() -> None:
    engine = make_engine()
    engine.add(request("none", PROMPT, SamplingParams(max_tokens=0)))
    assert engine.has_work
    answers = drain(engine)
    assert answers["none"] == Answer(finish_reason=FinishReason.LENGTH, outputs=1)
    assert fake(engine).steps == 0
    assert_clean(engine)


# --- scoring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("chunk", [2, 64])
def test_prompt_logprobs_are_those_of_the_model(max_tokens: int, chunk: int) -> None:
    engine = make_engine(max_batch_tokens=chunk, max_sequences=2)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2)
    for name in ("cold", "warm"):  # a cached prefix has no logits: it must be computed again
        engine.add(request(name, range(1, 12), sampling))
        answer = drain(engine)[name]
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        for position, entry in enumerate(answer.prompt_logprobs[1:], 1):
            assert entry is not None
            assert entry.token == position + 1
            assert entry.logprob == pytest.approx(
                FakeExecutable.logprob(range(1, position + 1), position + 1)
            )
            assert len(entry.top) == 2
        assert len(answer.prompt_logprobs) == 11
        assert len(answer.tokens) == max_tokens
        assert answer.cached_tokens == 0
        assert answer.finish_reason is FinishReason.LENGTH
    assert_clean(engine)


def test_scoring_a_single_token_needs_no_model() -> None:
    answer = alone([3], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert answer.prompt_logprobs == [None]
    assert answer.tokens == []


def test_logprobs_of_the_answer_come_with_their_tokens() -> None:
    answer = alone(PROMPT, SamplingParams(temperature=0, max_tokens=5, logprobs=3))
    assert [entry.token for entry in answer.logprobs] == answer.tokens
    assert all(len(entry.top) == 3 for entry in answer.logprobs)
    context = list(PROMPT)
    for entry in answer.logprobs:
        assert entry.logprob == pytest.approx(FakeExecutable.logprob(context, entry.token))
        context.append(entry.token)
    only = alone(PROMPT, SamplingParams(temperature=0, max_tokens=5, logprobs=0))
    assert all(entry.top == () for entry in only.logprobs)
    assert alone(PROMPT).logprobs == []


# --- leaving ----------------------------------------------------------------------------------------------------


def test_an_aborted_request_is_gone_within_a_step() -> None:
    engine = make_engine()
    forever = SamplingParams(temperature=0, max_tokens=20)
    for i in range(3):
        engine.add(request(f"r{i}", [i + 1] * 3, forever))
    answers: dict[str, Answer] = {}
    for _ in range(4):
        advance(engine, answers)
    used = engine.kv.held
    engine.abort("r1")
    engine.abort("r1")
    outputs = advance(engine, answers)
    assert [o.finish_reason for o in outputs if o.request_id == "r1"] == [FinishReason.ABORT]
    assert engine.kv.held < used
    assert engine.stats().running == 2
    drain(engine, answers)
    for i in (0, 2):
        assert answers[f"r{i}"].tokens == alone([i + 1] * 3, forever).tokens
    assert_clean(engine)


def test_a_waiting_request_can_be_aborted() -> None:
    engine = make_engine(max_sequences=1)
    engine.add(request("a", PROMPT))
    engine.add(request("b", PROMPT))
    engine.abort("b")
    engine.abort("nobody")
    answers = drain(engine)
    assert answers["b"].finish_reason is FinishReason.ABORT
    assert len(answers["a"].tokens) == 8
    assert_clean(engine)


def test_leaving_in_crowds_leaves_nothing_behind() -> None:
    """Field case BR-048: aborted and finished requests alike."""
    engine = make_engine(n_blocks=40)
    for i in range(300):
        engine.add(request(f"r{i}", [i % 7, i % 5, 3], SamplingParams(temperature=0, max_tokens=1 + i % 9)))
        if i % 3 == 0:
            engine.abort(f"r{i}")
        engine.step()
    drain(engine)
    generated = engine.stats().generated_tokens
    assert engine.step() == []
    assert engine.stats().generated_tokens == generated
    assert_clean(engine, 40)


def test_a_request_whose_deadline_passed_ends_with_an_error() -> None:
    now = [100.0]
    engine = make_engine(max_sequences=1)
    engine._clock = lambda: now[0]
    engine.add(request("running", PROMPT, SamplingParams(temperature=0, max_tokens=20), deadline=105.0))
    engine.add(request("queued", PROMPT, deadline=104.0))
    engine.add(request("patient", PROMPT, deadline=1e9))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        advance(engine, answers)
    now[0] = 105.0
    advance(engine, answers)
    for name, tokens in (("running", 3), ("queued", 0)):
        assert answers[name].finish_reason is FinishReason.ERROR
        assert answers[name].error_code == "deadline_exceeded"
        assert f"after {tokens} tokens" in (answers[name].error or "")
    assert len(drain(engine, answers)["patient"].tokens) == 8
    assert_clean(engine)


def test_a_deadline_belongs_to_one_request_not_to_its_name() -> None:
    now = [100.0]
    engine = make_engine()
    engine._clock = lambda: now[0]
    engine.add(request("again", PROMPT, deadline=105.0))
    drain(engine)
    engine.add(request("again", PROMPT))
    now[0] = 106.0
    assert drain(engine)["again"].error is None


def test_finished_deadlines_do_not_pile_up() -> None:
    engine = make_engine()
    for i in range(1000):
        engine.add(request(f"r{i}", PROMPT, SamplingParams(max_tokens=1), deadline=time.time() + 600))
        drain(engine)
    assert len(engine._deadlines) < 100


# --- failures ---------------------------------------------------------------------------------------------------


def test_a_request_that_cannot_be_prepared_fails_alone() -> None:
    class Picky(FakeExecutable):
        def open_slot(self, slot, params, prompt, output, suppress, suppress_until):  # type: ignore[no-untyped-def]
            if params.seed == 13:
                raise RequestError("13 brings bad luck", param="seed")
            FakeExecutable.open_slot(self, slot, params, prompt, output, suppress, suppress_until)

    engine = make_engine(executable=Picky(block_size=4))
    engine.add(request("good", PROMPT))
    engine.add(request("bad", [1, 2], SamplingParams(seed=13, max_tokens=4)))
    answers = drain(engine)
    assert answers["bad"].error == "13 brings bad luck"
    assert answers["bad"].finish_reason is FinishReason.ERROR
    assert answers["good"].tokens == alone(PROMPT).tokens
    assert_clean(engine)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    engine = make_engine()
    engine.add(request("a", PROMPT))
    engine.add(request("b", [1, 2, 3]))
    answers: dict[str, Answer] = {}
    advance(engine, answers)
    fake(engine).fail_next = RuntimeError("the device coughed")
    advance(engine, answers)
    for name in "ab":
        assert answers[name].finish_reason is FinishReason.ERROR
        assert answers[name].error == "RuntimeError: the device coughed"
        assert answers[name].error_code == "engine_error"
    engine.add(request("c", PROMPT))
    assert drain(engine)["c"].tokens == alone(PROMPT).tokens
    assert_clean(engine)


def test_what_a_failed_step_wrote_is_never_shared() -> None:
    engine = make_engine()
    engine.add(request("a", range(1, 14)))
    fake(engine).fail_next = RuntimeError("half way")
    drain(engine)
    engine.add(request("b", range(1, 14)))
    answer = drain(engine)["b"]
    assert answer.cached_tokens == 0
    assert answer.tokens == alone(range(1, 14)).tokens


def test_a_device_that_keeps_failing_is_given_up() -> None:
    engine = make_engine()
    for turn in range(3):
        engine.add(request(f"r{turn}", PROMPT))
        fake(engine).fail_next = RuntimeError("gone")
        if turn < 2:
            assert engine.step()[0].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineError, match="three steps in a row failed: gone"):
        engine.step()
    assert engine.step()[0].request_id == "r2"  # even then everybody gets an answer
    assert_clean(engine)


def test_nothing_left_to_sample_fails_that_request_only() -> None:
    class Empty(FakeExecutable):
        def step(self, batch):  # type: ignore[no-untyped-def]
            result = FakeExecutable.step(self, batch)
            for row, slot in enumerate(batch.slots.tolist()):
                if self._slots[slot].params.seed == 13 and len(self._slots[slot].tokens) > 4:
                    result.tokens[row] = -1
            return result

    engine = make_engine(executable=Empty(block_size=4))
    engine.add(request("good", PROMPT))
    engine.add(request("bad", [1, 2], SamplingParams(seed=13, max_tokens=9)))
    answers = drain(engine)
    assert "no token is left to sample" in (answers["bad"].error or "")
    assert len(answers["bad"].tokens) == 2
    assert answers["good"].tokens == alone(PROMPT).tokens
    assert_clean(engine)


def test_closing_ends_everything() -> None:
    engine = make_engine()
    for i in range(12):
        engine.add(request(f"r{i}", PROMPT))
    engine.step()
    engine.close()
    assert engine.kv.held == 0


# --- what is reported -------------------------------------------------------------------------------------------


def test_stats_add_up() -> None:
    engine = make_engine(max_sequences=2)
    for i in range(3):
        engine.add(request(f"r{i}", [i, *PROMPT]))
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens) == (2, 1, 6)
    assert stats.kv_blocks_used == 4
    drain(engine)
    stats = engine.stats()
    assert stats.prompt_tokens == 18
    assert stats.generated_tokens == 24
    assert stats.steps > 0
    assert stats.tokens_per_second > 0
    assert stats.step_seconds > 0
    assert stats.kv_blocks_total == 7


def test_cached_tokens_are_reported_once_and_not_after_preemption() -> None:
    engine = make_engine()
    engine.add(request("a", range(1, 10)))
    drain(engine)
    engine.add(request("b", range(1, 10)))
    assert drain(engine)["b"].cached_tokens == 8
    assert engine.stats().prefix_hits == 8
    assert engine.stats().prefix_queries == 18


def test_the_time_in_the_queue_comes_with_the_first_output() -> None:
    engine = make_engine(max_sequences=1)
    engine.add(request("a", PROMPT))
    engine.add(request("b", PROMPT))
    time.sleep(0.02)
    outputs = [output for _ in range(40) for output in engine.step()]
    first = next(o for o in outputs if o.request_id == "b")
    assert first.queue_seconds >= 0.02
    assert sum(o.queue_seconds > 0 for o in outputs if o.request_id == "b") == 1


def test_greedy_requests_get_a_seed_too_and_keep_it_over_preemption() -> None:
    """Field case BR-050 on seven small blocks, sampled without a seed: the text goes on as it began."""
    engine = make_engine(n_blocks=7, prefix_cache=False)
    sampling = SamplingParams(temperature=1.0, max_tokens=12)
    for i in range(2):
        engine.add(request(f"r{i}", [i + 1] * 9, sampling))
    seeds = {s.id: s.sampling.seed for s in engine.scheduler.waiting}
    answers = drain(engine)
    assert engine.stats().preemptions > 0
    for i in range(2):
        seeded = SamplingParams(temperature=1.0, max_tokens=12, seed=seeds[f"r{i}"])
        assert answers[f"r{i}"].tokens == alone([i + 1] * 9, seeded).tokens


def test_an_impossible_request_is_refused_at_once() -> None:
    engine = make_engine(n_blocks=7)
    with pytest.raises(RequestError, match="whole KV cache holds 28"):
        engine.add(request("big", [1] * 20, SamplingParams(max_tokens=20)))
    assert_clean(engine)
