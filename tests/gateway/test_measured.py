"""The counters of a running gateway agree with what its clients were told (field case BR-073)."""

from __future__ import annotations

import re

import httpx

from toque.routing.fake import Script
from toque.types import EngineRequest

from .world import Plan, World, events, served, soon, spoken


async def scraped(w: World) -> dict[str, float]:
    text = (await w.client.get("/metrics")).text
    return {n: float(v) for n, v in re.findall(r"^([^#\s]\S*(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


def _script(request: EngineRequest) -> Script:
    if request.sampling.seed == 1:
        return Script(b"x", first_delay_s=30)
    if request.sampling.seed == 2:
        return Script(b"x" * 500, delay_s=0.005, hold=True)
    return spoken("answer", per_step=2, cached_tokens=1)


async def test_metrics_add_up_to_what_was_answered() -> None:
    async with served(Plan(script=_script)) as w:
        before = await scraped(w)
        usages = [(await w.chat()).json()["usage"] for _ in range(10)]
        usages += [(await w.complete(n=3, prompt=["a", "b"])).json()["usage"]]
        for _ in range(10):
            stream = events(await w.chat(stream=True, stream_options={"include_usage": True}))
            usages.append(stream[-2]["usage"])
        for _ in range(5):  # gone before the first token
            with_timeout = httpx.Timeout(5, read=0.1)
            body = {"model": "parrot", "prompt": "hi", "seed": 1}
            try:
                await w.client.post("/v1/completions", json=body, timeout=with_timeout)
            except httpx.ReadTimeout:
                continue
            raise AssertionError("it was answered")
        for _ in range(3):
            assert (await w.chat(temperature=7)).status_code == 400
        await soon(lambda: w.engine.running == 0)
        after = await scraped(w)
        label = '{model="parrot"}'

        def grew(name: str) -> float:
            return after[name] - before.get(name, 0.0)

        assert grew(f"toque_time_to_first_token_seconds_count{label}") == 21
        assert grew(f"toque_e2e_request_latency_seconds_count{label}") == 21
        assert grew(f"toque_prompt_tokens_total{label}") == sum(u["prompt_tokens"] for u in usages)
        assert grew(f"toque_generation_tokens_total{label}") == sum(u["completion_tokens"] for u in usages)
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
        assert grew(f"toque_prompt_tokens_cached_total{label}") == cached == 22
        chat = '{endpoint="/v1/chat/completions",status="%s"}'
        assert grew("toque_requests_total" + chat % 200) == 20
        assert grew("toque_requests_total" + chat % 400) == 3
        assert grew('toque_requests_total{endpoint="/v1/completions",status="499"}') == 5
        assert after[f"toque_requests_running{label}"] == 0
        assert after[f"toque_requests_waiting{label}"] == 0
        assert all(after[name] >= value for name, value in before.items() if "_total" in name)


async def test_tokens_of_a_client_that_left_are_counted() -> None:
    async with served(Plan(script=_script)) as w:
        async with w.client.stream(
            "POST",
            "/v1/completions",
            json={"model": "parrot", "prompt": "hi", "seed": 2, "max_tokens": 400, "stream": True},
        ) as answer:
            received = 0
            async for line in answer.aiter_lines():
                received += line.startswith("data: {")
                if received == 7:
                    break
        await soon(lambda: w.engine.running == 0)
        after = await scraped(w)
        generated = after['toque_generation_tokens_total{model="parrot"}']
        assert 7 <= generated <= w.engine.generated_tokens < 400
        assert after['toque_prompt_tokens_total{model="parrot"}'] == 3
        assert after['toque_e2e_request_latency_seconds_count{model="parrot"}'] == 0


async def test_odd_paths_do_not_make_new_labels() -> None:
    async with served() as w:
        for i in range(20):
            await w.client.get(f"/nothing/{i}")
            await w.client.get(f"/v1/models/{i}")
        endpoints = {
            re.search(r'endpoint="([^"]*)"', n).group(1) for n in await scraped(w) if "endpoint" in n
        }  # type: ignore[union-attr]
        assert endpoints == {"other", "/v1/models/{id}"}
