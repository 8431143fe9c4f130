"""Sequences whose block tables begin with the same blocks are attended together; no bit of their logits may change.

Expected are the logits of each sequence in a step of its own, in blocks of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from fixtures.checkpoints import batch_of, memory_checkpoint, random_weights
from fixtures.graphs import CONFIG, RandomRecorder
from toque import _native
from toque.backends.base import BLOCK_SIZE, BackendOptions
from toque.backends.cpu import CpuBackend
from toque.graph.fuse import fuse
from toque.graph.rope import rope_spec
from toque.graph.shapes import weight_shapes

VOCAB = 40
BLOCKS = 1600


def two_layers(*, heads=3, kv_heads=1, head_dim=64, windows=(0, 0), softcap=0.0):
    rec = RandomRecorder()
    x = rec.embed("table", 24)
    rope = rope_spec(1e4, head_dim)
    for layer, window in enumerate(windows):
        q = rec.linear(x, f"q{layer}", heads * head_dim)
        k, v = (rec.linear(x, f"{name}{layer}", kv_heads * head_dim) for name in "kv")
        q, k = (rec.rope(value, head_dim=head_dim, rope=rope) for value in (q, k))
        o = rec.attention(
            q, k, v, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, window=window, softcap=softcap
        )
        x = rec.add(x, rec.linear(o, f"o{layer}", 24))
    return fuse(rec.finish(rec.linear(rec.select_rows(x), "out", VOCAB)))


@dataclass
class Story:
    """A sequence: the tokens before the step, those of the step, and the blocks they lie in."""

    past: list[int]
    new: list[int]
    blocks: list[int] = field(default_factory=list)


class Cache:
    """An executable and who owns which block."""

    def __init__(self, graph, *, threads=2, kv_dtype="auto", isa=""):
        checkpoint = memory_checkpoint(CONFIG, random_weights(weight_shapes(graph), 4, rows=VOCAB))
        self.executable = CpuBackend().lower(
            graph, checkpoint, BackendOptions(threads, isa, 4096, 4096, kv_dtype)
        )
        self.executable.allocate_kv(BLOCKS)
        free = np.random.default_rng(9).permutation(BLOCKS).tolist()
        self.take = lambda n: [free.pop() for _ in range(n)]

    def run(self, story, tokens, first):
        return self.executable.logits(batch_of([(tokens, first, story.blocks)]))

    def admit(self, story, shared=()):
        """Blocks for the story, the first of them those of another; what they lack of its past is computed."""
        total = -(-len(story.past + story.new) // BLOCK_SIZE)
        story.blocks = [*shared, *self.take(total - len(shared))]
        known = len(shared) * BLOCK_SIZE
        if known < len(story.past):
            self.run(story, story.past[known:], known)


def random_tokens(random, n):
    return random.integers(0, VOCAB, n).tolist()


def alone(graph, stories, kv_dtype):
    cache = Cache(graph, threads=1, kv_dtype=kv_dtype)
    expected = []
    for story in stories:
        cache.admit(story)
        expected.append(cache.run(story, story.new, len(story.past)))
    return np.concatenate(expected)


def in_common(a, b):
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def together(graph, stories, leaders, *, order=None, **options):
    """All stories in one step, in the given order. ``leaders`` gives for each the story whose first blocks it has as
    far as their past is the same (itself: nobody's)."""
    cache = Cache(graph, **options)
    for story, leader in zip(stories, leaders, strict=True):
        other = stories[leader]
        shared = 0 if other is story else in_common((story.past + story.new)[:-1], other.past) // BLOCK_SIZE
        cache.admit(story, other.blocks[:shared])
    order = range(len(stories)) if order is None else order
    logits = cache.executable.logits(
        batch_of([(stories[i].new, len(stories[i].past), stories[i].blocks) for i in order])
    )
    rows = np.split(logits, np.cumsum([len(stories[i].new) for i in order])[:-1])
    return np.concatenate([rows[place] for place in np.argsort(order)])


def agree(graph, stories, leaders, *, kv_dtype="auto", threads=(1, 2), isa=""):
    expected = alone(graph, stories, kv_dtype)
    for count in threads:
        actual = together(graph, stories, leaders, threads=count, kv_dtype=kv_dtype, isa=isa)
        np.testing.assert_array_equal(actual, expected)


def decoding(random, members, *, prefix=768, new=1):
    """Sequences over a common prefix, each with some tokens of its own; the first has none past the prefix."""
    common = random_tokens(random, prefix)
    stories = [Story(list(common), random_tokens(random, new))]
    for _ in range(members - 1):
        stories.append(
            Story(common + random_tokens(random, int(random.integers(0, 300))), random_tokens(random, new))
        )
    return stories, [0] * members


@pytest.mark.parametrize(
    ("members", "threads", "chunks"),
    [
        # 3 heads read 3 chunks of the prefix once for 8 sequences, then each sequence's own fourth.
        (8, 1, 3 * (3 + 8)),
        # On two threads two units of four sequences, for no thread waits then.
        (8, 2, 3 * (2 * 3 + 8)),
        (4, 2, 3 * (2 * 3 + 4)),
        (16, 2, 3 * (2 * 3 + 16)),
        # One unit: its chunks are shared out.
        (2, 2, 3 * (3 + 2)),
        (40, 2, 3 * (5 * 3 + 40)),
    ],
)
def test_what_is_shared_is_read_once_for_many(members, threads, chunks):
    random = np.random.default_rng(members)
    common = random_tokens(random, 768)
    stories = [Story(common + random_tokens(random, 40), random_tokens(random, 1)) for _ in range(members)]
    graph = two_layers(heads=9, kv_heads=3)
    cache = Cache(graph, threads=threads)
    for story in stories:
        cache.admit(story, stories[0].blocks[: 768 // BLOCK_SIZE])
    step = batch_of([(story.new, len(story.past), story.blocks) for story in stories])
    cache.executable.logits(step)
    assert cache.executable.model.attention_work() == [(chunks, 9 * 4 * members)]
    for story in stories:
        story.blocks = []
        cache.admit(story)
    cache.executable.logits(batch_of([(s.new, len(s.past), s.blocks) for s in stories]))
    assert cache.executable.model.attention_work() == [(3 * 4 * members, 9 * 4 * members)]


@pytest.mark.parametrize("members", [2, 3, 8, 9, 17, 40])
def test_groups_of_every_size(members):
    stories, leaders = decoding(np.random.default_rng(members), members, prefix=520)
    agree(two_layers(), stories, leaders)


@pytest.mark.parametrize("prefix", [32, 255, 256, 288, 511, 512, 800, 1000])
def test_sharing_may_end_anywhere(prefix):
    stories, leaders = decoding(np.random.default_rng(prefix), 6, prefix=prefix)
    agree(two_layers(), stories, leaders)


@pytest.mark.parametrize("windows", [(64, 0), (300, 300), (700, 16), (1, 512)])
def test_windows_that_hide_some_or_all_of_what_is_shared(windows):
    random = np.random.default_rng(sum(windows))
    stories, leaders = decoding(random, 7)
    stories.append(Story(stories[0].past + random_tokens(random, 900), random_tokens(random, 1)))
    agree(two_layers(windows=windows), stories, [*leaders, 0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 64), (8, 2, 128), (7, 1, 64), (26, 1, 32), (9, 3, 64)],
)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_every_shape_of_head(heads, kv_heads, head_dim, kv_dtype):
    stories, leaders = decoding(np.random.default_rng(heads), 7, prefix=400)
    graph = two_layers(heads=heads, kv_heads=kv_heads, head_dim=head_dim, softcap=5.0)
    agree(graph, stories, leaders, kv_dtype=kv_dtype)


@pytest.mark.parametrize("isa", _native.isas())
def test_every_instruction_set(isa):
    stories, leaders = decoding(np.random.default_rng(2), 3, prefix=260)
    expected = together(two_layers(), stories, [0, 1, 2], threads=1, isa=isa)
    np.testing.assert_array_equal(together(two_layers(), stories, leaders, isa=isa), expected)


def test_a_few_tokens_of_each_as_drafts_are_verified():
    random = np.random.default_rng(8)
    stories, leaders = decoding(random, 12, prefix=600)
    for story in stories:
        story.new = random_tokens(random, int(random.integers(1, 6)))
    agree(two_layers(), stories, leaders)


def test_one_far_ahead_of_those_it_shares_with():
    random = np.random.default_rng(11)
    stories, leaders = decoding(random, 4, prefix=512)
    stories.append(Story(stories[0].past + random_tokens(random, 2500), random_tokens(random, 1)))
    agree(two_layers(kv_heads=3), stories, [*leaders, 0], threads=(1, 2, 3))


def test_families_within_families():
    """Some of those who share one chunk share three more, and some of these another one."""
    random = np.random.default_rng(21)
    root = random_tokens(random, 256)
    branch = root + random_tokens(random, 768)
    twig = branch + random_tokens(random, 256)
    stories, leaders = [], []
    for trunk, members in ((root, 3), (branch, 4), (twig, 3), (root, 2), (twig, 9)):
        for _ in range(members):
            stories.append(
                Story(trunk + random_tokens(random, int(random.integers(0, 40))), random_tokens(random, 1))
            )
    # Each shares with whoever before it has most in common.
    for index, story in enumerate(stories):
        common = [in_common(story.past, other.past) for other in stories[:index]]
        leaders.append(int(np.argmax(common)) if common else 0)
    agree(two_layers(), stories, leaders)


@pytest.mark.parametrize("seed", range(12))
def test_any_step(seed):
    """Families of random sizes amid strangers and prompts, of random lengths, in random order."""
    random = np.random.default_rng(100 + seed)
    stories, leaders = [], []
    for _ in range(int(random.integers(1, 4))):
        family, _ = decoding(random, int(random.integers(1, 12)), prefix=int(random.integers(200, 900)))
        leaders += [len(stories)] * len(family)
        stories += family
    for story in stories:
        if random.random() < 0.15:
            story.new = random_tokens(random, int(random.choice([2, 7, 8, 9, 60])))
    for _ in range(int(random.integers(0, 6))):
        leaders.append(len(stories))
        stories.append(
            Story(
                random_tokens(random, int(random.integers(0, 700))),
                random_tokens(random, int(random.choice([1, 1, 30]))),
            )
        )
    windows = [int(random.choice([0, 0, 16, 300])) for _ in range(2)]
    group, kv_heads = int(random.choice([1, 3, 4, 7])), int(random.choice([1, 2]))
    graph = two_layers(heads=group * kv_heads, kv_heads=kv_heads, windows=windows)
    kv_dtype = str(random.choice(["auto", "int8"]))
    expected = alone(graph, stories, kv_dtype)
    for threads in (1, 2):
        order = random.permutation(len(stories))
        actual = together(graph, stories, leaders, order=order, threads=threads, kv_dtype=kv_dtype)
        np.testing.assert_array_equal(actual, expected)
