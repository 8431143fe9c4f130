"""Every field out of range, of the wrong type, huge or deep: 400 that names it, and nobody else notices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toque.routing.fake import Script
from toque.types import EngineRequest, TokenLogprob

from .world import CONTEXT, EOS, Plan, World, events, spoken, world

BIG = 10**9
HUGE = 10**400


async def refused(
    w: World, param: str | None, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions"
) -> Any:
    """The error object of a request that must be refused with 400, naming ``param``, in a small body."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    answer = await w.client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, (param, answer.status_code, answer.text)
    assert len(answer.content) < 1500
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]
    assert "msgspec" not in error["message"]
    return error


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "parrot", "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "parrot", "prompt": "hi", **fields}


# field → values that must be refused, for both endpoints
NUMBERS: dict[str, list[Any]] = {
    "temperature": [-1, -0.1, 2.1, BIG, HUGE, "hot", True, [], {}],
    "top_p": [-1, -0.1, 1.5, BIG, "1", False],
    "min_p": [-1, 1.01, BIG, "0"],
    "top_k": [-2, 2**31, HUGE, 1.5, "7", True],
    "repetition_penalty": [-1, 0, 10.1, BIG, "1"],
    "presence_penalty": [-2.1, 2.1, BIG, "0"],
    "frequency_penalty": [-2.1, 2.1, BIG, "0"],
    "seed": [2**63, -(2**63) - 1, HUGE, 1.5, "7", True],
    "n": [-1, 0, 129, BIG, HUGE, 1.5, "2", True],
    "best_of": [-1, 0, 2, BIG, "2"],
    "max_tokens": [-1, -HUGE, 1.5, "7", True],
    "min_tokens": [-1, 2**31, BIG * 10, 1.5, "7", True],
    "priority": [-1001, 1001, BIG, 1.5, "low"],
    "timeout": [-1, 0, 86_401, BIG, "5", True],
}


@pytest.mark.parametrize("field", NUMBERS)
async def test_numbers_out_of_range_or_of_another_type_are_refused(parrot: World, field: str) -> None:
    for value in NUMBERS[field]:
        await refused(parrot, field, chat(**{field: value}))
        await refused(parrot, field, completion(**{field: value}), "/v1/completions")
    for literal in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        body = json.dumps(chat(**{field: 7})).encode().replace(b": 7", b": " + literal)
        answer = await parrot.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
    assert not parrot.engine.requests
    assert await parrot.alive()


CHAT_ONLY: list[tuple[str, Any]] = [
    *[("max_completion_tokens", value) for value in (-1, 0, 1.5, "7", True)],
    ("max_tokens", 0),
    *[("top_logprobs", value) for value in (-1, 21, BIG, 1.5, "2", 2)],  # 2: without logprobs
    *[("logprobs", value) for value in (1, "yes", 0.5)],
    *[("stream", value) for value in ("yes", 1)],
    ("messages", {"role": "user"}),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [{"role": "user", "content": "x"}] * 4097),
    ("continue_final_message", "yes"),
    ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {str(i): i for i in range(65)}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("cache_salt", "x" * 257),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [258]),
    ("stop_token_ids", list(range(129))),
]


@pytest.mark.parametrize(
    ("field", "value"), CHAT_ONLY, ids=[f"{f}-{i}" for i, (f, _) in enumerate(CHAT_ONLY)]
)
async def test_chat_fields_that_do_not_fit_are_refused(parrot: World, field: str, value: Any) -> None:
    await refused(parrot, field, chat(**{field: value}))
    assert not parrot.engine.requests


NESTED: list[tuple[str, dict[str, Any]]] = [
    ("messages[0].role", {"role": "robot", "content": "x"}),
    ("messages[0].role", {"content": "x"}),
    ("messages[0].role", {"role": 7, "content": "x"}),
    ("messages[0].content", {"role": "user"}),
    ("messages[0].content", {"role": "user", "content": 7}),
    (
        "messages[0].content[1].type",
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
    ),
    ("messages[0].content[0].type", {"role": "user", "content": [{"text": "a"}]}),
    (
        "messages[0].tool_calls[0].function",
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ),
]


