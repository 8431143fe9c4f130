"""A served model as the gateway holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from toque.errors import ModelNotFoundError, RequestError, UnavailableError
from toque.gateway.admission import Admission
from toque.gateway.polling import wait_until
from toque.routing.base import EngineClient, ReplicaState
from toque.types import ModelCard

if TYPE_CHECKING:
    from toque.config import LimitSettings
    from toque.text.template import ChatTemplate
    from toque.text.tokenizer import Tokenizer


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
    ) -> None:
        self.name = name
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.card = card
        self.limits = limits
        self.admission = Admission(limits.max_queued_requests, limits.max_queued_tokens)

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
