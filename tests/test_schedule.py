"""The schedule's rules, on data alone."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from megatrain_ray.schedule import (
    COMPUTE,
    UPDATES,
    Action,
    Op,
    Schedule,
    StepShape,
    Tier,
    Value,
    build_flush,
    build_import,
    build_step,
)

NUMELS = (4096, 1024, 1024, 1024, 2048)


def shapes() -> list[StepShape]:
    """Every combination that a plan can ask for, on three decoder layers."""
    combinations = itertools.product((0, 1, 2, 3), (True, False), (True, False), (0, 2), (True, False))
    paged = (frozenset[int](), frozenset({0, 2}), frozenset(range(5)))
    tied = ((4,), (0, 4))
    return [
        StepShape(NUMELS, head_reads, pages, pages if deferred else frozenset(), depth, deferred, retain, keep, cast)
        for (depth, deferred, retain, keep, cast), pages, head_reads in itertools.product(combinations, paged, tied)
        if deferred or retain
    ]


@pytest.mark.parametrize("save", [False, True])
def test_a_step_uses_every_layer_in_order_and_carries_only_gradients(save: bool) -> None:
    for shape in shapes():
        schedule = build_step(shape, pending=shape.deferred, save=save)
        compute = [(action.op, action.layer) for action in schedule if action.op in COMPUTE]
        forward = [(Op.FORWARD, layer) for layer in range(4)]
        assert compute == [*forward, (Op.HEAD, 4), *((Op.BACKWARD, layer) for layer in (3, 2, 1, 0))]
        carried = [Value("grads", layer) for layer in range(5) if layer not in shape.spilled_grads]
        assert schedule.check(carried if shape.deferred else ()) == (set(carried) if shape.deferred else set())
        assert sorted(action.layer for action in schedule if action.op in UPDATES) == [0, 1, 2, 3, 4]
        assert sorted(action.layer for action in schedule if action.op is Op.SAVE) == ([0, 1, 2, 3, 4] if save else [])


def test_weights_are_loaded_before_each_use() -> None:
    for shape in shapes():
        on_device: Counter[int] = Counter()
        kept = set(range(4 - shape.keep_graph, 4))
        for action in build_step(shape, pending=shape.deferred):
            if action.op is Op.LOAD:
                on_device[action.layer] += 1
            elif action.op is Op.HEAD:
                assert all(on_device[layer] for layer in shape.head_reads)
                on_device -= Counter(shape.head_reads)
            elif action.op in (Op.FORWARD, Op.BACKWARD):
                assert on_device[action.layer]
                if action.op is Op.BACKWARD or action.layer not in kept:
                    on_device -= Counter([action.layer])
        assert not on_device


def test_a_checkpoint_gets_the_state_before_the_step_updates_it_again() -> None:
    shape = StepShape(NUMELS, (4,), frozenset({1}), deferred=False)
    schedule = build_step(shape, pending=False, save=True)
    for layer in range(5):
        taken = next(i for i, a in enumerate(schedule) if a.op is Op.SAVE and a.layer == layer)
        updated = next(i for i, a in enumerate(schedule) if a.op in UPDATES and a.layer == layer)
        assert taken < updated


def test_a_slow_store_meets_no_file_too_early() -> None:
    """The store works on many calls at once: only waits keep a read behind the write of the same file."""

    def duration_s(action: Action) -> float:
        return 1000.0 if action.op in (Op.WRITE, Op.SAVE) else 1.0

    small = StepShape((4096, 1024, 2048), (2,), frozenset(range(3)), prefetch_depth=3, deferred=False)
    for shape, save in itertools.product((*shapes(), small), (False, True)):
        ran = build_step(shape, pending=shape.deferred, save=save).simulate(duration_s, store_lanes=100)
        written: dict[int, float] = {}
        saved: dict[int, float] = {}
        for action, start_s, end_s in zip(ran.schedule, ran.starts_s, ran.ends_s, strict=True):
            layer = action.layer
            if action.op in (Op.READ_MASTER, Op.SAVE):  # of the newest state
                assert start_s >= written.get(layer, 0.0)
            elif action.op is Op.WRITE_GRADS:  # in place of the gradient that made the state being written
                assert start_s >= written.get(layer, 0.0)
            elif action.op in UPDATES:  # of a state that a replay would save
                assert start_s >= saved.get(layer, 0.0)
            elif action.op is Op.WRITE:
                written[layer] = end_s
            if action.op is Op.SAVE and not shape.deferred:
                saved[layer] = end_s


def test_depth_zero_waits_for_each_action() -> None:
    schedule = build_step(StepShape(NUMELS, (4,), prefetch_depth=0), pending=True)
    assert all(action.after == ((index - 1,) if index else ()) for index, action in enumerate(schedule))


def test_lookahead_bounds_the_object_store() -> None:
    def bytes_of(value: Value) -> int:
        return 1 if value.kind == "params" else 0

    for depth in (1, 2, 3):
        shape = StepShape((1024,) * 42, (41,), prefetch_depth=depth, retain_params=False)
        assert build_step(shape, pending=True).peak_bytes(bytes_of) <= depth + 2
    retained = StepShape((1024,) * 42, (41,), prefetch_depth=1)
    assert 41 <= build_step(retained, pending=True).peak_bytes(bytes_of) <= 42


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_state_of_a_large_layer_travels_in_parts(cast: bool, deferred: bool) -> None:
    """However large a layer, no more than a few parts of its state are on their way; its weights leave as a whole."""
    every = frozenset(range(5))
    shape = StepShape(
        (8192, 8192, 8192, 8192, 8192), (4,), every, every if deferred else frozenset(), deferred=deferred,
        retain_params=not deferred, cast=cast, part_numel=1000,
    )  # fmt: skip
    assert shape.parts(0) == range(9)
    for schedule in (
        build_step(shape, pending=deferred, save=True),
        build_flush(shape, pending=True, save=True),
        build_import(shape),
    ):
        for kind in ("state", "new_state", "master"):
            assert schedule.peak_bytes(lambda value, kind=kind: int(value.kind == kind)) <= 4
    step = build_step(shape, pending=deferred, save=True)
    for layer in every:
        for op in (Op.READ, Op.WRITE):
            assert [a.part for a in step if a.op is op and a.layer == layer] == list(range(9))
        updates = [a for a in step if a.op in UPDATES and a.layer == layer]
        emitted = [Value("params", layer) in a.writes for a in updates]
        assert emitted == [False] * 8 + [deferred]
        writes = [i for i, a in enumerate(step) if a.op is Op.WRITE and a.layer == layer]
        saved = next(i for i, a in enumerate(step) if a.op is Op.SAVE and a.layer == layer)
        assert set(step[writes[-1]].after) == set(writes[:-1])  # the last part makes the others count
        assert (writes[-1] in step[saved].after) if deferred else saved < writes[0]


def test_evaluation_touches_no_optimizer_state() -> None:
    for shape in shapes():
        schedule = build_step(shape, pending=False, train=False)
        assert not {a.op for a in schedule} & (UPDATES | {Op.WRITE, Op.BACKWARD, Op.GRADS})
        assert schedule.check() == frozenset()


def test_flush_updates_and_saves_every_layer_once() -> None:
    for shape, save in itertools.product(shapes(), (True, False)):
        schedule = build_flush(shape, pending=True, save=save)
        assert [a.layer for a in schedule if a.op in UPDATES] == [0, 1, 2, 3, 4]
        assert [a.layer for a in schedule if a.op is Op.SAVE] == ([0, 1, 2, 3, 4] if save else [])
        carried = [Value("grads", layer) for layer in range(5) if layer not in shape.spilled_grads]
        assert schedule.check(carried) == frozenset()


def test_an_empty_head_is_never_stored_or_updated() -> None:
    shape = StepShape((*NUMELS[:4], 0), (0,))
    schedule = build_step(shape, pending=True, save=True)
    assert {a.op for a in schedule if a.layer == 4} == {Op.HEAD}


@pytest.mark.parametrize(
    ("actions", "fault"),
    [
        ([Action(Op.LOAD, 1, (Value("params", 1),))], "reads params[1], which does not exist"),
        ([Action(Op.PARAMS, 1, (), (Value("params", 1),))] * 2, "writes params[1], which exists"),
        ([Action(Op.LOAD, 1, (), (), (Value("params", 1),))], "frees params[1], which does not exist"),
        ([Action(Op.BEGIN, 0, after=(0,))], "waits for action 0, which is not before it"),
    ],
)
def test_a_broken_list_is_shown_with_the_bad_action_marked(actions: list[Action], fault: str) -> None:
    with pytest.raises(ValueError, match="action") as caught:
        Schedule(actions).check()
    assert fault in str(caught.value)
    assert any(line.startswith(">>") for line in str(caught.value).splitlines())


def test_simulation_overlaps_updates_with_forward() -> None:
    def duration_s(action: Action) -> float:
        return {Tier.OPTIMIZER: 1.0, Tier.WORKER: 0.0, Tier.STORE: 0.0}[action.tier] + (action.op in COMPUTE) * 2.0

    serial = build_step(StepShape(NUMELS, (4,), prefetch_depth=0), pending=True).simulate(duration_s)
    ahead = build_step(StepShape(NUMELS, (4,), prefetch_depth=1), pending=True).simulate(duration_s)
    assert serial.step_s == 9 * 2.0 + 5 * 1.0
    assert ahead.step_s == 9 * 2.0 + 1.0  # only the first layer's update is exposed
    assert ahead.busy_s(Tier.OPTIMIZER) == serial.busy_s(Tier.OPTIMIZER) == 5.0


def test_no_lookahead_without_retained_weights_when_updates_are_eager() -> None:
    with pytest.raises(ValueError, match="replayed"):
        StepShape(NUMELS, (4,), deferred=False, retain_params=False)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("keep", [0, 20])
def test_spilled_gradients_leave_before_lookahead_goes_on(depth: int, keep: int) -> None:
    numels, every = (1024,) * 42, frozenset(range(42))
    shape = StepShape(numels, (41,), every, every, depth, retain_params=False, keep_graph=keep)
    schedule = build_step(shape, pending=True)
    assert schedule.peak_bytes(lambda value: int(value.kind == "grads")) <= depth + 4


def test_weights_of_layers_that_keep_their_graph_are_held_from_forward_to_backward() -> None:
    kept = StepShape(NUMELS, (4,), retain_params=False, keep_graph=2)
    for action in build_step(kept, pending=True):
        freed = [value.layer for value in action.frees if value.kind == "params"]
        if action.op in (Op.FORWARD, Op.BACKWARD) and action.layer in (2, 3):
            assert freed == ([action.layer] if action.op is Op.BACKWARD else [])
