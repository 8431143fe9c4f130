"""``/v1/completions``: how a text completion is spelled."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from toque.gateway.face import Face
from toque.gateway.generation import ChoiceDelta
from toque.gateway.http.logprobs import CompletionLogprobs
from toque.gateway.http.respond import FoldedChoice
from toque.gateway.http.usage import usage_object
from toque.gateway.requests import PreparedRequest, Usage

_encode = msgspec.json.encode


class CompletionFormat:
    """Completion chunks and bodies; see ChatFormat for how chunks are made."""

    def __init__(self, prepared: PreparedRequest, face: Face) -> None:
        request = prepared.request
        self._id = request.request_id
        self._created = int(time.time())
        self._model = face.name
        self._include_usage = request.include_usage
        self._logprobs: dict[int, CompletionLogprobs] | None = None
        if request.sampling.logprobs is not None:
            self._logprobs = {
                sequence.index: CompletionLogprobs(
                    face.tokenizer,
                    request.sampling.logprobs,
                    sequence.prompt if request.echo else (),
                    len(sequence.echo_text),
                )
                for sequence in prepared.sequences
            }
        head = _encode(
            {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def events(self, deltas: list[ChoiceDelta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            logprobs = b"null"
            if self._logprobs is not None and (delta.logprobs or delta.prompt_logprobs):
                logprobs = _encode(
                    self._logprobs[delta.index].render(delta.prompt_logprobs, delta.pieces, delta.logprobs)
                )
            if not delta.text and logprobs == b"null" and delta.finish_reason is None:
                continue
            reason = (
                b"null" if delta.finish_reason is None else b'"' + delta.finish_reason.value.encode() + b'"'
            )
            parts.append(
                b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b'
                % (self._head, delta.index, _encode(delta.text), logprobs, reason, self._tail)
            )
        return b"".join(parts)

    def closing(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        return self._head + b'],"usage":' + _encode(usage_object(usage)) + b"}\n\ndata: [DONE]\n\n"

    def body(self, choices: list[FoldedChoice], usage: Usage) -> bytes:
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": self._whole_logprobs(choice),
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage_object(usage),
        }
        return _encode(answer)

    def _whole_logprobs(self, choice: FoldedChoice) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return self._logprobs[choice.index].render(choice.prompt_logprobs, choice.pieces, choice.logprobs)
