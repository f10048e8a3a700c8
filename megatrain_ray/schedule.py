"""A training step as data: build, check, measure, simulate and print the actions that the pipeline runs (pure).

The list is in submission order. An action reads and writes named values (object references at run time), starts when
its values are there and its actor has finished earlier actions, and is *submitted* only after the actions in ``after``
have completed: that is how lookahead, and with it memory, is bounded. ``prefetch_depth`` 0 makes every action wait for
the one before it: the serial reference, through the same code.

One step of three decoder layers, clipping on, all in RAM (U: the previous step's update, which emits new weights)::

    U0 L0 F0 | U1 L1 F1 | U2 L2 F2 | U3 L3 F3 | U4 L4 H | L3 B3 | L2 B2 G4 G3 | L1 B1 G2 | L0 B0 G1 | G0

F is forward, H head and loss, B backward, L load onto the device, G gradient off the device. What stands before a bar
runs while the worker still computes what stands before the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatrain_ray.layout import PART_NUMEL

__all__ = [
    "Action",
    "Op",
    "Schedule",
    "Simulation",
    "StepShape",
    "Tier",
    "Value",
    "build_flush",
    "build_import",
    "build_step",
]


class Tier(StrEnum):
    """Who executes an action; each runs its actions in submission order, except the store, which is concurrent."""

    STORE = "nvme_store"
    OPTIMIZER = "cpu_optimizer"
    WORKER = "gpu_worker"


class Op(StrEnum):
    """What an action does. The value is the method's name on the tier's class."""

    READ = "read"  # store: file -> state
    READ_MASTER = "read_master"  # store: file -> master
    READ_GRADS = "read_grads"  # store: file -> grads
    WRITE = "write"  # store: state -> file
    WRITE_GRADS = "write_grads"  # store: grads -> file
    SAVE = "save"  # store: snapshot, or without one its own file -> checkpoint
    KEEP = "keep"  # optimizer: state -> RAM
    UPDATE = "update"  # optimizer: grads -> master and moments, in RAM
    UPDATE_EMIT = "update_emit"  # the same, and the new compute weights
    UPDATE_PAGED = "update_paged"  # optimizer: state, grads -> new state
    UPDATE_PAGED_EMIT = "update_paged_emit"  # the same, and the new compute weights
    PARAMS = "params"  # optimizer: master in RAM -> compute weights
    CAST = "cast"  # optimizer: master -> compute weights
    SNAPSHOT = "snapshot"  # optimizer: master and moments in RAM -> snapshot
    IMPORT = "import_layer"  # worker: where the run starts -> state
    BEGIN = "begin"  # worker: takes the step's micro-batches
    LOAD = "load"  # worker: compute weights, host -> device
    FORWARD = "forward"  # worker: all micro-batches through one layer
    HEAD = "head"  # worker: final norm, output projection, loss, and their gradient
    EVALUATE = "evaluate"  # worker: the same without gradient
    BACKWARD = "backward"  # worker: recompute and gradient of one layer
    GRADS = "grads"  # worker: summed fp32 gradient, device -> host


TIER_OF: Mapping[Op, Tier] = {
    **dict.fromkeys((Op.READ, Op.READ_MASTER, Op.READ_GRADS, Op.WRITE, Op.WRITE_GRADS, Op.SAVE), Tier.STORE),
    **dict.fromkeys(
        (Op.KEEP, Op.UPDATE, Op.UPDATE_EMIT, Op.UPDATE_PAGED, Op.UPDATE_PAGED_EMIT, Op.PARAMS, Op.CAST, Op.SNAPSHOT),
        Tier.OPTIMIZER,
    ),
    **dict.fromkeys(
        (Op.IMPORT, Op.BEGIN, Op.LOAD, Op.FORWARD, Op.HEAD, Op.EVALUATE, Op.BACKWARD, Op.GRADS), Tier.WORKER
    ),
}
UPDATES = frozenset((Op.UPDATE, Op.UPDATE_EMIT, Op.UPDATE_PAGED, Op.UPDATE_PAGED_EMIT))
COMPUTE = frozenset((Op.FORWARD, Op.HEAD, Op.EVALUATE, Op.BACKWARD))


class Value(NamedTuple):
    """Something in the object store; ``kind``: params, grads, master, state, new_state or snapshot.

    Master and state of a large layer travel in parts, numbered by ``part``; 0 is also the whole of another layer.
    """

    kind: str
    layer: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind}[{self.layer}.{self.part}]" if self.part else f"{self.kind}[{self.layer}]"


class Action(NamedTuple):
    """One remote call.

    Attributes:
        op: What to do.
        layer: Index in the stream.
        reads: Values passed as arguments, in this order.
        writes: Values that the call returns, in this order.
        frees: Values dropped once the call has completed.
        after: Positions in the list of actions that must have completed before this one is submitted.
        part: Of the layer's state; see `Value`.
    """

    op: Op
    layer: int
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()
    after: tuple[int, ...] = ()
    part: int = 0

    @property
    def tier(self) -> Tier:
        return TIER_OF[self.op]

    def __str__(self) -> str:
        return f"{self.op}({self.layer}.{self.part})" if self.part else f"{self.op}({self.layer})"


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the builder must know about model and plan.

    Attributes:
        numels: Elements of each layer's flat buffer, in stream order; a head whose weights are all tied has 0.
        head_reads: Layers whose weights the head uses.
        paged: Layers whose masters and moments live in the store; the others are in the optimizer's RAM.
        spilled_grads: Layers whose gradients wait for the norm in the store instead of the object store.
        prefetch_depth: How many layers are fetched ahead of the one that computes; 0 is serial.
        deferred: Updates wait for the global norm until just before the next forward (clipping); else they run as
            gradients arrive.
        retain_params: Compute weights stay in the object store from forward to backward instead of being emitted twice.
        keep_graph: The last so many decoder layers keep their graph (and weights) on the device instead of recomputing.
        cast: The compute dtype is not float32, so a master must be cast before it is loaded.
        part_numel: Longest part in which state travels between store and optimizer.
    """

    numels: tuple[int, ...]
    head_reads: tuple[int, ...]
    paged: frozenset[int] = frozenset()
    spilled_grads: frozenset[int] = frozenset()
    prefetch_depth: int = 1
    deferred: bool = True
    retain_params: bool = True
    keep_graph: int = 0
    cast: bool = False
    part_numel: int = PART_NUMEL

    def __post_init__(self) -> None:
        if len(self.numels) < 3:
            raise ValueError(f"a stream has embed, at least one decoder layer and head; got {len(self.numels)} layers")
        if self.prefetch_depth < 0 or not 0 <= self.keep_graph <= len(self.numels) - 2:
            raise ValueError("prefetch_depth must not be negative, keep_graph at most the number of decoder layers")
        if not self.deferred and not self.retain_params:
            # A worker that dies after some updates is replayed from the weights of the step's start: they must exist.
            raise ValueError("updates as gradients arrive need retain_params, so that a step can be replayed")

    @property
    def embed(self) -> int:
        return 0

    @property
    def head(self) -> int:
        return len(self.numels) - 1

    @property
    def trainable(self) -> tuple[int, ...]:
        """Layers that own parameters."""
        return tuple(index for index, numel in enumerate(self.numels) if numel)

    @property
    def resident(self) -> tuple[int, ...]:
        """Trainable layers whose masters and moments are in the optimizer's RAM."""
        return tuple(index for index in self.trainable if index not in self.paged)

    def parts(self, layer: int) -> range:
        """Numbers of the parts in which a layer's state travels."""
        return range(-(-self.numels[layer] // self.part_numel))


class Schedule(tuple[Action, ...]):
    """A checked list of actions."""

    __slots__ = ()

    def table(self, bad: int | None = None) -> str:
        """The list for people: one action a line, the offending one marked."""
        lines = []
        for index, action in enumerate(self):
            mark = ">>" if index == bad else "  "
            reads = ", ".join(map(str, action.reads)) or "-"
            writes = ", ".join(map(str, action.writes)) or "-"
            after = " ".join(map(str, action.after)) or "-"
            lines.append(
                f"{mark}{index:5d}  {action.tier:<13}  {action!s:<22} {reads:<28} -> {writes:<26} after {after}"
            )
        return "\n".join(lines)

    def check(self, present: Iterable[Value] = ()) -> frozenset[Value]:
        """Checks that every read follows its write, and nothing is used after it was freed or written twice.

        Args:
            present: Values that exist before the first action.

        Returns:
            The values that exist after the last action.

        Raises:
            ValueError: With the table and the bad action marked.
        """
        alive = set(present)
        for index, action in enumerate(self):
            faults = [f"reads {value}, which does not exist" for value in action.reads if value not in alive]
            faults += [f"writes {value}, which exists" for value in action.writes if value in alive]
            alive.update(action.writes)
            faults += [f"frees {value}, which does not exist" for value in action.frees if value not in alive]
            late = [other for other in action.after if not 0 <= other < index]
            faults += [f"waits for action {other}, which is not before it" for other in late]
            if faults:
                raise ValueError(f"action {index} {action} {faults[0]}\n{self.table(bad=index)}")
            alive.difference_update(action.frees)
        return frozenset(alive)

    def peak_bytes(self, bytes_of: Callable[[Value], int], present: Iterable[Value] = ()) -> int:
        """Upper bound of the bytes that the values need at once.

        A value counts from the submission of its writer until the submitter *knows* that the action which frees it has
        completed, from the waits so far and from the order in which a serial tier works.
        """
        alive = {value: bytes_of(value) for value in present}
        total = peak = sum(alive.values())
        complete: set[int] = set()
        before = self._predecessors()
        for action in self:
            stack = list(action.after)
            while stack:
                done = stack.pop()
                if done in complete:
                    continue
                complete.add(done)
                stack.extend(before[done])
                for value in self[done].frees:
                    total -= alive.pop(value, 0)
            for value in action.writes:
                alive[value] = bytes_of(value)
                total += alive[value]
            peak = max(peak, total)
        return peak

    def _predecessors(self) -> list[tuple[int, ...]]:
        """For each action, those complete when it is: writers of what it reads, its serial tier's last, its waits."""
        writers: dict[Value, int] = {}
        last_of: dict[Tier, int] = {}
        before: list[tuple[int, ...]] = []
        for index, action in enumerate(self):
            chain = [writers[value] for value in action.reads if value in writers]
            if action.tier is not Tier.STORE:
                chain += [last_of[action.tier]] if action.tier in last_of else []
                last_of[action.tier] = index
            before.append((*chain, *action.after))
            writers.update(dict.fromkeys(action.writes, index))
        return before

    def simulate(self, duration_s: Callable[[Action], float], *, store_lanes: int = 1) -> Simulation:
        """Runs the list on a clock.

        Args:
            duration_s: Seconds that one action takes on its tier when nothing else disturbs it.
            store_lanes: How many store actions run at once at full speed each.

        Returns:
            Start and end of every action, in seconds.
        """
        ready: dict[Value, float] = {}
        free_at: dict[Tier, list[float]] = {tier: [0.0] * (store_lanes if tier is Tier.STORE else 1) for tier in Tier}
        ends: list[float] = []
        starts: list[float] = []
        submitted = 0.0
        for action in self:
            submitted = max([submitted, *(ends[other] for other in action.after)])
            lanes = free_at[action.tier]
            lane = min(range(len(lanes)), key=lanes.__getitem__)
            start = max([submitted, lanes[lane], *(ready.get(value, 0.0) for value in action.reads)])
            end = start + duration_s(action)
            lanes[lane] = end
            starts.append(start)
            ends.append(end)
            for value in action.writes:
                ready[value] = end
        return Simulation(self, tuple(starts), tuple(ends))


@dataclass(frozen=True, slots=True)
class Simulation:
    """When each action of a schedule runs.

    Attributes:
        schedule: The actions.
        starts_s: Start of each action, in seconds from the first submission.
        ends_s: End of each action.
    """

    schedule: Schedule
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return max(self.ends_s, default=0.0)

    def busy_s(self, tier: Tier) -> float:
        """Seconds in which the tier works, all lanes added up."""
        return sum(
            end - start
            for action, start, end in zip(self.schedule, self.starts_s, self.ends_s, strict=True)
            if action.tier is tier
        )


class _Builder:
    """Appends actions; knows where each value is and what lookahead allows."""

    def __init__(self, shape: StepShape, *, pending: bool, save: bool) -> None:
        self.shape = shape
        self.actions: list[Action] = []
        self.to_update = set(shape.trainable) if pending else set[int]()
        self.to_save = list(shape.trainable) if save else []
        self.emitted: set[int] = set()
        self.written: dict[int, int] = {}  # position of the last write of each layer's new state
        self.saves: dict[int, int] = {}  # position of each layer's save, in their order
        self.present = [Value("grads", layer) for layer in sorted(self.to_update) if layer not in shape.spilled_grads]

    def add(
        self,
        op: Op,
        layer: int,
        reads: Sequence[Value] = (),
        writes: Sequence[Value] = (),
        frees: Sequence[Value] = (),
        after: Iterable[int] = (),
        part: int = 0,
    ) -> int:
        """Appends an action and returns its position."""
        index = len(self.actions)
        waits = {index - 1} if self.shape.prefetch_depth == 0 and index else set(after)
        self.actions.append(Action(op, layer, tuple(reads), tuple(writes), tuple(frees), tuple(sorted(waits)), part))
        return index

    def build(self) -> Schedule:
        schedule = Schedule(self.actions)
        schedule.check(self.present)
        return schedule

    def free_with_last(self, values: Iterable[Value]) -> None:
        last = self.actions[-1]
        self.actions[-1] = last._replace(frees=(*last.frees, *values))

    def settled(self, layer: int) -> list[int]:
        """The write, if there is one, after which a layer's file is of this step and its old gradient is used up."""
        return [self.written[layer]] if layer in self.written else []

    def update(self, layer: int, *, emit: bool, after: Iterable[int] = ()) -> int:
        """Reads what is not in RAM, updates, writes back. Returns the position of the last action."""
        shape = self.shape
        grads = Value("grads", layer)
        emitted = [Value("params", layer)] if emit else []
        self.to_update.discard(layer)
        if layer in shape.spilled_grads:
            self.add(Op.READ_GRADS, layer, (), [grads], after=after)
        if layer not in shape.paged:
            return self.add(Op.UPDATE_EMIT if emit else Op.UPDATE, layer, [grads], emitted, [grads], after)
        op = Op.UPDATE_PAGED_EMIT if emit else Op.UPDATE_PAGED
        written: list[int] = []
        for part in shape.parts(layer):
            last = part == shape.parts(layer)[-1]
            state, new_state = Value("state", layer, part), Value("new_state", layer, part)
            self.add(Op.READ, layer, (), [state], after=[*after, *written[-2:-1]], part=part)
            # Weights leave with the last part. Until the new state is written, a replay needs the gradient again.
            read_again = [grads] if last and layer in shape.spilled_grads else []
            used_up = [grads] if last and layer not in shape.spilled_grads else []
            emits = emitted if last else []
            self.add(op, layer, [state, grads], [*emits, new_state], [state, *read_again], after, part)
            # The last one makes the others count: they are there.
            before = written if last else ()
            written.append(self.add(Op.WRITE, layer, [new_state], (), [new_state, *used_up], before, part))
        self.written[layer] = written[-1]
        return written[-1]

    def emit(self, layer: int, after: Iterable[int]) -> int | None:
        """Brings ``params`` of a layer into the object store unless there. Returns the position of the write-back."""
        if layer in self.emitted:
            return None
        self.emitted.add(layer)
        if layer in self.to_update:
            last = self.update(layer, emit=True, after=after)
            return last if layer in self.shape.paged else None
        params = Value("params", layer)
        after = [*after, *self.settled(layer)]
        if layer not in self.shape.paged:
            self.add(Op.PARAMS, layer, (), [params], after=after)
        elif self.shape.cast:
            cast: list[int] = []
            for part in self.shape.parts(layer):
                master = Value("master", layer, part)
                emits = [params] if part == self.shape.parts(layer)[-1] else []
                self.add(Op.READ_MASTER, layer, (), [master], after=[*after, *cast[-2:-1]], part=part)
                cast.append(self.add(Op.CAST, layer, [master], emits, [master], after, part))
        else:
            self.add(Op.READ_MASTER, layer, (), [params], after=after)
        return None

    def save(self, layer: int) -> None:
        """Puts a layer's present state into the checkpoint, with at most two of them on their way."""
        self.to_save.remove(layer)
        bound = list(self.saves.values())[-2:-1]
        if layer in self.shape.paged:
            self.saves[layer] = self.add(Op.SAVE, layer, after=[*bound, *self.settled(layer)])
        else:
            snapshot = Value("snapshot", layer)
            self.add(Op.SNAPSHOT, layer, (), [snapshot], after=bound)
            self.saves[layer] = self.add(Op.SAVE, layer, [snapshot], (), [snapshot])

    def drain(self, layer: int) -> int:
        """Takes a gradient off the device to where it waits, or straight into the update. Returns the last position."""
        grads = Value("grads", layer)
        drained = self.add(Op.GRADS, layer, (), [grads])
        if not self.shape.deferred:
            # A replay could no longer save what the update has changed.
            if layer in self.to_save:
                self.save(layer)
            return self.update(layer, emit=False, after=[self.saves[layer]] if layer in self.saves else [])
        if layer in self.shape.spilled_grads:
            # It takes the place of the gradient that a replay needs until the layer's new state is written.
            return self.add(Op.WRITE_GRADS, layer, [grads], (), [grads], after=self.settled(layer))
        return drained


def build_step(shape: StepShape, *, pending: bool, save: bool = False, train: bool = True) -> Schedule:
    """One optimizer step, or one evaluation batch.

    Args:
        shape: Model and plan.
        pending: The previous step's updates are still to be done (``grads`` of every layer are present, or spilled).
        save: Every layer's state after those updates also goes into a checkpoint, while the step goes on.
        train: False: forward and loss only.

    Returns:
        The checked schedule.
    """
    builder = _Builder(shape, pending=pending, save=save)
    head, lookahead = shape.head, max(shape.prefetch_depth, 1)
    kept = frozenset(range(head - shape.keep_graph, head)) if train else frozenset[int]()
    uses = [(Op.FORWARD, layer) for layer in range(head)] + [(Op.HEAD if train else Op.EVALUATE, head)]
    uses += [(Op.BACKWARD, layer) for layer in range(head - 1, -1, -1)] if train else []
    needs = [_weights_of(op, layer, shape, kept) for op, layer in uses]
    # A layer that keeps its graph is loaded once; on a CPU its weights stay where the object store has them.
    holds = [(layer,) if op is Op.BACKWARD else needs[use] for use, (op, layer) in enumerate(uses)]
    last_use = {layer: use for use, layers in enumerate(holds) for layer in layers}
    use_at: list[int] = []
    fed_for: dict[int, int] = {}  # the last use, so far, that loads a layer
    settled: dict[int, list[int]] = {}  # what must have left the object store before lookahead goes on, by use

    def feed(use: int) -> None:
        if use >= len(uses):
            return
        done = use - 1 - lookahead
        # A use's gradient is drained while the next one runs, after that one's lookahead: it counts one use later.
        after = [use_at[done], *settled.get(done, []), *settled.get(done - 1, [])] if done >= 0 else []
        for layer in needs[use]:
            written = builder.emit(layer, after)
            if written is not None:
                settled.setdefault(use, []).append(written)
            fed_for[layer] = use
            builder.add(Op.LOAD, layer, [Value("params", layer)], after=after)

    def free(use: int) -> list[Value]:
        """Compute weights that nobody needs after this use, or that are cheaper to emit again than to keep."""
        final = {layer for layer in holds[use] if last_use[layer] == use and (shape.deferred or not train)}
        waits = kept if uses[use][0] is Op.FORWARD else frozenset[int]()
        again = {layer for layer in needs[use] if fed_for[layer] == use and not shape.retain_params} - waits
        gone = sorted(final | again)
        builder.emitted.difference_update(gone)
        return [Value("params", layer) for layer in gone]

    def drain(use: int) -> None:
        op, layer = uses[use]
        if op is Op.BACKWARD or (op is Op.HEAD and shape.numels[layer]):
            settled.setdefault(use, []).append(builder.drain(layer))

    builder.add(Op.BEGIN, 0)
    for use in range(lookahead):
        feed(use)
    for use, (op, layer) in enumerate(uses):
        # Layers that keep their graph load nothing that could wait for their gradients to leave.
        use_at.append(builder.add(op, layer, (), (), free(use), after=settled.get(use - 2 - lookahead, [])))
        feed(use + lookahead)
        if use:
            drain(use - 1)
        ready = [layer for layer in builder.to_save if layer not in builder.to_update]
        if len(ready) > 1 + lookahead:  # the last ones are still being written
            builder.save(ready[0])
    for layer in list(builder.to_save):
        builder.save(layer)
    if train:
        drain(len(uses) - 1)
    # With updates as gradients arrive, the step's weights stay until its end: a replay starts from them.
    builder.free_with_last(Value("params", layer) for layer in sorted(builder.emitted))
    return builder.build()


def build_import(shape: StepShape) -> Schedule:
    """Every layer from where the run starts into the store, and into RAM if it lives there; two on their way."""
    builder = _Builder(shape, pending=False, save=False)
    last: list[int] = []
    for layer in shape.trainable:
        for part in shape.parts(layer):
            state = Value("state", layer, part)
            builder.add(Op.IMPORT, layer, (), [state], after=last[-2:-1], part=part)
            if layer not in shape.paged:
                builder.add(Op.KEEP, layer, [state], part=part)
            before = last[-part:] if part and part == shape.parts(layer)[-1] else ()
            last.append(builder.add(Op.WRITE, layer, [state], (), [state], before, part))
    return builder.build()


def build_flush(shape: StepShape, *, pending: bool, save: bool = False) -> Schedule:
    """The updates that wait for a next step, without that step, and with ``save`` every layer into a checkpoint."""
    builder = _Builder(shape, pending=pending, save=save)
    last: list[int] = []
    for layer in shape.trainable:
        after = last[-1 - shape.prefetch_depth :][:1] if len(last) > shape.prefetch_depth else []
        if layer in builder.to_update:
            builder.update(layer, emit=False, after=after)
        if save and layer:  # this one is still being written
            builder.save(builder.to_save[0])
        last.append(len(builder.actions) - 1)
    for layer in list(builder.to_save):
        builder.save(layer)
    return builder.build()


def _weights_of(op: Op, layer: int, shape: StepShape, kept: frozenset[int]) -> tuple[int, ...]:
    """Layers to load before a use."""
    if op in (Op.HEAD, Op.EVALUATE):
        return tuple(index for index in shape.head_reads if shape.numels[index])
    return () if op is Op.BACKWARD and layer in kept else (layer,)
