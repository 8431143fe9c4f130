"""``/tokenize`` and ``/detokenize``: what a model makes of a text, and back."""

from __future__ import annotations

import msgspec

from toque.errors import RequestError
from toque.gateway.deployment import Deployment, find_deployment
from toque.gateway.gateway import Gateway
from toque.gateway.http.body import decode
from toque.gateway.http.exchange import Exchange
from toque.gateway.http.generate import receive_json
from toque.gateway.http.openai_types import DetokenizeBody, TokenizeBody
from toque.gateway.http.translate import brief, chat_prompt
from toque.gateway.prepare import prompt_size, tokenize
from toque.gateway.requests import Prompt, TextPrompt


async def tokenize_text(exchange: Exchange, gateway: Gateway) -> None:
    """A text or a conversation as the ids that a generation request for it would start with."""
    body = decode(await receive_json(exchange, gateway), TokenizeBody)
    deployment = _deployment(gateway, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    prompt: Prompt
    if body.messages is not None:
        prompt = chat_prompt(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    else:
        assert body.prompt is not None
        prompt = TextPrompt(body.prompt, body.add_special_tokens)
    face = await deployment.known_face()
    ids = await gateway.pool.run(prompt_size(prompt), lambda: tokenize(prompt, face).ids)
    answer: dict[str, object] = {
        "count": len(ids),
        "max_model_len": face.card.context_length,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [face.tokenizer.token_text(token) for token in ids]
    await exchange.answer(200, msgspec.json.encode(answer))


async def detokenize_ids(exchange: Exchange, gateway: Gateway) -> None:
    body = decode(await receive_json(exchange, gateway), DetokenizeBody)
    face = await _deployment(gateway, body.model).known_face()
    vocabulary = face.card.vocab_size
    for position, token in enumerate(body.tokens):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"tokens[{position}] must be between 0 and {vocabulary - 1}, got {brief(token)}",
                param=f"tokens[{position}]",
            )
    tokens = body.tokens
    text = await gateway.pool.run(len(tokens), lambda: face.tokenizer.decode(tokens, skip_special=False))
    await exchange.answer(200, msgspec.json.encode({"prompt": text}))


def _deployment(gateway: Gateway, model: str | None) -> Deployment:
    """The model named, or the only one there is."""
    if model is None:
        if len(gateway.deployments) != 1:
            raise RequestError("model is required: this server has more than one", param="model")
        return next(iter(gateway.deployments.values()))
    return find_deployment(gateway.deployments, model)
