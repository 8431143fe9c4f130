"""A gateway over scripted engines, with a vocabulary small enough to write tokens by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from toque.config import Settings, load_settings
from toque.errors import TemplateError
from toque.gateway.app import create_app
from toque.gateway.deployment import FixedDeployment
from toque.gateway.listen import bind
from toque.gateway.server import GatewayServer
from toque.routing.fake import FakeEngineClient, Script
from toque.text.byte_alphabet import ByteCoding
from toque.types import EngineRequest, ModelCard

BOS, EOS = 256, 257
FIRST_PIECE = 258
CONTEXT = 512


class PieceTokenizer:
    """Ids 0-255 are bytes, 256 begins a text, 257 ends it, and each piece given has an id of its own."""

    coding = ByteCoding.BYTE_LEVEL
    strip_first_space = False
    bos_id = BOS
    bos_text = "<s>"
    eos_ids = frozenset({EOS})

    def __init__(self, pieces: Sequence[bytes] = (), add_bos: bool = True) -> None:
        self.pieces = list(pieces)
        self.add_bos = add_bos
        self.vocab_size = FIRST_PIECE + len(self.pieces)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        ids: list[int] = [BOS] if add_special and self.add_bos else []
        for number, part in enumerate(text.split("<s>")):
            ids += [BOS] if number else []
            ids += part.encode()
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        if token in (BOS, EOS):
            return b"<s>" if token == BOS else b"</s>"
        return self.pieces[token - FIRST_PIECE] if token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def fallback_byte(self, token: int) -> int | None:
        return None

    def is_special(self, token: int) -> bool:
        return token in (BOS, EOS)

    def token_id(self, text: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(text)

    def at_least_tokens(self, text: str) -> int:
        return len(text) // 4


class LineTemplate:
    """``role: content`` a line. It refuses a conversation that does not begin with the user, as some models do."""

    def __init__(self, strict: bool = False, text: str = "{{ messages }}") -> None:
        self.strict = strict
        self.text = text  # what its source is taken for
        self.calls: list[dict[str, Any]] = []

    def source(self, *, tools: bool = False) -> str:
        return self.text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        self.calls.append({"messages": list(messages), "extra": extra, "tools": tools})
        if self.strict and messages[0]["role"] != "user":
            raise TemplateError("Conversation must start with a user message", param="messages")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        text = "<s>" + "\n".join(lines)
        if continue_final_message:
            return text
        return text + ("\nassistant: " if add_generation_prompt else "\n")


@dataclass
class World:
    """One model behind a gateway, and what a test wants to look at."""

    engine: FakeEngineClient
    deployment: FixedDeployment
    settings: Settings
    app: Any
    client: httpx.AsyncClient
    url: str = ""

    @property
    def gateway(self) -> Any:
        return self.app.state.gateway

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "parrot", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "parrot", "prompt": "hi", **fields})

    async def alive(self) -> bool:
        answer = await self.complete(max_tokens=1)
        return answer.status_code == 200 and (await self.client.get("/health")).status_code == 200


@dataclass
class Plan:
    """How to build a World."""

    script: Script | Callable[[EngineRequest], Script] = field(default_factory=lambda: spoken("ok"))
    pieces: Sequence[bytes] = ()
    template: LineTemplate | None = field(default_factory=LineTemplate)
    flags: Mapping[str, object] = field(default_factory=dict)
    name: str = "parrot"
    add_bos: bool = True
    context: int = CONTEXT


def spoken(text: str, **fields: Any) -> Script:
    """A script that says a text byte by byte and then ends."""
    return Script(tokens=[*text.encode(), EOS], **fields)


def build(plan: Plan) -> tuple[FakeEngineClient, FixedDeployment, Settings, Any]:
    settings = load_settings(plan.flags, environ={})
    engine = FakeEngineClient(plan.script)
    tokenizer: Any = PieceTokenizer(plan.pieces, plan.add_bos)
    template: Any = plan.template
    card = ModelCard(plan.name, "llama", 1, "F32", plan.context, tokenizer.vocab_size, digest="v1-abc")
    deployment = FixedDeployment(plan.name, engine, tokenizer, template, card, settings.limits)
    return engine, deployment, settings, create_app({plan.name: deployment}, settings)


@asynccontextmanager
async def world(plan: Plan | None = None, headers: Mapping[str, str] | None = None) -> AsyncIterator[World]:
    """The application without sockets."""
    engine, deployment, settings, app = build(plan or Plan())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        yield World(engine, deployment, settings, app, client)
    app.state.gateway.close()


@asynccontextmanager
async def served(plan: Plan | None = None) -> AsyncIterator[World]:
    """The real server on a loopback port, in this event loop."""
    plan = plan or Plan()
    engine, deployment, settings, app = build(
        Plan(**{**vars(plan), "flags": {"server.port": 0, **plan.flags}})
    )
    listener = bind(settings.server, bool(settings.auth.api_keys))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = GatewayServer(app, settings.server, settings.limits.max_header_bytes)
    task = asyncio.create_task(server.serve([listener]))
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield World(engine, deployment, settings, app, client, url)
    if not task.done():
        server.stop()
        server.stop()
    await task
    app.state.gateway.close()


def events(answer: httpx.Response) -> list[Any]:
    """The data of each server-sent event; the last is the text "[DONE]" when the stream ended well."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found: list[Any] = []
    for block in answer.content.decode("utf-8").split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else httpx.Response(200, text=data).json())
    return found


def texts(stream: Sequence[Any], index: int = 0) -> list[str]:
    """The text of each chunk of one choice, in order."""
    found = []
    for event in stream:
        if event == "[DONE]":
            continue
        for choice in event["choices"]:
            if choice["index"] == index:
                found.append(choice["delta"].get("content") if "delta" in choice else choice["text"])
    return [text for text in found if text is not None]


async def soon(condition: Callable[[], bool], seconds: float = 30.0) -> float:
    """Seconds until the condition holds; fails when it does not within ``seconds``."""
    started = time.perf_counter()
    while not condition():
        assert time.perf_counter() - started < seconds, "it did not happen in time"
        await asyncio.sleep(0.005)
    return time.perf_counter() - started
