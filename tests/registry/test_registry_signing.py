"""Signatures of versions: whom they are by, what they cover, and that nothing else is served where they are wanted."""

from __future__ import annotations

import base64
import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from formats.gguf_builder import tiny_llama
from toque.cli import sign as sign_verb
from toque.cli import verify as verify_verb
from toque.config import load_settings
from toque.errors import ConfigError, ModelNotFoundError, SignatureError, StoreError
from toque.fleet.resolve import resolver
from toque.gateway.serve import resolve as resolve_served
from toque.registry.database import RegistryDatabase
from toque.registry.registry import Registry
from toque.registry.settings import RegistrySettings, from_environment
from toque.registry.signing import Signature, key_id, make_key, sign, trusted_signature, verifies
from toque.registry.store import Store


@dataclass
class Signed:
    """A registry of bot/1 and bot/2, which are two versions, and toy/1, which has the files of bot/1; and two keys."""

    home: Path
    ann: Path
    ann_public: str
    eve: Path
    eve_public: str

    def settings(self, *trusted: str) -> RegistrySettings:
        return RegistrySettings(require_signature=True, trusted_keys=trusted or (self.ann_public,))

    def sign(self, reference: str, key: Path) -> Signature:
        with Registry(Store(self.home)) as registry:
            version = registry.find(reference)
            signature = sign(key, version.reference, version.digest)
            registry.database.add_signature(version.model, version.version, signature, "ann@here")
        return signature

    async def served(self, reference: str, *trusted: str) -> str:
        revision = await resolver(self.settings(*trusted))(reference)
        return revision.label


@pytest.fixture
def signed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signed:
    monkeypatch.setenv("TOQUE_HOME", str(home))
    for name in ("URL", "BLOBS", "REQUIRE_SIGNATURE", "TRUSTED_KEYS"):
        monkeypatch.delenv(f"TOQUE_REGISTRY_{name}", raising=False)
    with Registry(Store(home)) as registry:
        for number, model in ((1, "bot"), (2, "bot"), (1, "toy")):
            path = tiny_llama(n_layers=1, seed=number).write(tmp_path / f"m{number}.gguf")
            registry.register(str(path), model)
    keys = [tmp_path / f"{who}.pem" for who in ("ann", "eve")]
    ann, eve = map(make_key, keys)
    return Signed(home, keys[0], ann, keys[1], eve)


def test_a_signature_is_of_one_version_and_by_one_key(signed: Signed) -> None:
    made = sign(signed.ann, "bot/1", "d1")
    assert made.key == signed.ann_public
    assert verifies(made, "bot/1", "d1")
    assert not verifies(made, "bot/1", "d2")
    assert not verifies(made, "bot/2", "d1")
    assert not verifies(replace(made, key=signed.eve_public), "bot/1", "d1")
    raw = bytearray(base64.b64decode(made.value))
    for place in (0, 31, 32, 63):
        raw[place] ^= 1
        assert not verifies(replace(made, value=base64.b64encode(raw).decode()), "bot/1", "d1")
        raw[place] ^= 1
    for value in ("", "AAAA", "?", made.value + "AA"):
        assert not verifies(replace(made, value=value), "bot/1", "d1")
    assert trusted_signature([made], [signed.eve_public], "bot/1", "d1") is None
    assert trusted_signature([made], [signed.eve_public, signed.ann_public], "bot/1", "d1") == made