@pytest.mark.parametrize(("param", "message"), NESTED)
async def test_the_error_names_the_place_inside_messages(
    parrot: World, param: str, message: dict[str, Any]
) -> None:
    await refused(parrot, param, chat(messages=[message]))


COMPLETION_ONLY: list[tuple[str, str, Any]] = [
    ("prompt", "prompt", []),
    ("prompt", "prompt", {"text": "hi"}),
    ("prompt", "prompt", 7),
    ("prompt", "prompt", [[]] * 129),
    ("prompt", "prompt", [-1]),
    ("prompt", "prompt", [258]),
    ("prompt", "prompt", [BIG]),
    ("prompt", "prompt", [HUGE]),
    ("prompt", "prompt[0]", [[]]),
    ("prompt", "prompt[1]", ["a", 1]),
    ("prompt", "prompt[1]", [1, [2]]),
    ("prompt", "prompt[1]", [1, None]),
    ("prompt", "prompt[0]", [1.5]),
    ("logprobs", "logprobs", -1),
    ("logprobs", "logprobs", 21),
    ("logprobs", "logprobs", True),
    ("suffix", "suffix", "end"),
    ("max_tokens", "max_tokens", 0),
]


@pytest.mark.parametrize(("field", "param", "value"), COMPLETION_ONLY)
async def test_completion_fields_that_do_not_fit_are_refused(
    parrot: World, field: str, param: str, value: Any
) -> None:
    await refused(parrot, param, completion(**{field: value}), "/v1/completions")
    assert not parrot.engine.requests


@pytest.mark.parametrize("value", ["", [""], ["", ".\n"], [13], {"a": 1}, 7, "x" * 100_000, ["a"] * 17])
async def test_stop_values_that_cannot_be_meant_are_refused(parrot: World, value: Any) -> None:
    """Field case BR-010."""
    error = await refused(parrot, "stop[0]" if value == [13] else "stop", chat(stop=value))
    assert error["param"].startswith("stop")


@pytest.mark.parametrize("value", [None, [], "zz", ["a", "b", "c", "d", "e"]])
async def test_other_stop_values_work(parrot: World, value: Any) -> None:
    answer = await parrot.chat(stop=value)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    "bias",
    [
        {"99999999": 5},
        {"-1": 5},
        {"abc": 1},
        {"5": 101},
        {"5": -101},
        {"258": 1},
        {"5": "x"},
        {"": 1},
        {"٣": 1},
    ],
)
async def test_logit_bias_that_names_no_token_is_refused(parrot: World, bias: Any) -> None:
    """Field case BR-022."""
    await refused(parrot, "logit_bias", chat(logit_bias=bias))
    nan = json.dumps(chat(logit_bias={"5": 7})).replace("7}", "NaN}").encode()
    assert (
        await parrot.client.post(
            "/v1/chat/completions", content=nan, headers={"content-type": "application/json"}
        )
    ).status_code == 400
    assert await parrot.alive()


async def test_logit_bias_reaches_the_engine(parrot: World) -> None:
    assert (await parrot.chat(logit_bias={})).status_code == 200
    assert (await parrot.chat(logit_bias={"111": -100})).status_code == 200
    assert [request.sampling.logit_bias for request in parrot.engine.requests] == [(), ((111, -100.0),)]


async def test_disabled_values_mean_off(parrot: World) -> None:
    """Field cases BR-018 and BR-020: what the engine is told; the sampler has tests of its own."""
    for fields in (
        {"top_k": 0}, {"top_k": -1}, {"top_k": BIG}, {"top_p": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"min_p": 0},
        {"min_p": 1}, {"temperature": 0}, {"temperature": 5e-324}, {"temperature": 1e-12}, {"temperature": 2},
    ):  # fmt: skip
        assert (await parrot.chat(**fields)).status_code == 200, fields
    sampling = [request.sampling for request in parrot.engine.requests]
    assert [s.top_k for s in sampling[:3]] == [0, -1, BIG]
    assert [s.greedy for s in sampling[8:]] == [True, True, True, False]


