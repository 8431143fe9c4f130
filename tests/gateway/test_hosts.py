"""DNS rebinding: a web page's own name that points to this machine opens nothing."""

from __future__ import annotations

import pytest

from .world import Plan, world

OURS = [
    "localhost",
    "LOCALHOST:8000",
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]",
    "[::1]:8000",
    "app.localhost:1",
    "localhost.",
]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "192.168.0.7",
    "",
    "[::2]",
    "[",
    "xlocalhost",
]


@pytest.mark.parametrize("host", OURS)
async def test_local_names_are_answered(host: str) -> None:
    async with world() as w:
        assert (await w.client.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
async def test_other_names_are_refused_everywhere(host: str) -> None:
    async with world() as w:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("GET", "/live"),
            ("GET", "/nope"),
        ):
            answer = await w.client.request(method, path, headers={"host": host}, json={})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "host_not_allowed"
        preflight = {"host": host, "origin": "http://x", "access-control-request-method": "POST"}
        assert (await w.client.options("/v1/completions", headers=preflight)).status_code == 403
        assert not w.engine.requests


@pytest.mark.parametrize(
    "flags",
    [
        {"auth.api_keys": ["k"]},
        {"server.host": "0.0.0.0", "server.insecure": True},
        {"server.allowed_hosts": ["Box.example", "other"]},
    ],
)
async def test_keys_other_addresses_and_named_hosts_lift_it(flags: dict[str, object]) -> None:
    async with world(Plan(flags=flags), {"authorization": "Bearer k"}) as w:
        assert (await w.client.get("/v1/models", headers={"host": "box.example:80"})).status_code == 200
