"""Seeded random and adversarial texts that the tokenizer tests share."""

from __future__ import annotations

import random

WORDS = (
    "the of and Hello world brutalist tokenization don't I'll WE'RE it's naïve café Việt straße Ǆ ǅ İ ı "
    "12345 3.14159 1,000,000 ①② ٣٤٥ 0x1F x² ½ Ⅷ 你好 世界 漢字かな カタカナ 한국어 ไทย हिन्दी עברית العربية "
    "👩‍👩‍👧‍👦 🇫🇷 😀 e\u0301 \u00e9 a\u0308\u0323 \u1112\u1161\u11ab ﬁ Å Å "
    "\ufeff \u200b \u200d \u00a0 \u3000 \u2028 \u0085 "
    "\ufffd \U0010ffff \x00 \x7f \x1b[0m <|im_start|> <|im_end|> <|endoftext|> <tool_call> </s> <s> <bos> <unk> "
    "<|im_start <0x0A> [PAD151700] ▁ ▁▁the Ġ Ċ def f(x): return {} // /* */ != === -> :: http://a.b/c?d=e&f#g "
    "_____ ------ ====== \\\\ \"\" '' `` ... !!! ??? $100 50% a_b snake_case CamelCase <b>x</b> </table> &amp;"
).split(" ")
SPACES = (
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n\n\n",
    "\t",
    "\t\t\t\t\t\t",
    "\r\n",
    " \n ",
    "\n  ",
    "",
    "",
    "",
    " " * 33,
)
RANGES = (
    (0x20, 0x7E),
    (0x20, 0x7E),
    (0x00, 0x1F),
    (0xA0, 0x24F),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x600, 0x6FF),
    (0x900, 0xDFF),
    (0x1100, 0x11FF),
    (0x1E00, 0x1FFF),
    (0x2000, 0x206F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xF900, 0xFAFF),
    (0x1F300, 0x1FAFF),
    (0x2F800, 0x2FA1F),
    (0xE000, 0xF8FF),
    (0x10000, 0x10FFFF),
)


def texts(count: int, seed: int = 7) -> list[str]:
    """``count`` texts: words glued or spaced, characters of one or of many scripts, and runs of one character."""
    chance = random.Random(seed)
    made = [
        "",
        " ",
        "  ",
        "\n",
        "a",
        "▁",
        " a",
        "  a",
        "a ",
        "a  ",
        "\t\t\t\t\t\ttest",
        "e\u0301",
        "\u00e9",
        " Việt",
        "12345",
    ]
    while len(made) < count:
        kind = chance.random()
        if kind < 0.5:
            made.append(
                "".join(chance.choice(WORDS) + chance.choice(SPACES) for _ in range(chance.randint(1, 12)))
            )
        elif kind < 0.7:
            low, high = chance.choice(RANGES)
            made.append("".join(chr(chance.randint(low, high)) for _ in range(chance.randint(1, 30))))
        elif kind < 0.9:
            made.append(
                "".join(chr(chance.randint(*chance.choice(RANGES))) for _ in range(chance.randint(1, 30)))
            )
        else:
            unit = chance.choice([*WORDS, *SPACES[:9]])
            made.append(chance.choice(WORDS) + unit * chance.randint(1, 80) + chance.choice(WORDS))
    return made[:count]