async def test_null_is_the_same_as_absent(parrot: World) -> None:
    for field in (
        *NUMBERS,
        "stop",
        "stream",
        "logit_bias",
        "logprobs",
        "user",
        "tools",
        "response_format",
        "stop_token_ids",
    ):
        assert (await parrot.chat(**{field: None})).status_code == 200, field
    plain = parrot.engine.requests[0].sampling
    assert all(request.sampling == plain for request in parrot.engine.requests)


async def test_fields_that_change_nothing_here_are_accepted(parrot: World) -> None:
    answer = await parrot.chat(
        foo=1, user="u", metadata={"a": "b"}, store=False, service_tier="auto", tools=[], tool_choice="auto",
        response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True, prompt_cache_key="k",
    )  # fmt: skip
    assert answer.status_code == 200


async def test_limits_of_tokens() -> None:
    """Field case BR-014."""
    async with world(Plan(script=Script([97] * 2000))) as w:
        for ask, room in ((w.chat, CONTEXT - 21), (w.complete, CONTEXT - 3)):
            for stream in (False, True):
                answer = await ask(max_tokens=BIG, stream=stream)
                assert answer.status_code == 200
                assert w.engine.requests[-1].sampling.max_tokens == room
        for fields in ({}, {"max_tokens": None}):
            answer = await w.chat(**fields)
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert answer.json()["usage"]["total_tokens"] == CONTEXT
        for stream in (False, True):  # the successor wins
            await w.chat(max_tokens=5, max_completion_tokens=9, stream=stream)
            assert w.engine.requests[-1].sampling.max_tokens == 9
        assert (await w.complete()).json()["usage"]["completion_tokens"] == 16
        assert (await w.complete(max_tokens=10**30)).status_code == 200


async def test_a_prompt_that_does_not_fit_is_refused_with_both_sizes(parrot: World) -> None:
    for content, size in (
        ("x" * 600, "619"),
        ("x" * (CONTEXT - 19), "512"),
        ("x" * 100_000, "at least 25005"),
    ):
        error = (await parrot.chat(messages=[{"role": "user", "content": content}])).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert size in error["message"]
    assert (
        await parrot.chat(messages=[{"role": "user", "content": "x" * (CONTEXT - 20)}])
    ).status_code == 200
    error = (await parrot.complete(prompt=[[97] * 10, [97] * 600])).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert len(parrot.engine.requests) == 1


async def test_min_tokens_above_max_tokens_is_refused(parrot: World) -> None:
    await refused(parrot, "min_tokens", chat(min_tokens=9, max_tokens=8))


async def test_end_of_text_ids_join_the_stop_ids_unless_ignored(parrot: World) -> None:
    await parrot.chat(stop_token_ids=[9])
    await parrot.chat(stop_token_ids=[9], ignore_eos=True)
    assert [r.sampling.stop_token_ids for r in parrot.engine.requests] == [(9, EOS), (9,)]


async def test_a_scoring_request_gives_the_prompt_back_with_its_logprobs(parrot: World) -> None:
    """Field case BR-012."""
    answer = await parrot.complete(
        prompt="The sky is blue", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert choice["text"] == "The sky is blue"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value == -1.0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][1:]) == "The sky is blue"
    assert logprobs["tokens"][0] == "<s>"
    assert logprobs["text_offset"] == [0, *range(15)]
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert parrot.engine.requests[0].sampling.max_tokens == 0
    stream = events(await parrot.complete(prompt="The sky", max_tokens=0, echo=True, logprobs=1, stream=True))
    assert stream[0]["choices"][0]["text"] == "The sky"
    assert len(stream[0]["choices"][0]["logprobs"]["tokens"]) == 8
    await refused(parrot, "max_tokens", chat(max_tokens=0))
    assert await parrot.alive()


async def test_an_echo_alone_needs_no_engine(parrot: World) -> None:
    answer = await parrot.complete(prompt="The sky", max_tokens=0, echo=True)
    assert answer.json()["choices"][0]["text"] == "The sky"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["total_tokens"] == 8
    assert not parrot.engine.requests
    assert parrot.deployment.admission.requests == 0


