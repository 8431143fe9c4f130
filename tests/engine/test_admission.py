from __future__ import annotations

from typing import Any

import pytest

from fixtures.engines import GREEDY, drain, make_engine, request
from toque.engine.admission import Limits, check_request
from toque.errors import ContextLengthError, RequestError
from toque.types import EngineRequest, SamplingParams

LIMITS = Limits(context_length=100, kv_tokens=200, vocab_size=64, valid_vocab=60)


def new_tokens(length: int, limits: Limits = LIMITS, **sampling: Any) -> int:
    return check_request(EngineRequest("r", (1,) * length, SamplingParams(**sampling)), limits)


def test_the_answer_is_cut_to_the_context() -> None:
    assert new_tokens(10, max_tokens=5) == 5
    assert new_tokens(10, max_tokens=10**9) == 90
    assert new_tokens(10) == 90
    assert new_tokens(99) == 1
    assert new_tokens(100, max_tokens=0) == 0


@pytest.mark.parametrize(
    ("length", "sampling"), [(100, {}), (150, {}), (100, {"max_tokens": 1}), (101, {"max_tokens": 0})]
)
def test_a_prompt_that_leaves_no_room_names_both_sizes(length: int, sampling: dict[str, Any]) -> None:
    with pytest.raises(ContextLengthError, match=rf"{length} tokens.* 100") as caught:
        new_tokens(length, **sampling)
    assert caught.value.error_code == "context_length_exceeded"


def test_what_the_whole_kv_cache_cannot_hold_is_refused() -> None:
    small = Limits(context_length=100, kv_tokens=32, vocab_size=64, valid_vocab=64)
    assert new_tokens(20, small, max_tokens=13) == 13  # the last token is never written
    with pytest.raises(RequestError, match=r"room for 33 tokens.*holds 32") as caught:
        new_tokens(20, small, max_tokens=14)
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestError, match="KV cache holds 32") as caught:
        new_tokens(40, small, max_tokens=1)
    assert caught.value.param == "prompt"
    assert new_tokens(20, small) == 13  # no limit given: what fits


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ((), {}, "prompt"),
        ((1, 64), {}, "prompt"),
        ((1, -1), {}, "prompt"),
        ((1,), {"logit_bias": ((60, 1.0),)}, "logit_bias"),  # padding: no token of the tokenizer
        ((1,), {"logit_bias": ((99_999_999, 5.0),)}, "logit_bias"),
        ((1,), {"stop_token_ids": (64,)}, "stop_token_ids"),
        ((1,), {"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_ids_that_do_not_exist_are_refused_by_name(
    prompt: tuple[int, ...], sampling: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_request(EngineRequest("r", prompt, SamplingParams(**sampling)), LIMITS)
    assert caught.value.param == param


def test_padding_ids_may_stand_in_a_prompt() -> None:
    check_request(EngineRequest("r", (63,), SamplingParams()), LIMITS)


def test_a_refused_request_leaves_no_trace_and_disturbs_nobody() -> None:
    engine = make_engine()
    engine.add(request("good", [1, 2, 3]))
    for wrong in (request("long", [1] * 64), request("id", [64]), request("none", []), request("good", [1])):
        with pytest.raises(RequestError):
            engine.add(wrong)
    answers = drain(engine)
    assert list(answers) == ["good"]
    assert len(answers["good"].tokens) == GREEDY.max_tokens
    engine.add(request("good", [1]))  # the name is free again
    assert len(drain(engine)["good"].tokens) == GREEDY.max_tokens
