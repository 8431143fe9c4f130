"""Tool calls and reasoning over HTTP, streamed and not (field cases BR-043, 045 and 046)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from toque.errors import ConfigError
from toque.gateway.face import Face
from toque.routing.fake import Script
from toque.text.grammar.spec import GrammarKind, GrammarSpec

from .world import EOS, LineTemplate, Plan, World, build, events, served, spoken, world

USER = [{"role": "user", "content": "hi"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES = LineTemplate(text="{{ tools }} <tool_call>")
THINKING = LineTemplate(text="{{ tools }} <tool_call> <think>")


def plan(text: str, template: LineTemplate = HERMES, **fields: Any) -> Plan:
    return Plan(script=spoken(text, **fields), template=template)


async def both(w: World, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice of a whole answer, and the fold of the same answer streamed, by the official client's accumulator."""
    answer = await w.chat(tools=TOOLS, **fields)
    assert answer.status_code == 200, answer.text
    whole = answer.json()["choices"][0]
    async with AsyncOpenAI(base_url=f"{w.url}/v1", api_key="k", max_retries=0) as client:
        state = ChatCompletionStreamState()
        stream = await client.chat.completions.create(
            model="parrot",
            messages=USER,  # type: ignore[arg-type]
            stream=True,
            tools=TOOLS,  # type: ignore[arg-type]
            **fields,
        )
        async for chunk in stream:
            state.handle_chunk(chunk)
    folded = state.current_completion_snapshot.choices[0].to_dict()
    return whole, folded


def calls(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    found = choice["message"].get("tool_calls") or []
    assert len({call["id"] for call in found}) == len(found)
    assert all(call["id"] and call["type"] == "function" for call in found)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (CALL, None, [("get_weather", {"city": "Zürich"})]),
        (
            f"One moment. {CALL}\n{NOW}\n{CALL}",
            "One moment.",
            [("get_weather", {"city": "Zürich"}), ("now", {}), ("get_weather", {"city": "Zürich"})],
        ),
        ("No need for that.", "No need for that.", []),
        (
            "<tool_call>\nget_weather(Paris)\n</tool_call>",
            "<tool_call>\nget_weather(Paris)\n</tool_call>",
            [],
        ),
        ("", None, []),
    ],
    ids=["call", "prose and three calls", "no call", "malformed", "nothing"],
)
@pytest.mark.parametrize("per_step", [1, 7])
async def test_a_stream_folds_to_the_whole_answer(
    text: str, content: str | None, expected: list[tuple[str, Any]], per_step: int
) -> None:
    async with served(plan(text, per_step=per_step)) as w:
        whole, folded = await both(w)
    for choice in (whole, folded):
        assert choice["message"].get("content") == content
        assert calls(choice) == expected
        assert choice["finish_reason"] == ("tool_calls" if expected else "stop")


