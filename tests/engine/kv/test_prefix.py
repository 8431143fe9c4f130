from __future__ import annotations

import itertools

from toque.engine.kv.prefix import PrefixNames


def names_of(names: PrefixNames, tokens: list[int], *, tenant: str = "", salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    names.extend(found, names.root(tenant, salt), tokens, len(tokens) // names.block_size)
    return found


def test_a_name_says_everything_that_precedes_the_block() -> None:
    names = PrefixNames(2, "model")
    base = names_of(names, [1, 2, 3, 4])
    assert names_of(names, [1, 2, 3, 4]) == base
    assert names_of(names, [1, 2, 3, 5])[0] == base[0]
    assert names_of(names, [1, 2, 3, 5])[1] != base[1]
    assert names_of(names, [9, 2, 3, 4])[1] != base[1]  # the block is the same, what precedes it is not
    assert names_of(names, [3, 4])[0] != base[1]


def test_tenants_salts_and_models_never_meet() -> None:
    names = PrefixNames(2, "model")
    owners = list(itertools.product(["", "a", "ab"], ["", "b", "c"]))
    seen = {names_of(names, [1, 2], tenant=tenant, salt=salt)[0] for tenant, salt in owners}
    assert len(seen) == len(owners)  # ("a", "b") is not ("ab", "")
    other = PrefixNames(2, "another model")
    other._key = names._key
    assert names_of(other, [1, 2]) != names_of(names, [1, 2])


def test_every_process_has_a_key_of_its_own() -> None:
    assert names_of(PrefixNames(2, "m"), [1, 2]) != names_of(PrefixNames(2, "m"), [1, 2])


def test_names_can_be_extended_step_by_step() -> None:
    names = PrefixNames(2, "m")
    root = names.root("t", "")
    steps: list[bytes] = []
    tokens = [5, 6, 7, 8, 9, 10]
    for count in (1, 1, 2, 3):
        names.extend(steps, root, tokens, count)
    assert steps == names_of(names, tokens, tenant="t")


def test_a_lone_surrogate_in_a_salt_is_only_another_salt() -> None:
    names = PrefixNames(2, "m")
    assert names.root("", "\ud800") != names.root("", "?")
