"""What speculation gives: the same requests with ``--speculate`` and without, interleaved, with the same text checked.

``python benchmarks/speculate.py [MODEL.gguf] [--speculate ngram] [--batch 1] [--rounds 5] [--tokens 200]`` prints, for
each kind of prompt, decoded tokens per second (from the first token on) of both, their ratio (median of the rounds'
own ratios), that of CPU time (with ``--threads 1`` it hardly depends on who else is at work), tokens per step, and the
share of guesses that came true.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toque.engine.engine import Engine
from toque.engine.loader import load_engine
from toque.engine.options import EngineOptions
from toque.formats import load_checkpoint
from toque.text.tokenizer import Tokenizer, load_tokenizer
from toque.types import EngineRequest, SamplingParams

CODE = '''class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)
        self.history.append(("transfer", amount))
        return self.balance

    def statement(self):
        lines = [f"Account of {self.owner}"]
        for kind, amount in self.history:
            lines.append(f"{kind}: {amount}")
        lines.append(f"balance: {self.balance}")
        return "\\n".join(lines)
'''
ARTICLE = (
    "The harbour of Port Ellery was built in 1874 by the engineer Thomas Wragge, who had learnt his trade in the docks"
    " of Liverpool. Its breakwater of granite blocks, six hundred metres long, was meant to shelter the herring fleet"
    " from the winter storms that had destroyed half of the boats in 1869. Within ten years the number of boats had"
    " risen from forty to more than two hundred, and the town built a market hall, a school and a railway station. In"
    " 1911 the herring moved away to the north, and most of the families followed them or left for Canada. The railway"
    " was closed in 1952. Today the harbour is used by a dozen crab boats and by visitors, and the market hall is a"
    " museum in which the plans of Thomas Wragge can be seen."
)
ASKED = {
    "edit code": f"```python\n{CODE}```\n\nRename the class Account to Wallet. Answer with the whole file only.",
    "fix a typo": f"{ARTICLE}\n\nRepeat this text word for word, with the year 1874 changed to 1876.",
    "summarise": f"{ARTICLE}\n\nSummarise this text in three sentences, and quote its first sentence.",
    "story": "Write a long story about a lighthouse keeper, her cat and a storm that never ends.",
}


class Prompt(NamedTuple):
    kind: str
    tokens: list[int]
    temperature: float = 0.0


@dataclass
class Round:
    seconds: float
    cpu: float
    tokens: int
    steps: int
    texts: list[list[int]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def prompts(tokenizer: Tokenizer) -> list[Prompt]:
    chats = [
        Prompt(
            kind,
            tokenizer.encode(
                f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special=False
            ),
        )
        for kind, text in ASKED.items()
    ]
    # What any model can do: go on with a text that it has before it.
    begun = f"{CODE}\n\n# The same file again:\n\n{CODE[:300]}"
    wild = Prompt("wild story", chats[-1].tokens, 1.0)
    return [Prompt("copy", tokenizer.encode(begun, add_special=False)), *chats, wild]


def one_round(engine: Engine, prompt: Prompt, batch: int, tokens: int, name: str) -> Round:
    """All answers of a batch; the clock runs from when each has its first token."""
    answers: dict[str, list[int]] = {}
    for i in range(batch):
        sampling = SamplingParams(temperature=prompt.temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        engine.add(EngineRequest(f"{name}-{i}", tuple(prompt.tokens), sampling))
        answers[f"{name}-{i}"] = []
    began, cpu, first, steps = 0.0, 0.0, 0, 0
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.tokens
        steps += began > 0.0
        if not began and all(answers.values()):
            began, cpu, first = time.perf_counter(), time.process_time(), sum(map(len, answers.values()))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    texts = list(answers.values())
    return Round(seconds, cpu, sum(map(len, texts)) - first, steps, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "model", nargs="?", type=Path, default=Path(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    )
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--only", default="", help="kinds of prompts, separated by commas")
    args = parser.parse_args()
    checkpoint = load_checkpoint(args.model)
    settings = {
        "kv_blocks": 64 * max(args.batch, 2),
        "max_sequences": max(args.batch, 4),
        "threads": args.threads,
    }
    plain = load_engine(checkpoint, EngineOptions(**settings))
    guessing = load_engine(checkpoint, EngineOptions(**settings, speculate=args.speculate))
    print(f"{args.model.name}, {args.speculate}, batch {args.batch}, {args.rounds} rounds")
    print(
        "| prompt | plain tok/s | guessing tok/s | ratio | of CPU time | tokens per step | guesses that came true |"
    )
    print("|---|---|---|---|---|---|---|")
    for prompt in prompts(load_tokenizer(checkpoint)):
        kind = prompt.kind
        if args.only and kind not in args.only.split(","):
            continue
        before, after = [], []
        begun = guessing.stats()
        for i in range(args.rounds):
            before.append(one_round(plain, prompt, args.batch, args.tokens, f"{kind}{i}"))
            after.append(one_round(guessing, prompt, args.batch, args.tokens, f"{kind}{i}"))
            if before[-1].texts != after[-1].texts:
                raise SystemExit(f"{kind}: the text is not that of plain decoding")
        stats = guessing.stats()
        drafted = stats.drafted_tokens - begun.drafted_tokens
        ratio = statistics.median(b.rate / a.rate for a, b in zip(before, after, strict=True))
        cpu = statistics.median(a.cpu / b.cpu for a, b in zip(before, after, strict=True))
        print(
            f"| {kind} | {statistics.median(r.rate for r in before):.0f}"
            f" | {statistics.median(r.rate for r in after):.0f} | {ratio:.2f} | {cpu:.2f}"
            f" | {statistics.median(r.tokens / r.steps / args.batch for r in after):.2f}"
            f" | {(stats.accepted_tokens - begun.accepted_tokens) / max(drafted, 1):.2f} of {drafted} |"
        )
    plain.close()
    guessing.close()


if __name__ == "__main__":
    main()
