"""Messages on their way into the model's own chat template."""

from __future__ import annotations

from typing import Any

import pytest

from toque.text.template import ChatTemplate

from .world import LineTemplate, Plan, World, events, texts, world


def real(source: str) -> Any:
    return ChatTemplate(source, special_texts={"bos_token": "<s>", "eos_token": "</s>"})


CHATML = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
    "[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('Conversation must start with user') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


async def prompt_of(w: World, **fields: Any) -> str:
    answer = await w.chat(**fields)
    assert answer.status_code == 200, answer.text
    return w.deployment.current.tokenizer.decode(list(w.engine.requests[-1].prompt), skip_special=False)


async def test_a_template_that_refuses_gives_400_with_its_own_message() -> None:
    """Field case BR-026."""
    user, system, assistant = ({"role": r, "content": "x"} for r in ("user", "system", "assistant"))
    async with world(Plan(template=real(STRICT))) as w:
        for messages, text in (
            ([system, user], "Conversation must start with user"),
            ([{"role": "developer", "content": "x"}, user], "Conversation must start with user"),
            ([assistant], "Conversation must start with user"),
            ([user, user], "Roles must alternate"),
        ):
            answer = await w.chat(messages=messages)
            assert answer.status_code == 400
            assert text in answer.json()["error"]["message"]
        assert (await w.chat(messages=[{"role": "robot", "content": "x"}])).json()["error"][
            "param"
        ] == "messages[0].role"
        assert await w.alive()


async def test_replayed_tool_turns_are_rendered_from_a_mapping() -> None:
    """Field case BR-027."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":3}'}}
    messages = [
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "user", "content": "and?"},
    ]
    async with world(Plan(template=real(CHATML))) as w:
        text = await prompt_of(w, messages=messages)
        assert '[assistant]<call>add {"a": 3}</call>[end]' in text
        assert "None" not in text
        call["function"] = {"name": "add", "arguments": ""}
        assert "<call>add {}</call>" in await prompt_of(w, messages=messages)
        call["function"] = {"name": "add", "arguments": "{"}
        answer = await w.chat(messages=messages)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_a_template_that_joins_arguments_as_text_gets_text() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}"
    source = "{% for m in messages %}" + calls + "{% endfor %}x"
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    async with world(Plan(template=real(source))) as w:
        assert await prompt_of(w, messages=messages) == '({"a": 3})x'


async def test_the_last_message_can_be_continued() -> None:
    """Field case BR-031."""
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "1, 2, "}]
    async with world(Plan(template=real(CHATML))) as w:
        open_end = {"continue_final_message": True, "add_generation_prompt": False}
        for fields in (open_end, {"continue_final_message": True}):
            assert (await prompt_of(w, messages=messages, **fields)).endswith("[assistant]1, 2, ")
        assert (await prompt_of(w, messages=messages)).endswith("1, 2, [end][assistant]")
        both = await w.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert both.status_code == 400
        assert both.json()["error"]["param"] == "continue_final_message"
        users_turn = await w.chat(messages=messages[:1], continue_final_message=True)
        assert users_turn.json()["error"]["param"] == "continue_final_message"
        plain = await w.chat(messages=messages, **open_end)
        assert plain.json()["choices"][0]["message"]["content"] == "ok"
        echoed = await w.chat(messages=messages, echo=True, **open_end)
        assert echoed.json()["choices"][0]["message"]["content"] == "1, 2, ok"
        stream = events(await w.chat(messages=messages, echo=True, stream=True, **open_end))
        assert "".join(texts(stream)) == "1, 2, ok"


async def test_without_a_template_only_completions_work() -> None:
    """Field case BR-032."""
    async with world(Plan(template=None)) as w:
        answer = await w.chat()
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"
        assert "/v1/completions" in answer.json()["error"]["message"]
        assert (await w.complete()).status_code == 200


@pytest.mark.parametrize("add_bos", [True, False])
async def test_the_beginning_of_text_comes_once(add_bos: bool) -> None:
    """Field case BR-033."""
    async with world(Plan(template=real(CHATML), add_bos=add_bos)) as w:
        await w.chat()
        await w.complete(prompt="hi")
        await w.complete(prompt="<s>hi")
        answer = await w.complete(prompt=[104, 105])
        prompts = [request.prompt for request in w.engine.requests]
        assert prompts[0].count(256) == 1  # the template's own
        assert prompts[1].count(256) == int(add_bos)
        assert prompts[2].count(256) == 1
        assert prompts[3] == (104, 105)
        assert answer.json()["usage"]["prompt_tokens"] == 2


async def test_an_empty_prompt_needs_a_beginning_of_text() -> None:
    async with world(Plan(add_bos=False)) as w:
        answer = await w.complete(prompt="")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
    async with world() as w:
        assert (await w.complete(prompt="")).status_code == 200


async def test_text_parts_are_joined_and_a_developer_speaks_as_system(parrot: World) -> None:
    template: Any = parrot.deployment.current.template
    assert isinstance(template, LineTemplate)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await parrot.chat(
        messages=[{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    )
    assert template.calls[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
    ]


async def test_template_variables_reach_the_template(parrot: World) -> None:
    template: Any = parrot.deployment.current.template
    await parrot.chat(chat_template_kwargs={"enable_thinking": False})
    assert template.calls[0]["extra"] == {"enable_thinking": False}


async def test_special_tokens_written_by_a_user_are_one_thing_everywhere(parrot: World) -> None:
    """What the tokenizer makes of them is the tokenizer's business; /tokenize and chat agree on it."""
    messages = [{"role": "user", "content": "<s>"}]
    ids = (await parrot.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await parrot.chat(messages=messages)
    assert tuple(ids) == parrot.engine.requests[0].prompt
