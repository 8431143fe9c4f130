"""``Idempotency-Key``: a request that is sent again is answered again, and computed and billed once.

::

    key unknown           ─▶ computed; its whole answer is kept before the last bytes leave
    key known, same body  ─▶ the kept answer, with ``idempotent-replayed: true``
    key known, other body ─▶ 422
    key being computed    ─▶ 409 with ``retry-after``; the official clients come again by themselves

Only answers of status 200 are kept: an error, or an answer that its client did not wait for, may be tried again.
"""

from __future__ import annotations

import hashlib
import logging
import re

from toque.errors import IdempotencyKeyError, RequestError, RequestInProgressError, StoreError
from toque.gateway.answer_store import AnswerStore, KeptAnswer
from toque.gateway.gateway import Gateway
from toque.gateway.http.exchange import MODEL_VERSION, Exchange, Headers
from toque.gateway.http.generate import receive_json
from toque.gateway.http.operations import Handler

log = logging.getLogger("toque.gateway")

HEADER = "Idempotency-Key"
REPLAYED = (b"idempotent-replayed", b"true")
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class Recording:
    """Collects the answer to one keyed request, up to ``max_bytes``: a longer one is sent, but not kept."""

    def __init__(self, store: AnswerStore, caller: str, name: str, digest: bytes, max_bytes: int) -> None:
        self._store = store
        self._caller = caller
        self._name = name
        self._digest = digest
        self._room = max_bytes
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room >= 0:
            self._parts.append(data)
        else:
            self._parts.clear()

    async def keep(self, content_type: bytes, model: str, version: bytes) -> None:
        if self._room < 0:
            return
        kept = KeptAnswer(
            self._digest,
            content_type.decode("latin-1"),
            model,
            version.decode("latin-1"),
            b"".join(self._parts),
        )
        try:
            await self._store.keep(self._caller, self._name, kept)
        except StoreError as error:  # the answer is worth more than its copy
            log.error("an answer is not kept for its %s: %s", HEADER, error)


async def answer_once(exchange: Exchange, gateway: Gateway, handler: Handler) -> None:
    """Run ``handler``, unless this request has been answered before. RequestError names what is wrong with the key."""
    name = exchange.header(HEADER.lower().encode())
    store = gateway.answers
    if name is None or store is None:
        await handler(exchange, gateway)
        return
    if not _KEY.fullmatch(name):
        raise RequestError(
            f"the header {HEADER} takes 1 to 255 printable ASCII characters without spaces, got {len(name)} "
            "characters",
            param=HEADER,
        )
    exchange.body = await receive_json(exchange, gateway)
    digest = hashlib.sha256(exchange.endpoint.encode() + b"\0" + exchange.body).digest()
    caller = exchange.caller.key_id
    running = gateway.answering.get((caller, name))
    if running is not None:
        _check_same(running, digest)
        raise RequestInProgressError(
            f"a request with this {HEADER} is being answered: its answer will be here when it is done"
        )
    gateway.answering[caller, name] = digest
    try:
        kept = await _find(store, caller, name)
        if kept is not None:
            _check_same(kept.digest, digest)
            await _replay(exchange, kept)
            return
        most = gateway.settings.idempotency.max_answer_mb * 2**20
        exchange.recording = Recording(store, caller, name, digest, most)
        await handler(exchange, gateway)
    finally:
        del gateway.answering[caller, name]


async def _find(store: AnswerStore, caller: str, name: str) -> KeptAnswer | None:
    try:
        return await store.find(caller, name)
    except StoreError as error:
        log.error("a request's %s cannot be looked up: %s", HEADER, error)
        return None


async def _replay(exchange: Exchange, kept: KeptAnswer) -> None:
    exchange.model = kept.model
    exchange.added.append(REPLAYED)
    headers: Headers = [(b"content-type", kept.content_type.encode("latin-1"))]
    if kept.version:
        exchange.added.append((MODEL_VERSION, kept.version.encode("latin-1")))
    await exchange.answer(200, kept.body, headers)


def _check_same(known: bytes, digest: bytes) -> None:
    if known != digest:
        raise IdempotencyKeyError(
            f"this {HEADER} was used for another request: send the same path and body again, byte for byte, or take "
            "a new key",
            param=HEADER,
        )
