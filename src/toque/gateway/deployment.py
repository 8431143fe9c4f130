"""A served model as the gateway holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from toque.errors import ModelNotFoundError, RequestError, UnavailableError
from toque.gateway.admission import Admission
from toque.gateway.answer import ShowingTags
from toque.gateway.polling import wait_until
from toque.routing.base import EngineClient, ReplicaState
from toque.text.reasoning import OPEN as THINK_OPEN
from toque.text.tools.choose import TAG_TOKENS, check_dialect, dialect_of
from toque.text.tools.prompt import template_knows_tools
from toque.types import ModelCard

if TYPE_CHECKING:
    from toque.config import LimitSettings
    from toque.text.template import ChatTemplate
    from toque.text.tokenizer import TokenCodec, Tokenizer


class Deployment:
    """A name that clients ask for, the engines behind it, and what turns text into tokens for them."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        card: ModelCard,
        limits: LimitSettings,
        tool_parser: str = "",
    ) -> None:
        """``tool_parser``: the dialect of the model's tool calls; "" reads it off the chat template."""
        self.name = name
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.card = card
        self.limits = limits
        self.dialect = check_dialect(tool_parser) if tool_parser else dialect_of(self._source(tools=True))
        self.knows_tools = template_knows_tools(self._source(tools=True))
        self.thinks = THINK_OPEN in self._source(tools=False)
        ids = (tokenizer.token_id(tag) for tag in TAG_TOKENS)
        self._tags = frozenset(token for token in ids if token is not None and tokenizer.is_special(token))
        self.admission = Admission(limits.max_queued_requests, limits.max_queued_tokens)

    @property
    def codec(self) -> TokenCodec:
        """The tokenizer for text that is read for tool calls and reasoning: their tags are shown."""
        return ShowingTags(self.tokenizer, self._tags) if self._tags else self.tokenizer

    def _source(self, *, tools: bool) -> str:
        return "" if self.template is None else self.template.source(tools=tools)

    @property
    def version(self) -> str:
        return self.card.digest or self.card.name

    @property
    def serving(self) -> bool:
        return self.client.state in (ReplicaState.READY, ReplicaState.DEGRADED)

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

    async def until_serving(self) -> None:
        """Wait for a model that is loading, within the limit; UnavailableError when it does not come, or cannot."""
        if self.serving:
            return
        await wait_until(lambda: self.client.state is not ReplicaState.STARTING, self.limits.load_wait_s)
        if not self.serving:
            why = self.client.reason or f"it is {self.client.state}"
            raise UnavailableError(f"model {self.name} cannot answer now: {why}", retry_after_s=2.0)


def find_deployment(deployments: Mapping[str, Deployment], model: str) -> Deployment:
    """The deployment of exactly this name. Nothing is loaded, and no other model answers, for an unknown one."""
    try:
        return deployments[model]
    except KeyError:
        shown = model if len(model) <= 64 else model[:61] + "..."
        raise ModelNotFoundError(
            f"the model {shown!r} does not exist here; GET /v1/models lists those that do", param="model"
        ) from None
