"""The layers of the design, as a test: who may import whom, and which packages stay fenced."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "toque"

# layer → layers of Toque it may import; `types` and `errors` are open to everybody.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "config": {"engine.options", "fleet.parse", "fleet.spec", "monitor.settings", "registry.settings"},
    "formats": set(),
    "text": {"formats"},
    "graph": set(),
    "models": {"graph"},
    "backends": {"graph", "formats", "_native"},
    "engine": {"models", "graph", "backends", "formats", "text", "registry"},
    "proto": set(),
    "replica": {"engine", "proto", "formats", "file_state"},
    "routing": {"proto"},
    "fleet": {"proto", "routing", "registry", "monitor", "sql", "engine.options", "engine.memory", "file_state"},
    "sql": set(),
    "asking": set(),
    "file_state": set(),
    "monitor": {"asking", "sql"},
    "registry": {"asking", "formats", "sql"},
    "gateway": {"routing", "text", "formats", "monitor", "fleet", "config", "registry", "file_state"},
    "bench": set(),
    "cli": {
        "gateway", "engine", "registry", "bench", "config", "formats", "text", "backends", "fleet", "monitor",
        "_native",
    },
}  # fmt: skip
FENCED = {
    "torch": {"backends/cuda"},
    "triton": {"backends/cuda"},
    "ray": {"fleet/placement/ray.py"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "llguidance": {"text/grammar/compiler.py"},
    "grpc": {"replica", "routing", "proto"},
    "prometheus_client": {"monitor"},
    "starlette": {"gateway"},
    "uvicorn": {"gateway"},
    "huggingface_hub": {"registry/sources/hf.py"},
    "click": {"cli"},
    "rich": {"cli"},
    "httptools": {"bench/client.py"},
    "httpx": {"registry"},
    "psutil": {"fleet/placement"},
    "uvloop": {"gateway/serve.py", "bench/benchmark.py"},
    "yaml": {"config.py", "registry/catalog.py", "registry/card.py"},
    "google": {"proto"},
    "obstore": {"registry/object_store.py"},
    "mlflow": {"registry/sources/mlflow.py"},
    "cryptography": {"registry/signing.py"},
    "safetensors": set(),  # tests write files with it; reading is our own
    "transformers": set(),
    "sqlalchemy": {
        "sql.py",
        "monitor/ledger",
        "registry/database.py",
        "registry/tables.py",
        "registry/migrations",
        "fleet/tables.py",
        "fleet/sql_store.py",
    },
    "opentelemetry": {"monitor/span_sender.py"},
    "pynvml": {"monitor/devices.py"},
    "alembic": {"sql.py", "monitor/ledger/migrations", "registry/migrations"},
}


def modules() -> list[Path]:
    return sorted(p for p in SRC.rglob("*.py") if "_pb2" not in p.name)


def imports(path: Path) -> set[str]:
    """Absolute dotted names imported anywhere in a file, type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def layer(dotted: str) -> str:
    return dotted.split(".")[1] if "." in dotted else ""


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(SRC)
    own = relative.parts[0].removesuffix(".py")
    if own not in MAY_IMPORT:
        assert own in {"__init__", "__main__"}, (
            f"{relative}: a new layer; say in this test what it may import"
        )
        return
    allowed = MAY_IMPORT[own] | {"types", "errors", own, "__version__"}
    for name in imports(path):
        if not name.startswith("toque."):
            continue
        rest = name.removeprefix("toque.")
        assert any(rest == a or rest.startswith(f"{a}.") for a in allowed), f"{relative} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_vendors_stay_behind_their_fence(path: Path) -> None:
    relative = path.relative_to(SRC).as_posix()
    for name in {n.split(".")[0] for n in imports(path)}:
        if name in FENCED:
            assert any(relative.startswith(place) for place in FENCED[name]), f"{relative} imports {name}"


def test_no_file_outgrows_its_noun() -> None:
    long = {str(p.relative_to(SRC)): n for p in modules() if (n := len(p.read_text().splitlines())) > 500}
    assert not long


def test_serving_on_a_cpu_never_imports_torch() -> None:
    code = (
        "import sys, toque, toque.engine.llm, toque.replica.__main__, toque.gateway.app, toque.gateway.serve;"
        "found = sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'triton', 'transformers'));"
        "sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_surface() -> None:
    import toque

    assert sorted(toque.__all__) == [
        "LLM",
        "SamplingParams",
        "StructuredOutputs",
        "ToqueError",
        "__version__",
    ]
    assert all(getattr(toque, name) is not None for name in toque.__all__)
