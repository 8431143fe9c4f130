"""``/v1/chat/completions``: how a chat answer is spelled."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from toque.gateway.face import Face
from toque.gateway.generation import ChoiceDelta
from toque.gateway.http.logprobs import chat_logprobs
from toque.gateway.http.respond import FoldedChoice
from toque.gateway.http.usage import usage_object
from toque.gateway.requests import PreparedRequest, Usage
from toque.text.tools.base import ToolDelta

_encode = msgspec.json.encode
_ROLE = b'{"role":"assistant","content":""}'
_ROLE_ALONE = b'{"role":"assistant","content":null}'  # of an answer that may be tool calls and no text


class ChatFormat:
    """Chat chunks and bodies.

    Chunks are put together from prepared bytes: of a streamed token only its text (and its logprobs) is encoded.
    """

    def __init__(self, prepared: PreparedRequest, face: Face) -> None:
        request = prepared.request
        self._id = request.request_id
        self._created = int(time.time())
        self._model = face.name
        self._tokenizer = face.tokenizer
        self._logprobs = request.sampling.logprobs is not None
        self._include_usage = request.include_usage
        self._opened: set[int] = set()
        self._may_call = bool(prepared.dialect)
        head = _encode(
            {
                "id": self._id,
                "object": "chat.completion.chunk",
                "created": self._created,
                "model": self._model,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def events(self, deltas: list[ChoiceDelta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            if delta.index not in self._opened:
                self._opened.add(delta.index)
                role = _ROLE_ALONE if self._may_call else _ROLE
                parts.append(self._chunk(delta.index, role, b"null", b"null"))
            logprobs = b"null"
            if self._logprobs and delta.logprobs:
                logprobs = _encode(chat_logprobs(delta.logprobs, self._tokenizer))
            if delta.reasoning:
                reasoning = b'{"reasoning_content":' + _encode(delta.reasoning) + b"}"
                parts.append(self._chunk(delta.index, reasoning, b"null", b"null"))
            if delta.text or logprobs != b"null":
                parts.append(
                    self._chunk(delta.index, b'{"content":' + _encode(delta.text) + b"}", logprobs, b"null")
                )
            for call in delta.calls:
                piece = b'{"tool_calls":[' + _encode(_call_delta(call)) + b"]}"
                parts.append(self._chunk(delta.index, piece, b"null", b"null"))
            if delta.finish_word is not None:
                reason = b'"' + delta.finish_word.encode() + b'"'
                parts.append(self._chunk(delta.index, b"{}", b"null", reason))
        return b"".join(parts)

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            index,
            delta,
            logprobs,
            reason,
            self._tail,
        )

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        return self._head + b'],"usage":' + _encode(usage_object(usage)) + b"}\n\ndata: [DONE]\n\n"

    def body(self, choices: list[FoldedChoice], usage: Usage) -> bytes:
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": choice.index,
                    "message": self._message(choice),
                    "logprobs": chat_logprobs(choice.logprobs, self._tokenizer) if self._logprobs else None,
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage_object(usage),
        }
        return _encode(answer)

    def _message(self, choice: FoldedChoice) -> dict[str, Any]:
        content = choice.text or None if self._may_call else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls
            ]
        return message


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    """Id, type and name only in the first piece of a call; arguments only in the others."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