@pytest.mark.parametrize(("top", "count"), [(None, 0), (0, 0), (2, 2), (20, 20)])
async def test_chat_logprobs_have_openais_shape(parrot: World, top: int | None, count: int) -> None:
    """Field case BR-015."""
    fields = {} if top is None else {"top_logprobs": top}
    answer = await parrot.chat(logprobs=True, **fields)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [
        "o",
        "k",
    ]  # the end-of-text token is not a part of the text
    for entry in content:
        assert entry["bytes"] == list(entry["token"].encode())
        assert entry["logprob"] == -1.0
        assert len(entry["top_logprobs"]) == count
    stream = events(await parrot.chat(logprobs=True, stream=True, **fields))
    streamed = [
        entry
        for e in stream[:-1]
        for c in e["choices"]
        if c["logprobs"]
        for entry in c["logprobs"]["content"]
    ]
    assert streamed == content
    assert (await parrot.chat()).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_completion_logprobs_have_openais_shape(parrot: World, count: int) -> None:
    logprobs = (await parrot.complete(logprobs=count)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["o", "k"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0]
    assert logprobs["text_offset"] == [0, 1]
    if count:
        assert [len(top) for top in logprobs["top_logprobs"]] == [count, count]
        assert logprobs["top_logprobs"][0]["o"] == -1.0
    else:
        assert logprobs["top_logprobs"] is None


async def test_logprobs_of_masked_tokens_are_finite_json(
    parrot: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def masked(token: int, n: int) -> TokenLogprob:
        return TokenLogprob(token, float("-inf"), ((1, float("-inf")), (0xE6, float("nan"))))

    monkeypatch.setattr("toque.routing.fake._logprob", masked)
    answer = await parrot.chat(logprobs=True, top_logprobs=2)

    def strict(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    content = json.loads(answer.content, parse_constant=strict)["choices"][0]["logprobs"]["content"]
    assert content[0]["logprob"] == -9999.0
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-9999.0, -9999.0]
    assert content[0]["top_logprobs"][1]["token"] == "bytes:\\xe6"
    assert content[0]["top_logprobs"][1]["bytes"] == [0xE6]


async def test_deep_json_is_refused_wherever_it_is(parrot: World) -> None:
    deep = b"[" * 10_000 + b"]" * 10_000
    objects = b'{"a":' * 10_000 + b"1" + b"}" * 10_000
    for field in (
        b"messages",
        b"metadata",
        b"foo",
        b"chat_template_kwargs",
        b"tools",
        b"stop",
        b"response_format",
    ):
        for nested in (deep, objects):
            body = b'{"model":"parrot","messages":[{"role":"user","content":"x"}],"%b":%b}' % (field, nested)
            await _refused_somehow(parrot, body)
    await _refused_somehow(parrot, deep)
    await _refused_somehow(parrot, b"[" * 1_000_000)
    levels = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}],
    }
    await refused(parrot, "messages[0].tool_calls[0].function.arguments", chat(messages=[levels]))
    nested: Any = 1
    for _ in range(40):
        nested = {"a": nested}
    await refused(parrot, "chat_template_kwargs", chat(chat_template_kwargs=nested))
    assert await parrot.alive()


async def _refused_somehow(w: World, body: bytes) -> None:
    answer = await w.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_long_wrong_value_is_not_given_back(parrot: World) -> None:
    secret = "s3cret" * 100
    for body in (
        chat(messages=[{"role": secret, "content": "x"}]), chat(temperature=secret), chat(logit_bias={secret: 1}),
        chat(response_format={"type": secret}), {**chat(), "model": secret},
    ):  # fmt: skip
        answer = await parrot.client.post("/v1/chat/completions", json=body)
        assert answer.status_code in (400, 404)
        assert secret not in answer.text
        assert len(answer.content) < 600


def _prompted(request: EngineRequest) -> Script:
    return spoken(str(len(request.prompt)))


async def test_prompts_come_as_text_list_or_ids() -> None:
    async with world(Plan(script=_prompted)) as w:
        for prompt, answers in (
            ("ab", ["3"]), (["ab"], ["3"]), (["a", "abc"], ["2", "4"]), ([97, 98], ["2"]),
            ([[97], [97, 98, 99]], ["1", "3"]),
        ):  # fmt: skip
            choices = (await w.complete(prompt=prompt)).json()["choices"]
            assert [choice["text"] for choice in choices] == answers
        assert w.engine.requests[-1].prompt == (97, 98, 99)
