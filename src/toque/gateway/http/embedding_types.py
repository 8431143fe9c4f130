"""The bodies of /v1/embeddings and /v1/rerank as types, and those of their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from toque.gateway.http.fields import OPTIONAL, honoured, ignored, refused


class EmbeddingBody(Struct, kw_only=True):
    """A request to `/v1/embeddings`."""

    model: Annotated[str, honoured("A model that makes embeddings, from `/v1/models`.")]
    input: Annotated[
        str | list[str | int | list[int]],
        honoured("A text, token ids, or up to 2,048 of either; ids are used untouched."),
    ]
    encoding_format: Annotated[
        str | None, honoured("`float` (default) or `base64`: little-endian float32.")
    ] = None
    dimensions: Annotated[
        int | None, honoured("The first so many numbers, the vector's length made 1 again.")
    ] = None
    priority: Annotated[
        int | None, honoured("-1000 to 1000; lower goes first. Below 0 only with an administrator's key.")
    ] = None
    timeout: Annotated[float | None, honoured("Seconds; also the header `x-request-timeout`.")] = None
    truncate_prompt_tokens: Annotated[Raw, refused("shorten the text before it is sent")] = OPTIONAL
    user: Annotated[Raw, ignored("Tenants are told apart by their keys.")] = OPTIONAL


class Document(Struct):
    text: Annotated[str, honoured()]


class RerankBody(Struct, kw_only=True):
    """A request to `/v1/rerank`."""

    model: Annotated[str, honoured("A model that makes embeddings, from `/v1/models`.")]
    query: Annotated[str, honoured()]
    documents: Annotated[list[str | Document], honoured("1 to 1,024 texts, or objects with `text`.")]
    top_n: Annotated[int | None, honoured("Only the best so many.")] = None
    return_documents: Annotated[bool | None, honoured("Give the texts back. Default false.")] = None
    priority: Annotated[
        int | None, honoured("-1000 to 1000; lower goes first. Below 0 only with an administrator's key.")
    ] = None
    timeout: Annotated[float | None, honoured("Seconds; also the header `x-request-timeout`.")] = None
    rank_fields: Annotated[Raw, refused("documents are ranked by their text")] = OPTIONAL
    max_chunks_per_doc: Annotated[Raw, refused("documents are not cut into chunks")] = OPTIONAL
    max_tokens_per_doc: Annotated[Raw, refused("documents are not cut")] = OPTIONAL
    user: Annotated[Raw, ignored("Tenants are told apart by their keys.")] = OPTIONAL


class EmbeddingUsage(Struct):
    prompt_tokens: Annotated[int, Meta(ge=0)]
    total_tokens: Annotated[int, Meta(ge=0)]


class Embedding(Struct):
    object: Literal["embedding"]
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float] | str


class EmbeddingList(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RankedText(Struct):
    text: str


class Ranked(Struct):
    index: Annotated[int, Meta(ge=0, description="Into the documents of the request.")]
    relevance_score: Annotated[float, Meta(description="The cosine with the query: -1 to 1.")]
    document: RankedText | UnsetType = UNSET


class Ranking(Struct):
    """The best document first."""

    id: str
    model: str
    method: Annotated[
        Literal["embedding"], Meta(description="Each text was read alone; this is no cross-encoder.")
    ]
    results: list[Ranked]
    usage: EmbeddingUsage
