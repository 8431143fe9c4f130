"""Which tokens end an answer, beyond the one that a model file names.

Chat models end their turn with a token of the chat template, while the file often names only the end of a document
(or the other way round). A model that goes on past either talks to itself.
"""

from __future__ import annotations

from collections.abc import Mapping

# Ends of a turn count only when the chat template writes them: without it they may be ordinary text to the model.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|eot|>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<|END_OF_TURN_TOKEN|>",
)
# Ends of a document end an answer whatever the template says.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>")


def turn_end_ids(marked: Mapping[str, int], template: str) -> set[int]:
    """Ids of the end tokens among ``marked`` (special and user-defined tokens by text)."""
    ends = {marked[text] for text in _TURN_ENDS if text in marked and text in template}
    return ends | {marked[text] for text in _DOCUMENT_ENDS if text in marked}
