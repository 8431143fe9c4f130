"""Loads against a server whose every delay is known, on a clock that only the test moves: all figures are exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from fixtures.scripted_server import Server, run
from toque.bench.client import Target
from toque.bench.dataset import Conversation, FromFile, Synthetic, Turn, WordRate, user
from toque.bench.lengths import Lengths
from toque.bench.report import Percentiles, Report, Run, summarize
from toque.bench.run import ClosedLoop, Load, OpenLoop, Profile, calibrate, measure
from toque.bench.session import Session, Sweep
from toque.bench.slo import Slo

TARGET = Target("server", 1, "/v1/", "m")
TEXT = Synthetic(Lengths("fixed", 20), Lengths("fixed", 4))


def load(profile: Profile, requests: int, **options: float) -> Load:
    return Load("load", TEXT, profile, requests, **options)


def same(found: Percentiles, value: float) -> None:
    assert (found.mean, found.p50, found.p95, found.p99) == pytest.approx((value,) * 4)


def test_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """TTFT 0.1 s, then three gaps of 20 ms."""
    server = Server()
    report = summarize(
        [run(server, measure(TARGET, load(ClosedLoop(), 5), warm_up=2), monkeypatch)], Slo(ttft=0.2)
    )
    assert len(server.asks) == 7
    assert (report.requests, report.failed, report.in_flight) == (5, 0, 1)
    assert report.seconds == pytest.approx(5 * 0.16)
    assert report.output_tokens_per_second == pytest.approx(20 / 0.8)
    assert report.prompt_tokens == 5 * 30
    same(report.ttft, 0.1)
    same(report.itl, 0.02)
    same(report.tpot, 0.02)
    same(report.e2e, 0.16)
    assert report.goodput is not None
    assert report.goodput.share == 1.0


def test_a_closed_loop_keeps_so_many_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    report = summarize([run(server, measure(TARGET, load(ClosedLoop(4), 12), warm_up=0), monkeypatch)])
    assert (report.in_flight, report.requests) == (4, 12)
    assert report.seconds == pytest.approx(3 * 0.16)
    starts = [at for at, _ in server.asks]
    assert starts == pytest.approx([1000 + 0.16 * (i // 4) for i in range(12)])


def test_a_duration_ends_new_requests_and_awaits_the_open_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = load(ClosedLoop(), 1000, duration_s=0.5)
    report = summarize([run(Server(), measure(TARGET, limited, warm_up=0), monkeypatch)])
    assert (report.requests, report.failed) == (4, 0)  # begun at 0, 0.16, 0.32 and 0.48
    assert report.seconds == pytest.approx(4 * 0.16)
    timed = load(OpenLoop("constant", 10), 1000, duration_s=0.5)
    assert len(run(Server(), measure(TARGET, timed, warm_up=0), monkeypatch).records) == 5


def test_an_open_loop_sends_on_time_however_slow_the_answers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(ttft=3.0, one_at_a_time=True)
    found = run(server, measure(TARGET, load(OpenLoop("constant", 20), 10), warm_up=0), monkeypatch)
    starts = [at for at, _ in server.asks]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([0.05] * 9)
    assert found.offered_per_second == 20
    report = summarize([found])
    assert report.in_flight == 10
    same(report.send_delay, 0.0)
    # They queue: request i is answered after i others, and was sent i/20 s later than the first.
    waits = [(i + 1) * 3.0 + i * 0.06 - i * 0.05 for i in range(10)]
    assert [r.ttft for r in found.records] == pytest.approx(waits)


def test_a_stall_is_seen_by_all_that_were_due_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinated omission: a server that stops for 2 s keeps 20 due requests waiting. A closed loop asks only once
    meanwhile and calls the rest fast; an open loop counts from the time that each was due."""
    stalled = Server(ttft=0.01, gap=0.0, one_at_a_time=True, stall=(50, 2.0))
    closed = summarize([run(stalled, measure(TARGET, load(ClosedLoop(), 100), warm_up=0), monkeypatch)])
    assert closed.ttft.p95 == pytest.approx(0.01)
    stalled = Server(ttft=0.01, gap=0.0, one_at_a_time=True, stall=(50, 2.0))
    found = run(stalled, measure(TARGET, load(OpenLoop("constant", 10), 100), warm_up=0), monkeypatch)
    opened = summarize([found], Slo(ttft=1.0))
    expected, free = [], 0.0
    for i in range(100):
        free = max(free, i / 10) + 0.01 + (2.0 if i == 50 else 0.0)
        expected.append(free - i / 10)
    assert [r.ttft for r in found.records] == pytest.approx(expected)
    assert opened.ttft.p95 > 1.5
    assert opened.goodput is not None
    assert opened.goodput.met == sum(t <= 1.0 for t in expected) < 95


def test_latency_counts_from_the_planned_send_when_the_client_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy(Server):
        """The client's machine does something else for 0.3 s while request 2 is due."""

        def asked(self, loop, transport, body) -> None:  # type: ignore[no-untyped-def]
            if len(self.asks) == 1:
                loop.now += 0.3
            super().asked(loop, transport, body)

    found = run(Busy(), measure(TARGET, load(OpenLoop("constant", 5), 4), warm_up=0), monkeypatch)
    delays = [r.sent - r.planned for r in found.records]
    assert delays == pytest.approx([0.0, 0.0, 0.1, 0.0])
    report = summarize([found])
    assert report.ttft.p99 == pytest.approx(0.4)  # the request during which the clock jumped
    assert found.records[2].ttft == pytest.approx(0.2)
    assert report.ttft_since_sent.p50 == pytest.approx(0.1)
    assert report.send_delay.p99 == pytest.approx(0.1)


