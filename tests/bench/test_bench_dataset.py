"""What a benchmark asks: the same every time, nothing shared but what should be, and files read with care."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque.bench.dataset import FromFile, Synthetic, WordRate, user
from toque.bench.lengths import Lengths
from toque.bench.plan import Plan
from toque.bench.run import ClosedLoop, OpenLoop
from toque.errors import ConfigError

FIVE = Lengths("fixed", 5)


def texts(dataset: Synthetic, count: int) -> list[str]:
    return [dataset.conversation(i).turns[0].messages[0]["content"] for i in range(count)]


def common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_have_their_length_and_share_no_beginning() -> None:
    dataset = Synthetic(Lengths("uniform", 40, 60), FIVE)
    found = texts(dataset, 50)
    assert found == texts(dataset, 50)
    assert all(40 <= len(text.split()) <= 60 for text in found)
    assert len({tuple(text.split()[:4]) for text in found}) == 50
    assert not set(found) & set(texts(dataset.reseeded("other"), 50))
    assert not set(found) & {dataset.warm_up(i).turns[0].messages[0]["content"] for i in range(50)}
    assert len(texts(Synthetic(FIVE, FIVE), 1)[0].split()) == 5  # too short for the task


def test_a_shared_prefix_is_shared_by_all_and_by_no_warm_up() -> None:
    dataset = Synthetic(FIVE, FIVE, prefix_tokens=300)
    a, b, *_ = texts(dataset, 2)
    assert len(a[: common(a, b)].split()) >= 300
    other = dataset.warm_up(0).turns[0].messages[0]["content"]
    assert common(a, other) < 40
    assert common(a, texts(dataset.reseeded("x"), 1)[0]) < 40


def test_turns_after_the_first_have_no_template_to_subtract() -> None:
    rate = WordRate(overhead=30, per_word=2.0, measured=True)
    talk = Synthetic(Lengths("fixed", 130), FIVE, 1000, Lengths("fixed", 3), rate).conversation(0)
    counts = [len(turn.messages[0]["content"].split()) for turn in talk.turns]
    assert counts == [500 + 50, 65, 65]
    assert [turn.output_tokens for turn in talk.turns] == [5, 5, 5]


def test_a_file_of_conversations(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(
        '{"prompt": "hi", "output_tokens": 7}\n\n'
        '{"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]}\n'
        '{"turns": ["one", "two"]}\n'
    )
    data = FromFile.load(file, Lengths("fixed", 9))
    assert data.name == "own.jsonl"
    one, two, three = (data.conversation(i) for i in range(3))
    assert (one.turns[0].messages, one.turns[0].output_tokens) == ((user("hi"),), 7)
    assert [m["role"] for m in two.turns[0].messages] == ["system", "user"]
    assert [(t.messages, t.output_tokens) for t in three.turns] == [((user("one"),), 9), ((user("two"),), 9)]
    assert data.conversation(3) == one  # from the start again
    assert not data.single_prompts
    assert data.reseeded("x") == data
    assert data.warm_up(0) not in data.conversations


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "truncated"),
        ("5", "object"),
        ('{"promt": "x"}', "promt"),
        ('{"prompt": 5}', "prompt"),
        ('{"prompt": ""}', "empty"),
        ('{"turns": []}', "empty"),
        ('{"messages": []}', "empty"),
        ('{"output_tokens": 5}', "exactly one"),
        ('{"prompt": "x", "turns": ["y"]}', "exactly one"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens"),
    ],
)
def test_a_wrong_line_is_named_by_number_and_reason(line: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2") as refused:
        FromFile.load(file, FIVE)
    assert word in refused.value.message
    assert "--dataset" in refused.value.message


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dataset .*No such file"):
        FromFile.load(tmp_path / "none.jsonl", FIVE)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="no conversations"):
        FromFile.load(tmp_path / "empty.jsonl", FIVE)


def test_plans_become_loads() -> None:
    loads, sweep = Plan().build(WordRate(), chat=True)
    assert [(x.name, x.profile, x.requests) for x in loads] == [
        ("sequential", ClosedLoop(1), 20), ("concurrent", ClosedLoop(100), 100), ("shared-prefix", ClosedLoop(8), 50),
    ]  # fmt: skip
    assert sweep is None
    plan = Plan(
        profiles=("concurrent", "poisson", "synchronous"), concurrency=(1, 4), rates=(2, 3.5), duration=9
    )
    plan.validate(chat=True)
    loads, _ = plan.build(WordRate(), chat=True)
    assert [x.profile for x in loads] == [
        ClosedLoop(1), ClosedLoop(4), OpenLoop("poisson", 2), OpenLoop("poisson", 3.5), ClosedLoop(1),
    ]  # fmt: skip
    assert {x.duration_s for x in loads} == {9}
    loads, sweep = Plan(profiles=("sweep",), levels=3, concurrency=(16,), requests=5).build(
        WordRate(), chat=True
    )
    assert not loads
    assert sweep is not None
    assert (sweep.levels, sweep.streams, sweep.requests) == (3, 16, 5)


@pytest.mark.parametrize(
    ("plan", "flag"),
    [
        (Plan(loads=("sequential",), profiles=("poisson",), rates=(1,)), "--workload"),
        (Plan(profiles=("constant",)), "--rate"),
        (Plan(rates=(1,)), "--rate"),
        (Plan(profiles=("synchronous",), rates=(1,)), "--rate"),
        (Plan(profiles=("synchronous",), levels=3), "--levels"),
        (Plan(profiles=("synchronous",), concurrency=(2,)), "--concurrency"),
        (Plan(profiles=("sweep",), concurrency=(2, 3)), "--concurrency"),
        (Plan(concurrency=(2, 3)), "--concurrency"),
        (Plan(duration=5), "--duration"),
        (Plan(prefix_tokens=5), "--prefix-tokens"),
        (Plan(turns="2"), "--turns"),
        (Plan(dataset="multi-turn"), "--dataset"),
        (Plan(profiles=("synchronous",), dataset="prompts.txt"), "--dataset"),
        (Plan(profiles=("synchronous",), inputs="many"), "--input-tokens"),
        (Plan(profiles=("synchronous",), outputs="0"), "--output-tokens"),
        (Plan(profiles=("synchronous",), turns="x"), "--turns"),
    ],
)
def test_contradictions_are_refused_by_the_name_of_the_flag(plan: Plan, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} "):
        plan.validate(chat=True)


def test_completions_take_one_prompt(tmp_path: Path) -> None:
    for plan in (
        Plan(profiles=("synchronous",), dataset="multi-turn"),
        Plan(profiles=("synchronous",), turns="2"),
    ):
        with pytest.raises(ConfigError, match="--endpoint completions"):
            plan.validate(chat=False)
    file = tmp_path / "talks.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n')
    plan = Plan(profiles=("synchronous",), dataset=str(file))
    plan.validate(chat=True)
    with pytest.raises(ConfigError, match="--endpoint completions"):
        plan.validate(chat=False)
    file.write_text('{"prompt": "a"}\n')
    plan.validate(chat=False)
