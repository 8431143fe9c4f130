"""One version of a model as the gateway knows it: what turns text into tokens and back, and the engines that run it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toque.errors import ModelError, RequestError
from toque.file_state import check_state
from toque.gateway.answer import ShowingTags
from toque.routing.base import EngineClient, ServedVersion
from toque.text.reasoning import OPEN as THINK_OPEN
from toque.text.tools.choose import TAG_TOKENS, check_dialect, dialect_of
from toque.text.tools.prompt import template_knows_tools
from toque.types import ModelCard

if TYPE_CHECKING:
    from toque.config import LimitSettings
    from toque.text.template import ChatTemplate
    from toque.text.tokenizer import TokenCodec, Tokenizer

log = logging.getLogger("toque.gateway")


@dataclass(frozen=True, slots=True)
class Profile:
    """What is told of a version without its tokenizer. ``version`` is what clients see of it."""

    name: str
    key: str
    version: str
    card: ModelCard

    def check_embeds(self, path: str) -> None:
        if not self.card.embedding_size:
            raise RequestError(
                f"model {self.name} generates text; {path} needs one that makes embeddings",
                param="model",
                code="model_not_supported",
            )

    def check_generates(self, path: str) -> None:
        if self.card.embedding_size:
            raise RequestError(
                f"model {self.name} makes embeddings and generates no text; use /v1/embeddings, not {path}",
                param="model",
                code="model_not_supported",
            )


class Face:
    """A request keeps the face that it was prepared with: tokenizer, template, tool dialect and engines belong
    together. ``key`` names the version among the deployment's; ``name`` is the deployment's."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        card: ModelCard,
        limits: LimitSettings,
        tool_parser: str = "",
        *,
        key: str = "",
        label: str = "",
    ) -> None:
        """``tool_parser``: the dialect of the model's tool calls; "" reads it off the chat template."""
        self.name = name
        self.key = key
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.card = card
        self.limits = limits
        self.version = card.digest or label or card.name
        self.dialect = check_dialect(tool_parser) if tool_parser else dialect_of(self._source(tools=True))
        self.knows_tools = template_knows_tools(self._source(tools=True))
        self.thinks = THINK_OPEN in self._source(tools=False)
        ids = (tokenizer.token_id(tag) for tag in TAG_TOKENS)
        self._tags = frozenset(token for token in ids if token is not None and tokenizer.is_special(token))

    @property
    def profile(self) -> Profile:
        return Profile(self.name, self.key, self.version, self.card)

    @property
    def codec(self) -> TokenCodec:
        """The tokenizer for text that is read for tool calls and reasoning: their tags are shown."""
        return ShowingTags(self.tokenizer, self._tags) if self._tags else self.tokenizer

    def check_embeds(self, path: str) -> None:
        """RequestError if it generates text."""
        self.profile.check_embeds(path)

    def check_generates(self, path: str) -> None:
        """RequestError if it makes embeddings."""
        self.profile.check_generates(path)

    def _source(self, *, tools: bool) -> str:
        return "" if self.template is None else self.template.source(tools=tools)


def load_face(
    name: str, version: ServedVersion, client: EngineClient, limits: LimitSettings, tool_parser: str = ""
) -> Face:
    """Reads the parts of the model's files that a gateway needs; for a thread. ModelError names the file."""
    from toque.formats import load_checkpoint
    from toque.text.template import load_template
    from toque.text.tokenizer import load_tokenizer

    try:
        check_state(version.path, version.state)
        checkpoint = load_checkpoint(version.path)
        tokenizer = load_tokenizer(checkpoint)
        template = load_template(checkpoint, tokenizer)
    except ModelError as error:
        raise ModelError(f"cannot serve {version.path}: {error.message}", param=error.param) from error
    if tokenizer.degraded:
        log.warning("model %s: %s", name, tokenizer.degraded)
    config = checkpoint.config
    asked = version.engine.get("context_length")
    card = ModelCard(
        name=name,
        architecture=config.architecture,
        parameters=checkpoint.parameters,
        quantization=str(version.engine.get("quantize") or checkpoint.quantization),
        context_length=min(asked, config.context_length)
        if isinstance(asked, int) and asked
        else config.context_length,
        vocab_size=config.vocab_size,
        digest=version.digest,
        created=int(version.path.stat().st_mtime),
        embedding_size=config.hidden_size if config.pooling else 0,
    )
    return Face(
        name,
        client,
        tokenizer,
        template,
        card,
        limits,
        tool_parser,
        key=version.key,
        label=version.label,
    )
