"""Chat templates render like Hugging Face's, whatever the messages."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toque.errors import FormatError, TemplateError
from toque.formats.checkpoint import Checkpoint
from toque.text.template import ChatTemplate, load_template
from toque.text.tokenizer import Tokenizer

ADD = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <one> & möre",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [ADD]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    {"role": "user", "content": "thanks"},
]
CONCATENATES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ '' + c.function.arguments }}>{% endfor %}\n{% endfor %}"
)
ITERATES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments.items() %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}\n{% endfor %}"
)
TURNS = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}\n"
    "        {{- raise_exception('Unknown role: ' + message['role']) }}\n"
    "    {% endif %}\n"
    "    {% if loop.index0 > 5 %}{% break %}{% endif %}\n"
    "<|{{ message['role'] }}|>\n"
    "{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n"
    "{% generation %}x{% endgeneration %}\n"
    "{%- if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NAMESPACES = (
    "{% set ns = namespace(system='', n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = "
    "m.content %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ ns.n }}/{{ loop.length }} {{ m.role | upper }}: "
    "{{ m.content }}{{ ' (' ~ ns.system ~ ')' if ns.system else '' }}\n{% endfor %}{% macro end(x='e') %}<{{ x }}>"
    "{% endmacro %}{{ end() ~ end('f') }}{{ messages[1:] | map(attribute='role') | join(',') }}"
    "{{ dict(a=1, b=[1, 'é<']) | tojson }}{{ messages[-1].content.split(' ')[::-1] }}{{ missing }}{{ none }}"
)


def hugging_face(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    special: dict[str, str] | None = None,
    **options: Any,
) -> str:
    """What ``apply_chat_template`` renders: the same function of transformers, on the same template."""
    from transformers.utils import chat_template_utils as reference

    options = {"add_generation_prompt": True, **options}
    chat = [
        {key: value for key, value in message.items() if value is not None}
        for message in copy.deepcopy(messages)
    ]
    rendered, _ = reference.render_jinja_template(
        [chat], tools=tools, documents=None, chat_template=template, **options, **(special or {})
    )
    return str(rendered[0])


@pytest.fixture(scope="module")
def qwen_template(qwen_checkpoint: Checkpoint, qwen_tokenizer: Tokenizer) -> ChatTemplate:
    template = load_template(qwen_checkpoint, qwen_tokenizer)
    assert template is not None
    return template


@pytest.fixture(scope="module")
def smollm2_template(smollm2_checkpoint: Checkpoint, smollm2_tokenizer: Tokenizer) -> ChatTemplate:
    template = load_template(smollm2_checkpoint, smollm2_tokenizer)
    assert template is not None
    return template


def with_dictionaries(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return messages


def test_smollm2s_template(smollm2_template: ChatTemplate) -> None:
    messages = [
        {"role": "user", "content": " hi \n"},
        {"role": "assistant", "content": "é"},
        {"role": "user", "content": "<|im_end|>"},
    ]
    for start in (0, 1):
        for more in (True, False):
            expected = hugging_face(smollm2_template.source(), messages[start:], add_generation_prompt=more)
            assert smollm2_template.render(messages[start:], add_generation_prompt=more) == expected


def test_chat_ids_equal_the_rendered_text_encoded_once(
    smollm2_template: ChatTemplate, smollm2_tokenizer: Tokenizer
) -> None:
    # field case BR-033
    ids = smollm2_tokenizer.encode(
        smollm2_template.render([{"role": "user", "content": "hi"}]), add_special=False
    )
    assert ids[:2] == [1, smollm2_tokenizer.token_id("system")]
    assert ids.count(1) == 3  # system, user, and the open assistant turn


@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]])
def test_qwens_template_with_tool_turns(qwen_template: ChatTemplate, tools: list[Any] | None) -> None:
    # field case BR-027
    expected = hugging_face(qwen_template.source(), with_dictionaries(TOOL_TURNS), tools)
    assert qwen_template.render(TOOL_TURNS, tools=tools) == expected
    assert '"arguments": {"a": 3}}' in expected
    assert "None" not in expected


@pytest.mark.parametrize("template", [TURNS, NAMESPACES])
def test_handwritten_templates(template: str) -> None:
    messages = [
        {"role": role, "content": f"{role} says <é> & 'x'  "}
        for role in ("system", "user", "assistant", "user")
    ]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    expected = hugging_face(template, messages, [TOOL], special)
    assert ChatTemplate(template, special_texts=special).render(messages, tools=[TOOL]) == expected


def test_arguments_are_what_the_template_wants() -> None:
    # field case BR-027: a dictionary, or JSON text where the template joins it with text.
    assert '<add {"a": 3}>' in ChatTemplate(CONCATENATES).render(TOOL_TURNS)
    assert "[a=3]" in ChatTemplate(ITERATES).render(TOOL_TURNS)
    printed = "{% for c in messages[1].tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    assert ChatTemplate(printed).render(TOOL_TURNS) == '{"a": 3}'


@pytest.mark.parametrize("source", [CONCATENATES, ITERATES])
def test_empty_arguments_are_an_empty_object_and_broken_ones_an_error(source: str) -> None:
    # field case BR-027
    def turns(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]

    template = ChatTemplate(source)
    for empty in ("", " ", None, "{}", {}):
        assert template.render(turns(empty)).startswith("assistant:")
        assert ("<f {}>" in template.render(turns(empty))) is (source is CONCATENATES)
    for broken in ("{", "[1]", "3", [1], "{'a': 1}"):
        with pytest.raises(TemplateError) as caught:
            template.render(turns(broken))
        assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_absent_content_is_empty_text_or_none_where_the_template_asks() -> None:
    joins = "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}"
    assert (
        ChatTemplate(joins).render([{"role": "assistant", "content": None}, {"role": "user"}])
        == "assistant:;user:;"
    )
    asks = "{% for m in messages %}{{ 'none' if m['content'] is none else m['content'] }};{% endfor %}"
    assert ChatTemplate(asks).render([{"role": "assistant"}, {"role": "user", "content": "x"}]) == "none;x;"


def test_text_parts_are_joined_unless_the_template_walks_over_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    walks = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(walks).render([{"role": "user", "content": parts}]) == "[a][b]"
    with pytest.raises(TemplateError, match="text only, not image_url"):
        ChatTemplate("{{ messages[0].content }}").render(
            [{"role": "user", "content": [{"type": "image_url"}]}]
        )


def test_reasoning_has_every_name_in_use() -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}")
    for name in ("reasoning", "reasoning_content", "thinking"):
        assert template.render([{"role": "assistant", "content": "", name: "hm"}]) == "hm/hm"


@pytest.mark.parametrize("role", ["developer", "robot"])
def test_a_refused_role_is_an_error_in_the_templates_words(role: str) -> None:
    # field case BR-026
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(TURNS).render([{"role": role, "content": "x"}])
    assert caught.value.message == f"Unknown role: {role}"
    assert (caught.value.status, caught.value.param, caught.value.error_code) == (
        400,
        "messages",
        "chat_template_error",
    )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [3],
        ["x"],
        [{}],
        [{"role": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "tool_calls": 3}],
    ],
)
def test_odd_messages_end_in_an_error_or_a_text(
    messages: list[Any], smollm2_template: ChatTemplate, qwen_template: ChatTemplate
) -> None:
    lengths = []
    for template in (smollm2_template, qwen_template, ChatTemplate(TURNS)):
        try:
            assert isinstance(template.render(messages), str)
        except TemplateError as error:
            lengths.append(len(error.message))
    assert all(length < 700 for length in lengths)


# Continuing the last message


@pytest.mark.parametrize("source", ["smollm2", TURNS, "{{ messages[-1]['content'].strip() }}</s>"])
@pytest.mark.parametrize("content", ["1, 2, ", "1, 2,", " 1\n", [{"type": "text", "text": "1, "}]])
def test_the_last_message_stays_open_as_hugging_face_leaves_it(
    source: str, content: Any, smollm2_template: ChatTemplate
) -> None:
    # field case BR-031
    template = smollm2_template if source == "smollm2" else ChatTemplate(source)
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": content}]
    flat = content if isinstance(content, str) else content[0]["text"]
    expected = hugging_face(
        template.source(),
        [messages[0], {"role": "assistant", "content": flat}],
        special={"bos_token": ""},
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert template.render(messages, continue_final_message=True, add_generation_prompt=False) == expected
    assert expected.endswith(flat) or expected.endswith(flat.strip())


def test_continuing_and_opening_a_turn_exclude_each_other(smollm2_template: ChatTemplate) -> None:
    messages = [{"role": "assistant", "content": "1, "}]
    with pytest.raises(TemplateError) as caught:
        smollm2_template.render(messages, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"
    for odd in ([], [{"role": "assistant", "content": None}], [{"role": "assistant"}]):
        with pytest.raises(TemplateError):
            smollm2_template.render(odd, continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(TemplateError, match="drops"):
        ChatTemplate("{{ messages[0].content }}").render(
            [{"role": "user", "content": "a"}, *messages],
            continue_final_message=True,
            add_generation_prompt=False,
        )


# Where templates come from


def checkpoint(folder: Path | None = None, **metadata: Any) -> Any:
    return SimpleNamespace(
        metadata={key.replace("__", "."): v for key, v in metadata.items()}, folder=folder, path=folder
    )


def test_no_template_is_none(
    gemma3_checkpoint: Checkpoint, gemma3_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    # field case BR-032
    assert load_template(gemma3_checkpoint, gemma3_tokenizer) is None
    assert load_template(checkpoint(tmp_path), gemma3_tokenizer) is None


def test_the_jinja_file_comes_before_the_configuration(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    # field case BR-032
    def rendered() -> str:
        template = load_template(checkpoint(tmp_path), tiny_tokenizer)
        assert template is not None
        return template.render([])

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config {{ eos_token }}"}))
    assert rendered() == "config <eos>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"


def test_named_templates_are_chosen_by_tools(tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    metadata = {
        "tokenizer__chat_template": "d",
        "tokenizer__chat_templates": ["tool_use"],
        "tokenizer__chat_template__tool_use": "t",
    }
    for source in (checkpoint(tmp_path), checkpoint(**metadata)):
        template = load_template(source, tiny_tokenizer)
        assert template is not None
        assert (template.render([]), template.render([], tools=[TOOL])) == ("d", "t")


@pytest.mark.parametrize(
    "value", [3, [3], [{"name": "default"}], "{% for %}", "{{ " + "(" * 5000, "x" * 1_000_001]
)
def test_a_damaged_template_is_refused_at_load(value: Any, tmp_path: Path, tiny_tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(FormatError):
        load_template(checkpoint(tmp_path), tiny_tokenizer)


def test_the_date_is_that_of_the_day() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == str(datetime.now().year)


# Everything at once

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
CALL = st.builds(
    lambda name, arguments: {
        "id": "1",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    },
    TEXT,
    st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.booleans(), st.none()), max_size=3),
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.one_of(st.none(), TEXT)},
        optional={"tool_calls": st.lists(CALL, min_size=1, max_size=2)},
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(MESSAGE, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_any_messages_render_as_hugging_face_renders_them(
    qwen_template: ChatTemplate, messages: list[dict[str, Any]], tools: bool, more: bool
) -> None:
    given_before = copy.deepcopy(messages)
    chosen = [TOOL] if tools else None
    rendered = qwen_template.render(messages, tools=chosen, add_generation_prompt=more)
    assert messages == given_before
    filled = [message | {"content": message["content"] or ""} for message in with_dictionaries(messages)]
    assert rendered == hugging_face(qwen_template.source(), filled, chosen, add_generation_prompt=more)