def test_a_conversation_carries_its_answers_and_ends_at_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(tuple(Turn((user(text),), 2) for text in ("one", "two", "three")))
    work = Load("talk", FromFile("f", (talk,)), OpenLoop("constant", 1), 1)
    server = Server()
    found = run(server, measure(TARGET, work, warm_up=0), monkeypatch)
    bodies = [body["messages"] for _, body in server.asks]
    said = {"role": "assistant", "content": "t0 t1 "}
    assert bodies[2] == [user("one"), said, user("two"), said, user("three")]
    assert bodies[0] == bodies[2][:1]
    assert [r.ttft for r in found.records] == pytest.approx(
        [0.1] * 3
    )  # each turn is due when the last has ended
    broken = run(Server(status={1: 500}), measure(TARGET, work, warm_up=0), monkeypatch)
    assert [r.kind for r in broken.records] == ["", "HTTP 500"]


def test_failures_have_no_part_in_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(status={1: 429, 3: 503, 4: 429})
    report = summarize(
        [run(server, measure(TARGET, load(ClosedLoop(), 6), warm_up=0), monkeypatch)], Slo(e2e=1)
    )
    assert report.errors == {"HTTP 429": 2, "HTTP 503": 1}
    assert (report.failed, report.output_tokens) == (3, 12)
    same(report.e2e, 0.16)
    assert report.goodput is not None
    assert report.goodput.share == 0.5


def test_a_server_without_usage_is_counted_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    report = summarize([run(Server(usage=False), measure(TARGET, load(ClosedLoop(), 3)), monkeypatch)])
    assert (report.tokens_from, report.output_tokens, report.prompt_tokens) == ("events", 12, 0)
    same(report.tpot, 0.02)


def test_what_a_request_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    run(server, measure(TARGET, load(ClosedLoop(), 1), warm_up=0), monkeypatch)
    body = server.asks[0][1]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert body["stream_options"] == {"include_usage": True}
    plain = replace(
        TARGET, endpoint="completions", ignore_eos=False, ask_usage=False, extra={"temperature": 0.5}
    )
    server = Server()
    found = run(server, measure(plain, load(ClosedLoop(), 1), warm_up=0), monkeypatch)
    body = server.asks[0][1]
    assert set(body) == {"model", "max_tokens", "temperature", "stream", "prompt"}
    assert body["temperature"] == 0.5
    assert found.records[0].ok
    assert found.records[0].completion_tokens == 4


def test_prompts_have_the_length_that_was_asked_for_in_the_servers_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate = run(Server(tokens_per_word=1.25), calibrate(TARGET), monkeypatch)
    assert (rate.per_word, rate.measured) == (1.25, True)
    assert rate.overhead == pytest.approx(10)
    text = Synthetic(Lengths("fixed", 200), Lengths("fixed", 4), prefix_tokens=500, rate=rate)
    server = Server(tokens_per_word=1.25)
    found = run(server, measure(TARGET, Load("x", text, ClosedLoop(), 3), warm_up=0), monkeypatch)
    assert {r.prompt_tokens for r in found.records} == {700}
    for mute in (Server(usage=False), Server(status={0: 500}), Server(tokens_per_word=0)):
        assert run(mute, calibrate(TARGET), monkeypatch) == WordRate()


def test_repeats_take_turns_with_prompts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    loads = [Load(name, TEXT, ClosedLoop(), 2) for name in ("a", "b")]
    told: list[str] = []
    session = Session(TARGET, repeats=3, warm_up=1, progress=lambda name, _: told.append(name))
    results = run(server, session.run(loads), monkeypatch)
    assert "".join(told) == "aabb" * 3
    assert [len(r.runs) for r in results] == [3, 3]
    asked = [body["messages"][0]["content"] for _, body in server.asks]
    assert len(set(asked)) == len(asked) == 3 * 2 * 3  # the warm-ups differ, too
    again = Server()
    run(again, Session(TARGET, repeats=3).run(loads), monkeypatch)
    assert again.asks == server.asks  # the same seed asks the same
    other = Server()
    run(other, Session(TARGET, repeats=3, seed=1).run(loads), monkeypatch)
    assert not {str(body) for _, body in other.asks} & {str(body) for _, body in server.asks}


def test_a_sweep_goes_from_one_stream_to_the_servers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without queueing a stream does 1/0.16 requests a second, and eight do eight times as many."""
    sweep = Sweep(TEXT, 16, streams=8, levels=4, process="constant")
    results = run(Server(), Session(TARGET, repeats=2).run([], sweep), monkeypatch)
    profiles = [r.load.profile for r in results]
    assert profiles[:2] == [ClosedLoop(1), ClosedLoop(8)]
    rates = [p.rate for p in profiles[2:] if isinstance(p, OpenLoop)]
    low, high = 1 / 0.16, 8 / 0.16
    assert rates == pytest.approx([low + (high - low) * i / 4 for i in range(1, 5)], rel=0.01)
    assert all(len(r.runs) == 2 for r in results)
    reports: list[Report] = [r.summary() for r in results]
    assert reports[-1].offered_per_second == pytest.approx(50, rel=0.01)
    for report in reports:
        same(report.e2e, 0.16)
    # One at a time: many streams are no faster, and there is nothing between.
    queueing = Session(TARGET).run([], sweep)
    assert len(run(Server(one_at_a_time=True), queueing, monkeypatch)) == 2
    assert summarize([Run([])]).requests == 0
