"""Sampling parameters refuse what they cannot mean, by name."""

from __future__ import annotations

from typing import Any

import pytest

from toque.errors import RequestError
from toque.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("min_p", -1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("max_tokens", -1),
        ("min_tokens", 10**10),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", ((5, 101.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((5, float("nan")),)),
        ("logit_bias", tuple((i, 0.0) for i in range(1025))),
        ("stop_token_ids", tuple(range(129))),
    ],
)
def test_a_bad_value_is_refused_by_name_and_briefly(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert field in error.value.message
    assert len(error.value.message) < 200


def test_the_smallest_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=5e-324).greedy
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-3).greedy