async def test_a_file_that_is_called_as_a_version_is_not_served_in_its_place(
    signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry(Store(signed.home)) as registry:
        registry.database.move_alias("bot", "live", 2)
    signed.sign("bot/2", signed.ann)
    (tmp_path / "cwd" / "bot").mkdir(parents=True)
    (tmp_path / "cwd" / "bot" / "2").write_bytes(b"another model")
    monkeypatch.chdir(tmp_path / "cwd")
    revision = await resolver(signed.settings())("bot@live")
    assert Path(revision.path).is_relative_to(signed.home)


def test_an_alias_that_moves_meanwhile_does_not_lend_its_new_version_s_signature(
    signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry(Store(signed.home)) as registry:
        registry.database.move_alias("bot", "live", 1)
    signed.sign("bot/2", signed.ann)
    pull = Store.pull

    def slow(store: Store, *arguments: Any, **more: Any) -> Path:
        path = pull(store, *arguments, **more)
        with Registry(Store(signed.home)) as registry:
            registry.database.move_alias("bot", "live", 2)
        return path

    monkeypatch.setattr(Store, "pull", slow)
    with pytest.raises(SignatureError, match="bot/1 is not served"):
        resolve_served("bot@live", registry=signed.settings())
    assert resolve_served("bot@live", registry=signed.settings()).label == "bot/2"


async def test_only_what_a_trusted_key_has_signed_is_served(signed: Signed) -> None:
    with pytest.raises(SignatureError, match=r"bot/1 is not served: nobody has signed it"):
        await signed.served("bot/1")
    signed.sign("bot/1", signed.eve)
    with pytest.raises(
        SignatureError, match=rf"\({key_id(signed.eve_public)}\) are by no key that is trusted"
    ):
        await signed.served("bot/1")
    signed.sign("bot/1", signed.ann)
    assert await signed.served("bot/1") == "bot/1"
    with pytest.raises(SignatureError):
        await signed.served("bot/2")
    with pytest.raises(SignatureError):
        await signed.served("toy/1")  # the same files, but nobody said that of this model
    with pytest.raises(SignatureError):
        await signed.served("bot")  # its newest version is not the signed one
    with Registry(Store(signed.home)) as registry:
        registry.database.move_alias("bot", "live", 1)
    assert await signed.served("bot@live") == "bot/1"
    assert resolve_served("chat=bot@live", registry=signed.settings()).label == "bot/1"
    with pytest.raises(SignatureError):
        resolve_served("bot/2", registry=signed.settings())
    assert resolve_served("bot/2", registry=RegistrySettings()).label == "bot/2"


async def test_what_could_not_be_signed_is_not_served_either(signed: Signed, tmp_path: Path) -> None:
    path = str(tmp_path / "m1.gguf")
    with pytest.raises(SignatureError, match="no registered version"):
        await signed.served(path)
    with pytest.raises(SignatureError, match="no registered version"):
        resolve_served(f"file:{path}", registry=signed.settings())
    with pytest.raises(ModelNotFoundError):
        await signed.served("bot/7")


async def test_a_signature_that_is_moved_to_another_version_is_worth_nothing(signed: Signed) -> None:
    """As somebody could who may write to the database."""
    made = signed.sign("bot/1", signed.ann)
    with Registry(Store(signed.home)) as registry:
        registry.database.add_signature("bot", 2, made, "eve@there")
    with pytest.raises(SignatureError):
        await signed.served("bot/2")


async def test_files_that_are_exchanged_below_a_signed_version_are_not_served(signed: Signed) -> None:
    """The digest that counts is that of the files on this machine, whatever the database says."""
    from sqlalchemy import select, update

    from toque.registry.tables import model_version as table

    signed.sign("bot/1", signed.ann)
    with Registry(Store(signed.home)) as registry, registry.database.write() as connection:
        files = connection.execute(select(table.c.files).where(table.c.version == 2)).scalar_one()
        here = (table.c.model == "bot") & (table.c.version == 1)
        connection.execute(update(table).where(here).values(files=files))
    Store(signed.home).forget("bot/1")
    with pytest.raises(SignatureError):
        await signed.served("bot/1")


async def test_while_the_database_is_away_what_it_said_last_counts(
    signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed.sign("bot/1", signed.ann)
    assert await signed.served("bot/1") == "bot/1"

    def away(self: RegistryDatabase, *args: object) -> Any:
        raise StoreError("the registry is away")

    monkeypatch.setattr(RegistryDatabase, "signatures", away)
    assert await signed.served("bot/1") == "bot/1"
    with pytest.raises(SignatureError):  # trust is this machine's own affair
        await signed.served("bot/1", signed.eve_public)
    with pytest.raises(StoreError, match="away"):
        await signed.served("bot/2")


def test_a_key_file_is_its_owners_and_is_never_overwritten(signed: Signed, tmp_path: Path) -> None:
    assert stat.S_IMODE(signed.ann.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="File exists"):
        make_key(signed.ann)
    other = tmp_path / "other.pem"
    other.write_text("no key")
    for file, why in ((other, "no private key in PEM"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=why):
            sign(file, "bot/1", "d")
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    data = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    other.write_bytes(data)
    with pytest.raises(ConfigError, match="is no Ed25519 key"):
        sign(other, "bot/1", "d")


def test_without_the_package_the_error_says_what_to_install(
    signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(ConfigError, match=r"toque\[sign\]"):
        sign(signed.ann, "bot/1", "d")


def test_settings_name_keys_or_ask_for_nothing(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"registry\.require_signature needs trusted_keys"):
        load_settings({}, environ={"TOQUE_REGISTRY_REQUIRE_SIGNATURE": "true"})
    with pytest.raises(ConfigError, match=r"registry\.trusted_keys takes public keys"):
        load_settings({}, environ={"TOQUE_REGISTRY_TRUSTED_KEYS": "ssh-ed25519 AAAA"})
    given = {
        "TOQUE_REGISTRY_REQUIRE_SIGNATURE": "true",
        "TOQUE_REGISTRY_TRUSTED_KEYS": f"{signed.ann_public},{signed.eve_public}",
    }
    expected = signed.settings(signed.ann_public, signed.eve_public)
    assert load_settings({}, environ=given).registry == expected
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert from_environment() == expected


def call(command: click.Command, *args: str, code: int = 0) -> str:
    result = CliRunner().invoke(command, list(args))
    assert result.exit_code == code, result.output
    return result.output


def test_the_verbs_make_keys_sign_and_verify(signed: Signed, tmp_path: Path) -> None:
    key = tmp_path / "release.pem"
    public = call(sign_verb.command, "--new-key", str(key)).strip()
    assert "not signed by a trusted key" in call(verify_verb.command, "bot/1", code=1)
    assert call(sign_verb.command, "bot/1", "--key", str(key)).endswith(f"with key {key_id(public)}\n")
    assert "valid, not trusted, by" in call(verify_verb.command, "bot/1", code=1)
    assert "signed by a trusted key" in call(verify_verb.command, "bot/1", "--trust", public)
    call(sign_verb.command, "bot/1", "--key", str(key))  # again: there is one signature of a key
    said = json.loads(call(verify_verb.command, "bot/1", "--trust", public, "--json"))
    assert said["signed"]
    assert [row["key"] for row in said["signatures"]] == [public]
    assert isinstance(
        CliRunner().invoke(verify_verb.command, ["bot/1", "--trust", "x"]).exception, ConfigError
    )
    call(sign_verb.command, code=2)
    call(sign_verb.command, "bot/1", "--new-key", str(tmp_path / "x"), code=2)
