"""A request's life, for people: its row in the ledger and its moments as lines, with seconds since its arrival."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from toque.monitor.cost import currency_text
from toque.monitor.trail import Moment, Trail, TrailKind


def moments(trail: Trail) -> list[dict[str, Any]]:
    """The moments as JSON has them, by time; what is empty is left out."""
    return [
        {"seconds": moment.at_us / 1e6, "event": moment.kind}
        | {
            name: value
            for name in ("choice", "tokens", "step", "note")
            if (value := getattr(moment, name)) or (name == "choice" and _of_a_choice(moment))
        }
        for moment in trail.ordered()
    ]


def tell(row: dict[str, Any] | None, trail: Trail | None, currency: str) -> Iterator[str]:
    """``row`` is the ledger's (None: it is not there yet), ``trail`` the event log's (None: it has forgotten)."""
    if row is not None:
        yield f"{row['request_id']}  ({row['client_id']})"
        who = f", tenant {row['tenant']}" if row["tenant"] else ""
        how = "streamed" if row["stream"] else "whole"
        choices = "1 choice" if row["choices"] == 1 else f"{row['choices']} choices"
        yield _line(
            None, f"{_iso(row['opened_at'])}  {row['endpoint']}, {how}, {choices}{who}, {row['model']} "
            f"({row['version'] or 'no version'})"
        )  # fmt: skip
    elif trail is not None:
        yield f"{trail.request_id}  ({trail.client_id})"
        yield _line(None, f"{_iso(trail.opened_at)}  {trail.endpoint}, {trail.model}")
    if trail is not None and trail.trace_id:
        yield _line(None, f"trace {trail.trace_id}")
    yield from _told(trail) if trail is not None else _guessed(row or {})
    if row is not None:
        yield from _summed(row, currency)


def _told(trail: Trail) -> Iterator[str]:
    several = any(moment.choice for moment in trail.moments)
    for moment in trail.ordered():
        which = f"choice {moment.choice}: " if several and _of_a_choice(moment) else ""
        yield _line(moment.at_us, which + _sentence(moment))
    if trail.dropped:
        yield _line(None, f"({trail.dropped} more events were not kept)")
    if not any(moment.kind == TrailKind.CLOSED for moment in trail.moments):
        yield _line(None, "still open")


def _sentence(moment: Moment) -> str:
    tokens, note = moment.tokens, moment.note
    match moment.kind:
        case TrailKind.ADMITTED:
            return "admitted"
        case TrailKind.PREPARED:
            return f"prepared: {tokens} prompt tokens"
        case TrailKind.HELD:
            return f"held: {note or 'no replica takes it'}"
        case TrailKind.ROUTED:
            return f"routed to {note or 'its replica'}"
        case TrailKind.RETRIED:
            return f"retried on {note}"
        case TrailKind.MIGRATED:
            return f"migrated after {tokens} tokens to {note}"
        case TrailKind.HEDGED:
            return f"sent to a second replica, {note}"
        case TrailKind.WON:
            return f"{note} spoke first and goes on"
        case TrailKind.SCHEDULED:
            return f"scheduled in step {moment.step}" + (f", {tokens} tokens cached" if tokens else "")
        case TrailKind.PREFILL:
            return f"prefill of {tokens} tokens in step {moment.step}"
        case TrailKind.PREEMPTED:
            return f"preempted in step {moment.step}, with {tokens} tokens to compute again"
        case TrailKind.FIRST_TOKEN:
            return "first token"
        case TrailKind.FINISHED:
            return f"finished ({note})" + (f" after {tokens} tokens" if tokens else "")
        case TrailKind.CLOSED:
            return f"closed: {note}, {tokens} tokens"
        case _:
            return moment.kind


def _guessed(row: dict[str, Any]) -> Iterator[str]:
    """What the ledger alone can tell, of a request that the event log has forgotten or never had."""
    if row["prompt_tokens"]:
        yield _line(None, f"waited {row['queue_us'] / 1e6:.3f} s in its engine's queue")
    if row["ttft_us"]:
        yield _line(row["ttft_us"], "first token")
    if row["outcome"] == "open":
        yield _line(None, f"running, or its gateway died: {row['completion_tokens']} tokens when last noted")
        return
    reason = row["error_code"] or row["finish_reason"]
    yield _line(row["total_us"], f"{row['outcome']} {row['status']} ({reason})")


def _summed(row: dict[str, Any], currency: str) -> Iterator[str]:
    for attempt in row["attempts"]:
        why = f" ({attempt['error_code']})" if attempt["error_code"] else ""
        yield _line(
            None,
            f"attempt {attempt['number']} on {attempt['replica']}: {attempt['outcome']}{why}, "
            f"{attempt['prompt_tokens']} + {attempt['completion_tokens']} tokens",
        )
    where = f" on {row['replica']}" if row["replica"] and not row["attempts"] else ""
    yield _line(
        None,
        f"{row['prompt_tokens']} prompt tokens ({row['cached_tokens']} cached), {row['completion_tokens']} generated"
        + where,
    )
    yield _line(
        None,
        f"{row['device_ns'] / 1e9:.3f} device-seconds, list {currency_text(row['list_nano'])} {currency}, "
        f"cost {currency_text(row['cost_nano'])} {currency}",
    )


def _of_a_choice(moment: Moment) -> bool:
    return moment.kind not in (TrailKind.ADMITTED, TrailKind.PREPARED, TrailKind.CLOSED)


def _line(at_us: int | None, text: str) -> str:
    when = "" if at_us is None else f"+{at_us / 1e6:.3f} s"
    return f"  {when:>11}  {text}"


def _iso(at_us: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_us // 1_000_000))
