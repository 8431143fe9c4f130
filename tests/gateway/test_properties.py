"""Random answers and random bodies: the stream folds to the whole, and nothing a client sends is a server error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toque.routing.fake import Script

from .world import EOS, FIRST_PIECE, Plan, events, spoken, texts, world

# Few letters and short stops, so that they meet all the time; halves of characters, so that they must be joined.
PIECES = [b"a", b"b", b"ab", b"ba", b"\xe6", b"\xad", b"\xaa", b"\xe6\xad", b" ", b"\xf0\x9f", b"\x99\x82"]
QUIET = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def expected(tokens: list[int], stop: list[str], limit: int) -> tuple[str, str]:
    """The slow and plain way: token by token, decode everything and look for a stop."""
    data = b""
    for token in tokens[:limit]:
        data += PIECES[token]
        whole = data.decode("utf-8", "replace").rstrip("�")
        found = [(whole.index(s), s) for s in stop if s in whole]
        if found:
            # Of the stops that are complete at this token, the one that ends first, and the longest of those.
            _, _, at = min((at + len(s), -len(s), at) for at, s in found)
            return whole[:at], "stop"
    return data.decode("utf-8", "replace"), "length" if len(tokens) >= limit else "stop"


@QUIET
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=24),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    per_step=st.integers(1, 5),
    limit=st.integers(1, 24),
    chat=st.booleans(),
)
async def test_the_stream_folds_to_the_whole_answer(
    tokens: list[int], stop: list[str], per_step: int, limit: int, chat: bool
) -> None:
    script = Script([*(FIRST_PIECE + token for token in tokens), EOS], per_step=per_step)
    async with world(Plan(script=script, pieces=PIECES)) as w:
        ask = w.chat if chat else w.complete
        fields: dict[str, Any] = {"max_tokens": limit, "stop": stop}
        whole = (await ask(**fields)).json()
        choice = whole["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        stream = events(await ask(stream=True, stream_options={"include_usage": True}, **fields))
        deltas = texts(stream)
        assert "".join(deltas) == text
        assert stream[-2]["usage"] == whole["usage"]
        reasons = [c["finish_reason"] for e in stream[:-1] for c in e["choices"] if c["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        assert (text, choice["finish_reason"]) == expected(tokens, stop, limit)
        assert w.engine.running == 0


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8),
    st.just([]), st.just({}), st.lists(st.one_of(st.integers(-5, 300), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "stop", "seed", "stream",
    "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "logit_bias", "echo", "suffix",
    "stream_options", "response_format", "tools", "tool_choice", "stop_token_ids", "ignore_eos", "priority", "timeout",
    "cache_salt", "continue_final_message", "add_generation_prompt", "chat_template_kwargs", "metadata", "user", "x",
)  # fmt: skip


@QUIET
@given(fields=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=5), path=st.sampled_from(["chat/", ""]))
async def test_no_value_of_any_field_is_a_server_error(fields: dict[str, Any], path: str) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **fields}
    await _answered(f"/v1/{path}completions", json.dumps(body).encode())


@QUIET
@given(
    body=st.binary(max_size=60), path=st.sampled_from(["/v1/chat/completions", "/tokenize", "/detokenize"])
)
async def test_no_body_is_a_server_error(body: bytes, path: str) -> None:
    await _answered(path, body)


async def _answered(path: str, body: bytes) -> None:
    async with world(Plan(script=spoken("ok"))) as w:
        answer: httpx.Response = await w.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code in (200, 400, 404)
        if answer.status_code != 200:
            error = json.loads(answer.content)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert len(answer.content) < 1500
        assert w.deployment.admission.requests == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_logprobs_of_a_stream_fold_too(n: int) -> None:
    async with world(Plan(script=spoken("abc def", per_step=3))) as w:
        fields: dict[str, Any] = {"logprobs": 2, "n": n, "echo": True, "prompt": ["p", "q"], "max_tokens": 7}
        whole = (await w.complete(**fields)).json()["choices"]
        stream = events(await w.complete(stream=True, **fields))
        for choice in whole:
            pieces = [
                c["logprobs"]
                for e in stream[:-1]
                for c in e["choices"]
                if c["index"] == choice["index"] and c["logprobs"]
            ]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [entry for piece in pieces for entry in piece[name]] == choice["logprobs"][name]
