"""The grammar library (llguidance), behind the one file that imports it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from toque.errors import EngineError, GrammarError
from toque.text.grammar.lark import lark_source
from toque.text.grammar.spec import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from toque.text.tokenizer import Tokenizer

_KEPT = 64  # compiled grammars, by their text
_KEPT_REFUSALS = 256  # a digest and at most 400 characters each
# Work, not seconds, is what the library can bound; on a slow machine these are about 0.2 s to compile and 10 ms a mask.
_LIMITS: dict[str, Any] = {
    # Counts of counts (x{5000}{5000}) take all of it: then 0.15 s to compile, and the first mask of each answer 30 ms
    # of the step loop. Ten times as much made that 2.6 and 0.4 s; schemas and tools at their limits take a hundredth.
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 150_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_TAGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")


class Matcher:
    """Where one answer is in its grammar.

    Give it every token of the answer in order; ``fill`` says which may come next. Not thread-safe.
    """

    __slots__ = ("_inner", "_words")

    def __init__(self, inner: Any, words: int) -> None:
        self._inner = inner
        self._words = words

    def fill(self, row: npt.NDArray[np.uint32]) -> None:
        """Write the allowed tokens into a row of a step's masks; ids beyond the tokenizer's are never allowed."""
        if row.size < self._words:
            raise EngineError(f"a mask of {row.size} words for a vocabulary that takes {self._words}")
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._words)
        row[self._words :] = 0

    def accept(self, token: int) -> bool:
        """The answer goes on with ``token``. False when the grammar does not allow that, or became too complex."""
        return bool(self._inner.consume_token(token))

    def copy(self) -> Matcher:
        """One that goes its own way from here, for looking ahead. Cheap."""
        return Matcher(self._inner.deep_copy(), self._words)

    @property
    def complete(self) -> bool:
        """Nothing can follow: the answer is whole."""
        return bool(self._inner.is_stopped())

    @property
    def may_end(self) -> bool:
        """The answer so far is whole, though more could follow."""
        return bool(self._inner.is_accepting())

    @property
    def error(self) -> str:
        """Why the grammar cannot go on; "" while it can."""
        return str(self._inner.get_error()).split("\n", 1)[0]


class Compiler:
    """Grammars for one model's vocabulary. Safe to use from several threads; compiling releases the GIL.

    The tokenizer is asked for and its vocabulary sorted at the first grammar (0.2 to 2 s, by its size), so that a
    model that nobody asks for structure pays nothing.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._words = 0
        self._tokens: Any = None
        self._special: dict[str, int] = {}
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._refusals: OrderedDict[bytes, tuple[str, str | None]] = OrderedDict()

    def compile(self, encoded: str) -> Matcher:
        """A fresh matcher for an encoded `GrammarSpec`. Raises GrammarError for what is no grammar, or too large.

        A refusal is remembered, too: the limits bound work and not time, so what was refused once always would be.
        """
        name = blake2b(encoded.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            refused = self._refusals.get(name)
            if refused is not None:
                self._refusals.move_to_end(name)
                raise GrammarError(refused[0], param=refused[1])
        try:
            return self._compile(encoded)
        except GrammarError as error:
            with self._lock:
                self._refusals[name] = (error.message, error.param)
                if len(self._refusals) > _KEPT_REFUSALS:
                    self._refusals.popitem(last=False)
            raise

    def _compile(self, encoded: str) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        spec = GrammarSpec.decode(encoded)
        self.warm()
        with self._lock:
            known = self._compiled.get(encoded)
            if known is not None:
                self._compiled.move_to_end(encoded)
        if known is None:
            try:
                source = lark_source(spec, self._special)
            except (ValueError, KeyError, TypeError) as error:
                raise _refused(spec, str(error)) from None
            known = LLMatcher(self._tokens, source, log_level=0, limits=LLParserLimits(**_LIMITS))
            if known.is_error():
                raise _refused(spec, known.get_error())
            if not any(known.compute_bitmask()):
                raise _refused(spec, "nothing can match it")
            if known.is_error():
                raise _refused(spec, known.get_error())
            with self._lock:
                self._compiled[encoded] = known
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        with self._lock:  # a matcher must not be copied by two threads at once
            return Matcher(known.deep_copy(), self._words)

    def warm(self) -> None:
        """Prepare the vocabulary, if that has not been done."""
        if self._tokens is not None:
            return
        with self._lock:
            if self._tokens is None:
                self._tokens = self._prepare()

    def _prepare(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._load(), self._vocab_size)
        self._special = vocabulary.tags
        self._words = (len(vocabulary.tokens) + 31) // 32
        wrapped = TokenizerWrapper(vocabulary)
        # In two calls, since the library keeps the GIL for all of each: streams go on between them.
        plain = LLTokenizer(wrapped, eos_token=vocabulary.eos, slices=[])
        return plain.with_slices(LLTokenizer.json_slices())


class _Vocabulary:
    """A tokenizer as the library wants it: the bytes of every token, and which are control tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        count = min(tokenizer.vocab_size, vocab_size)
        self.special_token_ids = [token for token in range(count) if tokenizer.is_special(token)]
        # An id without bytes can never be part of an answer.
        self.tokens = [tokenizer.token_bytes(token) for token in range(count)]
        self.eos = sorted(token for token in tokenizer.eos_ids if token < count)
        self.eos_token_id = self.eos[0] if self.eos else count - 1
        self.eos = self.eos or [self.eos_token_id]
        self.bos_token_id = tokenizer.bos_id
        ids = {tag: tokenizer.token_id(tag) for tag in _TAGS}
        self.tags = {
            tag: token for tag, token in ids.items() if token in self.special_token_ids and token is not None
        }
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> Sequence[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(plain, add_special=False)


def _refused(spec: GrammarSpec, why: str) -> GrammarError:
    place = {
        GrammarKind.REGEX: "structured_outputs.regex",
        GrammarKind.CHOICE: "structured_outputs.choice",
        GrammarKind.LARK: "structured_outputs.grammar",
        GrammarKind.TOOLS: "tools",
    }.get(spec.kind, "response_format")
    what = "the JSON schema" if place == "response_format" else place
    return GrammarError(f"{what} cannot be compiled: {_reason(why)[:300]}", param=place)


def _reason(why: str) -> str:
    """One line of the library's report. Of a regular expression it shows the place first and says what is wrong there
    below; the grammar that it quotes is not what the caller wrote."""
    lines = [line.strip() for line in why.split("\n") if line.strip()]
    wrong = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if wrong is not None:
        return f"in a regular expression: {wrong}"
    first = lines[0] if lines else "it is not valid"
    wrong = first.rpartition("failed to compile JSON schema: ")[2]
    if wrong.startswith("circular references with sibling keys"):
        return "$ref to a schema around it is not supported beside other keywords"
    return wrong.partition(". Enable '")[0]  # its advice is about options that no caller has