@pytest.mark.parametrize("per_step", [1, 7])
async def test_a_call_of_bare_texts_is_read_by_the_functions_schema(per_step: int) -> None:
    text = (
        'So.\n<tool_call>\n<function=get_weather>\n<parameter=city>\n42 "Zürich"\n</parameter>\n'
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    template = LineTemplate(text="{{ tools }} <tool_call>\n<function=example>")
    async with served(plan(text, template, per_step=per_step)) as w:
        for choice in await both(w):
            assert choice["message"]["content"] == "So."
            assert calls(choice) == [("get_weather", {"city": '42 "Zürich"', "days": [1, 2]})]
            assert choice["finish_reason"] == "tool_calls"


async def test_ids_names_and_types_come_once_and_indexes_count() -> None:
    async with world(plan(f"{CALL}{NOW}")) as w:
        stream = events(await w.chat(tools=TOOLS, stream=True))
    pieces = [
        call
        for event in stream[:-1]
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    first = [call for call in pieces if "id" in call]
    assert [call["index"] for call in first] == [0, 1]
    assert all(call["type"] == "function" and call["function"]["name"] for call in first)
    rest = [call for call in pieces if "id" not in call]
    assert all(call.keys() == {"index", "function"} for call in rest)
    assert all(call["function"].keys() == {"arguments"} for call in rest)
    assert [call["index"] for call in pieces] == sorted(call["index"] for call in pieces)


async def test_at_most_one_call_without_parallel_calls() -> None:
    async with served(Plan(script=Script([*(CALL + NOW).encode(), *b"x" * 400]), template=HERMES)) as w:
        for choice in await both(w, parallel_tool_calls=False):
            assert calls(choice) == [("get_weather", {"city": "Zürich"})]
            assert choice["finish_reason"] == "tool_calls"
            assert not choice["message"].get("content")


@pytest.mark.parametrize("limit", [5, 40, len(CALL.encode()) - 16])
async def test_a_cut_call_is_never_reported_as_finished(limit: int) -> None:
    script = Script([*CALL.encode(), EOS])
    async with served(Plan(script=script, template=HERMES)) as w:
        for choice in await both(w, max_tokens=limit):
            assert choice["finish_reason"] == "length"
            assert not choice["message"].get("tool_calls")


@pytest.mark.parametrize("limit", range(1, len((CALL + NOW).encode()), 5))
async def test_pieces_of_tags_are_no_content_where_only_calls_are_allowed(limit: int) -> None:
    script = Script([*f"{CALL}\n{NOW}".encode(), EOS])
    async with served(Plan(script=script, template=HERMES)) as w:
        for choice in await both(w, tool_choice="required", max_tokens=limit):
            assert not choice["message"].get("content")
            assert choice["finish_reason"] == "length"


async def test_tools_none_means_that_nothing_is_read_as_a_call() -> None:
    template = LineTemplate(text="{{ tools }} <tool_call>")
    async with served(plan(CALL, template)) as w:
        for choice in await both(w, tool_choice="none"):
            assert choice["message"]["content"] == CALL
            assert choice["finish_reason"] == "stop"
        assert template.calls[-1]["tools"] is None


async def test_the_template_gets_the_tools() -> None:
    template = LineTemplate(text="{{ tools }} <tool_call>")
    async with world(plan("ok", template)) as w:
        await w.chat(tools=TOOLS)
        assert [tool["function"]["name"] for tool in template.calls[-1]["tools"]] == ["get_weather", "now"]
        assert template.calls[-1]["tools"][0] == WEATHER


async def test_a_template_without_tools_is_told_in_words() -> None:
    template = LineTemplate(text="{{ messages }}")
    async with world(Plan(script=spoken(CALL), template=template, context=4096)) as w:
        answer = await w.chat(tools=TOOLS)
        assert template.calls[-1]["tools"] is None
        assert "get_weather" in template.calls[-1]["messages"][0]["content"]
        assert calls(answer.json()["choices"][0]) == [("get_weather", {"city": "Zürich"})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_required_and_named_tools_are_enforced_by_grammar(choice: Any) -> None:
    async with served(plan(NOW)) as w:
        for answer in await both(w, tool_choice=choice):
            assert calls(answer) == [("now", {})]
            assert answer["finish_reason"] == "tool_calls"
        spec = GrammarSpec.decode(str(w.engine.requests[-1].grammar))
        assert spec.kind is GrammarKind.TOOLS
        names = [tool["name"] for tool in spec.value["tools"]]
        assert names == (["get_weather", "now"] if choice == "required" else ["now"])
        assert spec.value["parallel"] is (choice == "required")
        assert not spec.value["free"]


async def test_auto_is_free_unless_a_tool_is_strict() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with world(plan("ok")) as w:
        await w.chat(tools=TOOLS)
        assert w.engine.requests[-1].grammar is None
        await w.chat(tools=[strict, TIME])
        spec = GrammarSpec.decode(str(w.engine.requests[-1].grammar))
        assert spec.value["free"]
        assert [tool["parameters"] for tool in spec.value["tools"]] == [WEATHER["function"]["parameters"], {}]
        await w.chat(tools=[TIME], tool_choice="required")
        (tool,) = GrammarSpec.decode(str(w.engine.requests[-1].grammar)).value["tools"]
        assert tool["parameters"]["properties"] == {}, "a function without parameters takes nothing"
        assert tool["parameters"]["additionalProperties"] is False
        await w.chat(tools=TOOLS, response_format={"type": "json_object"})
        assert GrammarSpec.decode(str(w.engine.requests[-1].grammar)).value["otherwise"] == {"type": "object"}


async def test_strict_calls_in_python_are_refused_rather_than_not_enforced() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    async with world(plan("ok", LineTemplate(text="{{ tools }} ```tool_code"))) as w:
        answer = await w.chat(tools=[strict])
        assert answer.status_code == 400
        assert "strict" in answer.json()["error"]["message"]
        assert (await w.chat(tools=[strict], tool_choice="required")).status_code == 200


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
        ("tools[0].type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
        ("tools[0].type", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "f g"}}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
        ("tools", {"tools": [TIME] * 2}),
        ("tools", {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}),
        (
            "tools[0].function.parameters",
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
        ),
        (
            "tools[0].function.parameters",
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"type": "string"}},
                    }
                ]
            },
        ),
        (
            "response_format",
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        ),
        ("structured_outputs", {"tools": TOOLS, "structured_outputs": {"regex": "a"}}),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    async with world(plan("ok")) as w:
        answer = await w.chat(**fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert not w.engine.requests


async def test_reasoning_is_apart_from_content_and_counted() -> None:
    text = "<think>\nHm, 2 < 3.\n</think>\n\nYes."
    async with served(plan(text, THINKING)) as w:
        answer = (await w.chat()).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, 2 < 3.", "Yes.")
        reasoning = len("<think>\nHm, 2 < 3.\n</think>")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning
        stream = events(await w.chat(stream=True, stream_options={"include_usage": True}))
        deltas = [choice["delta"] for event in stream[:-1] for choice in event["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, 2 < 3."
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
        assert stream[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning


async def test_a_prompt_may_have_opened_the_reasoning() -> None:
    class Opened(LineTemplate):
        def render(self, *args: Any, **fields: Any) -> str:
            return super().render(*args, **fields) + "<think>\n"

    async with served(plan(f"Hm.</think>{NOW}", Opened(text=THINKING.text))) as w:
        for choice in await both(w):
            assert choice["message"]["reasoning_content"] == "Hm."
            assert calls(choice) == [("now", {})]
        await w.chat(response_format={"type": "json_object"})
        assert GrammarSpec.decode(str(w.engine.requests[-1].grammar)).think == "</think>"
        answer = await w.chat(structured_outputs={"grammar": 'start: "a"'})
        assert answer.status_code == 400


async def test_models_that_do_not_reason_may_write_the_tag() -> None:
    async with world(plan("<think>x</think>y")) as w:
        message = (await w.chat()).json()["choices"][0]["message"]
        assert message["content"] == "<think>x</think>y"
        assert "reasoning_content" not in message


async def test_logprobs_of_an_answer_with_calls_are_those_of_its_tokens() -> None:
    async with world(plan(f"Hm {CALL}")) as w:
        whole = (await w.chat(tools=TOOLS, logprobs=True)).json()["choices"][0]
        stream = events(await w.chat(tools=TOOLS, logprobs=True, stream=True))
    tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
    assert len(tokens) == len(f"Hm {CALL}".encode())
    streamed = [
        entry["token"]
        for event in stream[:-1]
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == tokens


async def test_a_stop_string_inside_a_call_cuts_it() -> None:
    async with served(plan(CALL)) as w:
        for choice in await both(w, stop=["rich"]):
            assert choice["finish_reason"] == "stop"
            assert not choice["message"].get("tool_calls")
        for choice in await both(w, stop=["never"]):
            assert calls(choice) == [("get_weather", {"city": "Zürich"})]


async def test_choices_are_read_apart() -> None:
    async with world(plan(f"a{CALL}")) as w:
        answer = (await w.chat(tools=TOOLS, n=2)).json()
    assert [calls(choice) for choice in answer["choices"]] == [[("get_weather", {"city": "Zürich"})]] * 2
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}) == 2


XML = LineTemplate(text="{{ tools }} <function=")
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>"
)


async def test_a_model_that_writes_xml_is_held_to_xml_where_bare_text_allows_it() -> None:
    async with served(plan(XML_CALL, XML)) as w:
        for choice in await both(w, tool_choice="required"):
            assert calls(choice) == [("get_weather", {"city": "Zürich"})]
        grammar = GrammarSpec.decode(w.engine.requests[0].grammar or "")
        assert grammar.value["dialect"] == "qwen3-coder"
    anything = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
    call = '<tool_call>\n{"name": "any", "arguments": {"a b": 1}}\n</tool_call>'
    async with world(plan(call, XML)) as w:
        answer = (await w.chat(tools=[anything], tool_choice="required")).json()
        assert calls(answer["choices"][0]) == [("any", {"a b": 1})]
        assert GrammarSpec.decode(w.engine.requests[0].grammar or "").value["dialect"] == "hermes"


async def test_the_dialect_can_be_said() -> None:
    engine, deployment, settings, _ = build(plan("ok"))
    assert deployment.current.dialect == "hermes"
    parts = (
        deployment.current.tokenizer,
        deployment.current.template,
        deployment.current.card,
        settings.limits,
    )
    assert Face("m", engine, *parts, "llama3").dialect == "llama3"
    with pytest.raises(ConfigError, match="tool_parser must be one of hermes"):
        Face("m", engine, *parts, "esperanto")
