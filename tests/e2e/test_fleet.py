"""The fleet of `toque serve`, under constant traffic from the official client: no failed request, no altered text."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

from fixtures.parrot import CHAT_TEMPLATE, make_parrot, script

from .server import Server, serve, serving
from .traffic import Traffic

ONE = "first answer, spoken slowly enough to be cut"
TWO = "second answer, by another version of the model"
pytestmark = pytest.mark.slow


def speaking(folder: Path, text: str) -> Path:
    """A model that answers every chat with the text, a word or a space at a time."""
    words = text.split(" ")
    pieces = [word if number == 0 else f" {word}" for number, word in enumerate(words)]
    return make_parrot(folder, script("\n", pieces), chat_template=CHAT_TEMPLATE, context_length=4096)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("v1") / "one", ONE)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking(tmp_path_factory.mktemp("v2") / "two", TWO)


@pytest.fixture
def server(first: Path) -> Iterator[Server]:
    with serving(first, name="chat") as running:
        yield running


def admin(server: Server, path: str, body: Any = None) -> Any:
    answer = httpx.request(
        "GET" if body is None else "POST", f"{server.url}/admin/v1/{path}", json=body, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def scale(server: Server, low: int, high: int, **scaling: Any) -> None:
    spec = admin(server, "deployments/chat")["spec"]
    spec["scaling"] |= {"min_replicas": low, "max_replicas": high, **scaling}
    admin(server, "deployments", spec)


def replicas(server: Server, count: int, seconds: float = 60.0) -> list[Any]:
    """The replicas, once there are so many and all are ready."""

    def there() -> bool:
        found = admin(server, "replicas")["data"]
        return len(found) == count and all(replica["state"] == "ready" for replica in found)

    server.until(there, seconds)
    data: list[Any] = admin(server, "replicas")["data"]
    return data


def roll_out(server: Server, model: Path, **policy: Any) -> Any:
    """The rollout at its end."""
    admin(server, "rollouts/chat", {"model": str(model), "policy": policy or None})
    server.until(lambda: admin(server, "rollouts/chat")["phase"] in ("done", "returned"), 90)
    return admin(server, "rollouts/chat")


def test_twenty_rollouts_in_a_row_and_every_answer_is_of_one_version(
    server: Server, first: Path, second: Path
) -> None:
    with Traffic(server, {ONE, TWO}) as traffic:
        traffic.more()
        for number in range(20):
            ended = roll_out(server, second if number % 2 == 0 else first)
            assert ended["phase"] == "done", ended
        traffic.more()
        assert traffic.answers[ONE] > 10
        assert traffic.answers[TWO] > 10
    assert len(server.replicas()) == 1


def test_a_swap_in_place_holds_arrivals_and_loses_none(server: Server, first: Path, second: Path) -> None:
    with Traffic(server, {ONE, TWO}) as traffic:
        for model in (second, first, second):
            traffic.more()
            assert roll_out(server, model, strategy="swap")["phase"] == "done"
        traffic.more()
        assert traffic.answers[TWO] > 0


def test_a_version_that_does_not_load_rolls_back(server: Server, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    with Traffic(server, {ONE}) as traffic:
        traffic.more()
        answer = httpx.post(f"{server.url}/admin/v1/rollouts/chat", json={"model": str(broken)}, timeout=60)
        if answer.status_code == 200:  # it looked like a model until it was loaded
            server.until(lambda: admin(server, "rollouts/chat")["phase"] == "returned", 60)
        traffic.more()


def test_a_version_that_is_slower_than_a_canary_may_be_rolls_back(first: Path, smollm2: Path) -> None:
    """A model a thousand times as large takes longer for each token, whatever its answers are worth."""
    policy = {"strategy": "canary", "steps": [0.5], "step_s": 1, "min_requests": 5, "max_latency_ratio": 1.2}
    done: list[bool] = []

    def ask() -> int:
        failed = 0
        while not done:
            answer = running.post(
                "/v1/completions", prompt="hi\n", max_tokens=8, temperature=0, ignore_eos=True
            )
            failed += answer.status_code != 200
        return failed

    with serving(first, name="chat", backend="cpu") as running, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            ended = roll_out(running, smollm2, **policy)
        finally:
            done.append(True)
        assert ended["phase"] == "returned"
        assert "the new version" in ended["reason"]
        assert [each.result() for each in asking] == [0, 0, 0, 0]


def test_one_to_three_to_one_to_none_to_one(server: Server) -> None:
    with Traffic(server, {ONE}) as traffic:
        traffic.more()
        scale(server, 3, 3)
        replicas(server, 3)
        traffic.more()
        scale(server, 1, 1, downscale_delay_s=0)
        replicas(server, 1)
        traffic.more()
        traffic.pause()
        scale(server, 0, 1, downscale_to_zero_delay_s=0.3)
        server.until(lambda: admin(server, "deployments/chat")["status"] == "asleep")
        server.until(lambda: not server.replicas())
        before = set(psutil.pids())

        def ask(_: int) -> str | None:
            answer = server.client().chat.completions.create(
                model="chat", messages=[{"role": "user", "content": "hi"}], temperature=0
            )
            return answer.choices[0].message.content

        scale(server, 0, 3, downscale_to_zero_delay_s=300)
        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(ask, range(20))) == [ONE] * 20
        started = [process for process in server.replicas() if process.pid not in before]
        assert len(started) == 1
        traffic.resume()
        traffic.more()


@pytest.mark.parametrize("count", [1, 2])
def test_kill_after_kill_and_no_answer_is_cut_or_altered(server: Server, count: int) -> None:
    scale(server, count, count)
    with Traffic(server, {ONE}, workers=4) as traffic:
        for number in range(3):
            ready = replicas(server, count)
            traffic.more()
            psutil.Process(int(ready[number % count]["handle"])).send_signal(signal.SIGKILL)
        traffic.more()
    replicas(server, count)


def test_a_stopped_replica_is_replaced_and_no_answer_is_cut(server: Server) -> None:
    scale(server, 2, 2)
    with Traffic(server, {ONE}) as traffic:
        stopped = int(replicas(server, 2)[0]["handle"])
        traffic.more()
        psutil.Process(stopped).send_signal(signal.SIGSTOP)
        traffic.more(30)
        server.until(lambda: not psutil.pid_exists(stopped))
        replicas(server, 2)
        traffic.more()


def test_a_rolling_restart_with_another_option_under_traffic(server: Server) -> None:
    scale(server, 2, 2)
    with Traffic(server, {ONE}) as traffic:
        before = {replica["handle"] for replica in replicas(server, 2)}
        admin(server, "deployments/chat/restart", {"engine": {"max_sequences": 3}})
        server.until(lambda: admin(server, "rollouts/chat")["phase"] == "done", 60)
        traffic.more()
        assert not before & {replica["handle"] for replica in replicas(server, 2)}
    assert admin(server, "deployments/chat")["spec"]["engine"]["max_sequences"] == 3


def test_sigterm_with_a_hundred_open_streams_finishes_them_and_is_not_ready_at_once(
    parrot_folder: Path,
) -> None:
    with (
        serving(parrot_folder, "--grace", "120", "--max-sequences", "128", name="chat") as running,
        ThreadPoolExecutor(100) as pool,
    ):
        opened: set[int] = set()
        told = Event()

        def ask(number: int) -> str:
            with running.client() as client:
                text = ""
                for chunk in client.completions.create(
                    model="chat", prompt="go!", max_tokens=300, temperature=0, stream=True
                ):
                    opened.add(number)
                    text += chunk.choices[0].text if chunk.choices else ""
                    if len(text) < 200 and len(opened) == 100:
                        told.wait(60)  # it is still in the middle when the server is told
                return text

        asking = [pool.submit(ask, number) for number in range(100)]
        running.until(lambda: len(opened) == 100, 60)
        running.process.send_signal(signal.SIGTERM)
        running.until(lambda: not _ready(running))
        told.set()
        assert [each.result() for each in asking] == ["xy" * 150] * 100
        assert running.process.wait(60) == 0


def test_loading_and_unloading_leaves_nothing_behind(server: Server) -> None:
    """Five cycles to warm up, then ten in which neither file descriptors, threads nor memory grow."""
    gateway = psutil.Process(server.process.pid)
    scale(server, 0, 1, downscale_to_zero_delay_s=0)

    def cycle() -> None:
        answer = server.post("/v1/completions", prompt="hi\n", max_tokens=4, temperature=0)
        assert answer.status_code == 200, answer.text
        server.until(lambda: not server.replicas())

    for _ in range(5):
        cycle()
    descriptors, threads, memory = gateway.num_fds(), gateway.num_threads(), gateway.memory_full_info().uss
    for _ in range(10):
        cycle()
    assert gateway.num_fds() <= descriptors + 2
    assert gateway.num_threads() <= threads + 1
    assert gateway.memory_full_info().uss - memory < 20 * 2**20


def test_twenty_models_on_a_machine_that_holds_three(tmp_path: Path) -> None:
    models = [speaking(tmp_path / f"model{number}", f"I am number {number}") for number in range(20)]
    file = tmp_path / "toque.yaml"
    file.write_text(
        "fleet: {memory_mb: 320}\nserver: {port: 0}\nlimits: {load_wait_s: 60}\ndeployments:\n"
        + "".join(
            f"  - name: m{number}\n    model: {path}\n    engine: {{backend: reference}}\n"
            "    resources: {memory_mb: 100}\n    scaling: {min_replicas: 0}\n"
            for number, path in enumerate(models)
        )
    )
    with configured(file, tmp_path / "home") as server:
        for number in (*range(20), 0, 19, 7):
            with server.client() as client:
                answer = client.chat.completions.create(
                    model=f"m{number}", messages=[{"role": "user", "content": "hi"}], temperature=0
                )
            assert answer.choices[0].message.content == f"I am number {number}"
            assert len(admin(server, "replicas")["data"]) <= 4  # three, and one that is ending
        awake = [view for view in admin(server, "deployments")["data"] if view["replicas"]]
        assert 1 <= len(awake) <= 3


def _ready(server: Server) -> bool:
    try:
        return server.get("/ready").status_code == 200
    except httpx.TransportError:  # it takes no new connections
        return False


@contextmanager
def configured(file: Path, home: Path) -> Iterator[Server]:
    """`toque serve --config`: its fleet outlives it, so it is told to stop first."""
    with serve("--config", str(file), home=home) as server:
        try:
            yield server
        finally:
            for view in admin(server, "deployments")["data"]:
                admin(server, f"deployments/{view['name']}/stop", {})
            server.until(lambda: not admin(server, "replicas")["data"], 60)


def test_the_example_rolls_a_version_out_and_back_under_load(server: Server, second: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "rollout_under_load.py"
    done = subprocess.run(
        [sys.executable, str(script), "chat", str(second), "--url", server.url, "--strategy", "surge"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"to two-\w{8}: done", done.stdout), done.stdout
    assert re.search(r"back to one-\w{8}: done", done.stdout), done.stdout
    assert ", 0 failed" in done.stdout.splitlines()[-1]
