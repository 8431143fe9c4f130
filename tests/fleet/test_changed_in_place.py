"""A plain path whose file is changed where it is: what was deployed and what is there now are two versions."""

from __future__ import annotations

from pathlib import Path

from fixtures.virtual_fleet import TO_ZERO, World, deployment
from toque.errors import ModelError
from toque.file_state import check_state, file_state
from toque.fleet.launch import command_of
from toque.fleet.placement.base import ReplicaSpec
from toque.fleet.placement.fake import Behaviour
from toque.fleet.resolve import resolve
from toque.fleet.spec import RolloutPolicy, ScalingPolicy
from toque.routing.base import ReplicaState


def looks_at_its_files(spec: ReplicaSpec) -> Behaviour:
    """As a replica does: it is given the state that was deployed, and refuses any other."""
    argv = list(spec.argv)
    try:
        check_state(Path(argv[argv.index("--model") + 1]), argv[argv.index("--state") + 1])
    except ModelError as error:
        return Behaviour(refuse=error.message)
    return Behaviour(load_s=0.5)


class InPlace(World):
    def __init__(self, model: Path) -> None:
        super().__init__(looks_at_its_files, command=command_of, resolve=resolve)
        self.model = model
        model.write_bytes(b"one")

    @property
    def label(self) -> str:
        """Of the file as it is now."""
        return f"m-{file_state(self.model)[:8]}"

    def told(self) -> set[str]:
        """What clients of the replicas that are ready are told."""
        table = self.table()
        return {
            table.versions[entry.version].label
            for entry in table.entries
            if entry.state is ReplicaState.READY
        }


async def test_a_deployment_of_a_file_that_was_changed_rolls_out(tmp_path: Path) -> None:
    world = InPlace(tmp_path / "m.gguf")
    spec = deployment(model=str(world.model))
    await world.admin.deploy(spec)
    await world.run(2)
    before = world.label
    assert world.told() == {before}
    assert (await world.admin.deploy(spec)).rollout is None
    world.model.write_bytes(b"two")
    view = await world.admin.deploy(spec)
    assert view.rollout is not None
    assert (view.rollout.old, view.rollout.new) == (before, world.label)
    await world.run(3)
    assert world.told() == {world.label} != {before}
    assert (await world.admin.deploy(spec)).generation == view.generation  # it is what runs


async def test_a_replica_that_is_started_again_never_takes_other_files_for_its_own(tmp_path: Path) -> None:
    world = InPlace(tmp_path / "m.gguf")
    scaling = ScalingPolicy(min_replicas=2, max_replicas=2)
    await world.admin.deploy(deployment(model=str(world.model), scaling=scaling))
    await world.run(2)
    before = world.label
    world.model.write_bytes(b"two")
    world.placement.kill("m-0")
    await world.run(2)
    assert world.told() == {before}
    assert world.states() == ["dead", "ready"]
    (dead,) = (entry for entry in world.table().entries if entry.state is ReplicaState.DEAD)
    assert dead.reason.startswith(f"{world.model} has changed since it was deployed: start a rollout")
    view = await world.admin.start_rollout("m")
    assert (view.old, view.new) == (before, world.label)
    await world.run(5)
    assert world.told() == {world.label}
    assert world.states() == ["ready", "ready"]


async def test_the_old_files_put_back_are_taken_up(tmp_path: Path) -> None:
    world = InPlace(tmp_path / "m.gguf")
    await world.admin.deploy(deployment(model=str(world.model)))
    await world.run(2)
    before = world.label
    kept = world.model.rename(tmp_path / "kept")
    world.model.write_bytes(b"two")
    world.placement.kill("m-0")
    await world.run(2)
    assert (await world.admin.deployment("m")).status == "failed"
    kept.rename(world.model)
    await world.run(31)
    assert world.told() == {before}


async def test_new_files_take_over_from_what_cannot_be_started_any_more(tmp_path: Path) -> None:
    """Every strategy, from a replica that is dead, and from a sleeping deployment."""
    for strategy in ("surge", "canary", "swap"):
        for scaling in (ScalingPolicy(), TO_ZERO):
            world = InPlace(tmp_path / "m.gguf")
            rollout = RolloutPolicy(strategy=strategy, steps=(0.5,), step_s=1.0, min_requests=1)
            spec = deployment(model=str(world.model), scaling=scaling, rollout=rollout)
            await world.admin.deploy(spec)
            await world.run(2)
            world.model.write_bytes(b"two")
            if scaling is not TO_ZERO:
                world.placement.kill("m-0")
            await world.run(2)
            await world.admin.deploy(spec)
            await world.run(1)
            if strategy == "canary":
                await world.admin.promote("m")
            world.say("m", waiting=1)
            await world.run(5)
            view = await world.admin.rollout("m")
            assert (view.phase, view.new) == ("done", world.label), strategy
            assert world.told() == {world.label}
