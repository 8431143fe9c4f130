"""Signed versions: an Ed25519 signature over what a version is called and what is in it, and who may make one.

What is signed is a text of three lines: ``toque version 1``, the reference (``support-bot/7``) and the version's
digest, which covers the names and contents of all its files. A signature says nothing of any other version, not even
of one with the same files. Verifying is done with the digest of the files that this machine has.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from toque.errors import ConfigError, SignatureError, StoreError
from toque.registry.names import VersionRef, parse_reference
from toque.registry.settings import PUBLIC_KEY, RegistrySettings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from toque.registry.store import Store

log = logging.getLogger("toque.registry")

_PREFIX = "ed25519:"
_MAX_FILE = 16_384


class Signature(Struct, frozen=True):
    """``key`` is the public key that verifies it (``ed25519:`` and 32 bytes in base64); ``value`` its 64 bytes in
    base64. ``signed_by`` is for people, ``at`` microseconds since the epoch: neither is covered by the signature."""

    key: str
    value: str
    signed_by: str = ""
    at: int = 0


def key_id(public: str) -> str:
    """16 hex digits that people compare."""
    return hashlib.sha256(public.encode()).hexdigest()[:16]


def make_key(file: Path) -> str:
    """Writes a new private key (PKCS #8, PEM, readable by its owner only) and returns its public key. ConfigError for
    a file that is there already, or cannot be written."""
    crypto = _crypto()
    private = crypto.Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    data = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
    except OSError as error:
        raise ConfigError(f"cannot write the key {file}: {error.strerror}", param="key") from None
    return _spelled(private.public_key())


def sign(file: Path, reference: str, digest: str) -> Signature:
    """With the private key in ``file``. ConfigError for one that is no such key."""
    private = _read_key(file)
    value = base64.b64encode(private.sign(_statement(reference, digest))).decode()
    return Signature(_spelled(private.public_key()), value)


def verifies(signature: Signature, reference: str, digest: str) -> bool:
    """Whether it was made by the holder of ``signature.key`` for this version; who that is, is another question."""
    crypto = _crypto()
    from cryptography.exceptions import InvalidSignature

    try:
        raw = base64.b64decode(signature.key.removeprefix(_PREFIX), validate=True)
        value = base64.b64decode(signature.value, validate=True)
        crypto.Ed25519PublicKey.from_public_bytes(raw).verify(value, _statement(reference, digest))
    except (InvalidSignature, ValueError):
        return False
    return True


def trusted_signature(
    signatures: Iterable[Signature], trusted: Iterable[str], reference: str, digest: str
) -> Signature | None:
    """The first that a trusted key made for this version."""
    keys = set(trusted)
    return next((s for s in signatures if s.key in keys and verifies(s, reference, digest)), None)


def check_signed(store: Store, reference: str) -> None:
    """SignatureError unless ``reference`` is a registered version that a trusted key has signed, where the settings
    ask for that. Its files are on this machine. While the database is away, what it said last counts."""
    settings = store.registry
    if not settings.require_signature:
        return
    parsed = parse_reference(reference)
    record = store.find(reference) if isinstance(parsed, VersionRef) else None
    if record is None or not isinstance(parsed, VersionRef):
        raise unregistered(reference)
    signatures = _signatures(store, parsed)
    if trusted_signature(signatures, settings.trusted_keys, reference, record.digest) is None:
        made = ", ".join(key_id(s.key) for s in signatures)
        why = (
            f"its signatures ({made}) are by no key that is trusted here" if made else "nobody has signed it"
        )
        raise SignatureError(f"{reference} is not served: {why}, and registry.require_signature is set")


def check_path(settings: RegistrySettings, path: Path) -> None:
    """SignatureError for a plain path where only signed versions are served."""
    if settings.require_signature:
        raise unregistered(str(path))


def unregistered(reference: str) -> SignatureError:
    return SignatureError(
        f"{reference} is not served: registry.require_signature is set, and it is no registered version that could be "
        "signed; register it, then `toque sign`"
    )


def _statement(reference: str, digest: str) -> bytes:
    return f"toque version 1\n{reference}\n{digest}\n".encode()


def _signatures(store: Store, version: VersionRef) -> list[Signature]:
    """As the database has them, or as it last had them."""
    from toque.registry.registry import Registry

    memory = store.home / "signatures" / f"{hashlib.sha256(str(version).encode()).hexdigest()[:32]}.json"
    try:
        with Registry(store) as registry:
            found = registry.database.signatures(version.model, version.version)
    except StoreError as error:
        try:
            known = [Signature(**each) for each in json.loads(memory.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):
            raise error from None
        log.warning("signatures of %s are as they last were: %s", version, error.message)
        return known
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        fresh = memory.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        fresh.write_text(json.dumps([{"key": s.key, "value": s.value} for s in found]), encoding="utf-8")
        fresh.replace(memory)
    except OSError as error:  # the answer is right all the same
        log.warning("the signatures of %s cannot be remembered: %s", version, error)
    return found


def _read_key(file: Path) -> Ed25519PrivateKey:
    crypto = _crypto()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with file.open("rb") as source:
            key = load_pem_private_key(source.read(_MAX_FILE), None)
    except OSError as error:
        raise ConfigError(f"cannot read the key {file}: {error.strerror}", param="key") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{file} is no private key in PEM without a password", param="key") from None
    if not isinstance(key, crypto.Ed25519PrivateKey):
        raise ConfigError(f"{file} is no Ed25519 key, but {type(key).__name__}", param="key")
    return key


def _spelled(public: Ed25519PublicKey) -> str:
    spelled = _PREFIX + base64.b64encode(public.public_bytes_raw()).decode()
    assert PUBLIC_KEY.fullmatch(spelled)
    return spelled


class _Crypto:
    """The two classes of `cryptography` that are used, where it is installed."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ed25519

        self.Ed25519PrivateKey = ed25519.Ed25519PrivateKey
        self.Ed25519PublicKey = ed25519.Ed25519PublicKey


def _crypto() -> _Crypto:
    try:
        return _Crypto()
    except ImportError:
        raise ConfigError(
            "signatures need the package cryptography: pip install 'toque[sign]'", param="registry"
        ) from None
