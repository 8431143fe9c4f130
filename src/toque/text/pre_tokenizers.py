"""How each model family cuts text into words before merging: what ``tokenizer.ggml.pre`` names.

A GGUF file carries only the name. The wrong cut gives valid but different ids, and a quietly worse model, so a name
that is not in this table is never guessed silently (see :func:`splitting_of`). The patterns are facts about the
published ``tokenizer.json`` of each family; tests compare them with tokenizers built independently.
"""

from __future__ import annotations

from dataclasses import dataclass

# Contractions as one case-insensitive group, letters with one leading non-letter, digits (count filled in per family),
# punctuation with trailing newlines, newlines, trailing spaces.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _CL100K.replace("DIGITS", "{1,3}")
QWEN2 = _CL100K.replace("DIGITS", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+SUFFIX|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*SUFFIX"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = _CASED.replace("SUFFIX", "").replace("DIGITS", "")
GPT4O = _CASED.replace("SUFFIX", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "{1,3}")

_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """``single_digits`` cuts digits apart, ``patterns`` cut one after the other, ``gpt2`` adds GPT-2's own pattern.

    ``ignore_merges``: a word that is a token as a whole is taken as that token, whatever the merges say.
    ``add_bos``: whether a file without ``add_bos_token`` means yes.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = Splitting(gpt2=True)
_GPT2_NFC = Splitting(gpt2=True, nfc=True)
_DIGITS = Splitting(gpt2=True, single_digits=True)
_LLAMA3 = Splitting((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = Splitting((QWEN2,), nfc=True)

SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "gigachat": _GPT2,
    "mellum": _GPT2,
    "exaone4": _GPT2,
    "mpt": _GPT2_NFC,
    "olmo": _GPT2_NFC,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "command-r": Splitting(gpt2=True, single_digits=True, nfc=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": Splitting((LLAMA3,)),
    "smaug-bpe": Splitting((LLAMA3,)),
    "glm4": Splitting((LLAMA3,)),
    "chatglm-bpe": Splitting((LLAMA3,)),
    "tekken": Splitting((TEKKEN,), ignore_merges=True, add_bos=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": Splitting((QWEN35,), nfc=True),
    "gpt-4o": Splitting((GPT4O,)),
    "llama4": Splitting((GPT4O,)),
    "deepseek-coder": Splitting(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ),
    "deepseek-v3": Splitting((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS)),
}


def splitting_of(name: object) -> tuple[Splitting, str | None]:
    """The splitting that ``tokenizer.ggml.pre`` names, and a warning when it had to be assumed.

    A file without a name, or with one that is unknown here, is read like GPT-2.
    """
    if isinstance(name, str) and name in SPLITTINGS:
        return SPLITTINGS[name], None
    if name is None:
        return (
            _GPT2,
            "tokenizer.ggml.pre is missing; words are cut as GPT-2 does, which may not be how the model was trained",
        )
    shown = str(name)[:40]
    return (
        _GPT2,
        f"tokenizer.ggml.pre {shown!r} is not known; words are cut as GPT-2 does, which is probably wrong",
    )
