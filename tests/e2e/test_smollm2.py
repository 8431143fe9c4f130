"""The default model, as the README has it: served, asked, and it answers with sense."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import Server, serving

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[Server]:
    with serving(smollm2, name="smollm2", backend="cpu") as running:
        yield running


def test_it_answers_with_sense_streamed_or_not(smol: Server) -> None:
    with smol.client() as client:
        whole = client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=40, temperature=0
        )  # type: ignore[arg-type]
        text = whole.choices[0].message.content or ""
        assert "Paris" in text
        assert whole.choices[0].finish_reason == "stop"
        streamed = ""
        for chunk in client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=40,
            temperature=0,
            stream=True,
        ):
            streamed += chunk.choices[0].delta.content or ""
        assert streamed == text


def test_the_second_time_the_prompt_is_cached(smol: Server) -> None:
    messages = [{"role": "user", "content": "Tell me about rivers. " * 30}]
    first, second = (
        smol.post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0).json()
        for _ in range(2)
    )
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96


def test_greedy_text_does_not_depend_on_company(smol: Server) -> None:
    """Field case BR-053, over HTTP: alone, then beside seven others."""
    alone = smol.post("/v1/completions", prompt="Once upon a time", max_tokens=24, temperature=0).json()
    texts: list[str] = []

    def ask(prompt: str, **fields: object) -> None:
        answer = smol.post("/v1/completions", prompt=prompt, max_tokens=24, **fields).json()
        if prompt == "Once upon a time":
            texts.append(answer["choices"][0]["text"])

    others = [
        threading.Thread(target=ask, args=(f"Number {i} is " * i,), kwargs={"seed": i}) for i in range(1, 7)
    ]
    same = [
        threading.Thread(target=ask, args=("Once upon a time",), kwargs={"temperature": 0}) for _ in range(2)
    ]
    for thread in (*others, *same):
        thread.start()
    for thread in (*others, *same):
        thread.join()
    assert texts == [alone["choices"][0]["text"]] * 2


def test_a_seeded_text_repeats_and_an_unseeded_one_does_not(smol: Server) -> None:
    """Field case BR-024, over HTTP."""
    ask = {"prompt": "The weather today", "max_tokens": 16, "temperature": 0.9}
    seeded = [smol.post("/v1/completions", **ask, seed=42, n=3).json()["choices"] for _ in range(2)]
    texts = [[choice["text"] for choice in choices] for choices in seeded]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    free = {smol.post("/v1/completions", **ask).json()["choices"][0]["text"] for _ in range(4)}
    assert len(free) > 1
