"""Restart policy: at once the first time, slower and slower after that, hopeless when it is."""

from __future__ import annotations

from toque.fleet.restart import REFUSED_STATUS, RestartPolicy


def test_the_first_restart_is_at_once_and_then_it_slows_down() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=4)
    delays = [policy.ended(ready_s=1, status=-9).delay_s for _ in range(6)]
    assert delays == [0, 0.5, 1, 2, 4, 4]


def test_a_settled_process_starts_with_a_clean_record() -> None:
    policy = RestartPolicy(settled_s=10)
    for _ in range(4):
        policy.ended(ready_s=1, status=1)
    assert policy.ended(ready_s=11, status=1).delay_s == 0


def test_twice_without_being_ready_is_a_crash_loop() -> None:
    policy = RestartPolicy()
    assert not policy.ended(ready_s=None, status=1).hopeless
    assert policy.ended(ready_s=None, status=1).hopeless
    assert not policy.ended(ready_s=0.1, status=1).hopeless
    assert not policy.ended(ready_s=None, status=1).hopeless


def test_a_refused_model_is_hopeless_at_once() -> None:
    restart = RestartPolicy().ended(ready_s=None, status=REFUSED_STATUS)
    assert restart.hopeless
    assert restart.delay_s > 0


def test_delays_do_not_overflow() -> None:
    policy = RestartPolicy(max_delay_s=30)
    assert [policy.ended(ready_s=None, status=1).delay_s for _ in range(3000)][-1] == 30
