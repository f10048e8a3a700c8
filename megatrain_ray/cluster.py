"""Starts or attaches Ray, turns the tiers' classes into actors, calls them, and shuts down what it started.

The classes are plain Python. Around each stands one wrapper with a remote method `run`, which returns the layers that a
method of the tier produced, each as an object of its own, and a small `Receipt` that travels inline: the driver waits
on receipts and never touches a tensor.
"""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Ray replaces a loopback node address by the host's own and then listens on all interfaces; with this switch, which it
# has for laptops and reads when it is imported, it does not.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Freed values leave the object store within milliseconds instead of a second: their pages, warm, serve the next ones.
os.environ.setdefault("RAY_free_objects_period_milliseconds", "20")
# The store is as large as the plan says: being 80% full is no reason to copy values to disk.
os.environ.setdefault("RAY_object_spilling_threshold", "1.0")
# Ray remembers this many past tasks for its dashboard: of the last steps, not hundreds of MB of a long run's.
os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")

# The plan keeps memory in bounds; Ray's monitor, which kills processes at 95%, is only the last resort.
os.environ.setdefault("RAY_memory_usage_threshold", "0.98")

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatrain_ray.errors import ActorLostError, MegatrainError, PlanError, StalledError
from megatrain_ray.machine import openmp_environment
from megatrain_ray.observe.logs import NOWHERE, ActorLog, Place
from megatrain_ray.observe.memory import PeakWatch, RayMemory
from megatrain_ray.packed import PackedLayer
from megatrain_ray.schedule import Tier

__all__ = ["CLASS_NAME", "MAX_ATTEMPTS", "Call", "Cluster", "Receipt", "TierSpec"]

MAX_ATTEMPTS = 3
"""Deaths at one place after which it is no accident."""

START_DEADLINE_S = 180.0
"""Longest start of an actor: imports from a cold disk, on a machine that is busy."""

GPU_PATIENCE_S = 20.0
"""Ray takes a moment to notice that a run before this one has given its GPU back."""

_SESSION_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")

CLASS_NAME = {Tier.STORE: "NvmeStore", Tier.OPTIMIZER: "CpuOptimizer", Tier.WORKER: "GpuWorker"}

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""Colors, in Ray's messages."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one remote call reports.

    Attributes:
        started_s, ended_s: Seconds since the epoch, on the actor's clock (one host: the driver's too).
        info: What the method returned besides layers.
        put_bytes: Bytes of the layers that it returned.
        private_bytes: Most private memory of the process since the receipt before; see `observe.memory`.
        notes: Warnings of the process since the receipt before.
    """

    started_s: float
    ended_s: float
    info: Any
    put_bytes: int
    private_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierSpec:
    """How to make one tier's actor.

    Attributes:
        build: Makes the tier's object, in the actor's process; runs again when the actor restarts.
        num_threads: OpenMP threads of that process.
        num_gpus: GPUs that Ray must grant.
    """

    build: Callable[[], Any]
    num_threads: int
    num_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    """A remote call under way: references to the layers that it returns, and to its receipt."""

    values: tuple[Any, ...]
    receipt: Any


class ReplacedError(Exception):
    """The call was meant for a process that is gone: what it had in memory is not here."""


class _TierActor:
    """The remote side of one tier."""

    label: str
    """Of the class that `Cluster.start` makes: Ray asks for it even of an actor whose constructor has failed."""

    def __init__(self, build: Callable[[], Any], logs: Path, tier: str) -> None:
        self._memory = PeakWatch()
        self._log = ActorLog(logs, tier)
        _logger.info("starts as process %d", os.getpid())
        with _logged("cannot start"):
            self._tier = build()

    def __repr__(self) -> str:
        return self.label

    def pid(self) -> int:
        return os.getpid()

    def run(self, pid: int | None, place: Place, method: str, *arguments: Any) -> Any:
        started_s = self._begin(pid, place)
        with _logged(method):
            return self._report(getattr(self._tier, method)(*arguments), started_s)

    def _begin(self, pid: int | None, place: Place) -> float:
        if pid not in (None, os.getpid()):
            raise ReplacedError(f"meant for process {pid}, came to {os.getpid()}")
        self._log.enter(place)
        return time.time()

    def _report(self, outcome: Any, started_s: float) -> Any:
        """Splits what a method returned into layers and the rest, and adds the receipt."""
        parts = outcome if isinstance(outcome, tuple) else (outcome,)
        layers = tuple(part for part in parts if isinstance(part, PackedLayer))
        rest = [part for part in parts if part is not None and not isinstance(part, PackedLayer)]
        receipt = Receipt(
            started_s,
            time.time(),
            info=rest[0] if rest else None,
            put_bytes=sum(layer.data.nbytes for layer in layers),
            private_bytes=self._memory.take(),
            notes=self._log.take_notes(),
        )
        return (*layers, receipt) if layers else receipt


class _AsyncTierActor(_TierActor):
    """The same for a tier whose methods are coroutines."""

    async def run(self, pid: int | None, place: Place, method: str, *arguments: Any) -> Any:
        started_s = self._begin(pid, place)
        with _logged(method):
            outcome = getattr(self._tier, method)(*arguments)
            return self._report(await outcome if inspect.isawaitable(outcome) else outcome, started_s)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs what goes wrong in an actor; the driver decides what that means."""
    try:
        yield
    except MegatrainError as error:
        _logger.error("%s: %s", what, error)
        raise
    except Exception:
        _logger.exception("%s", what)
        raise


class Cluster:
    """The Ray instance and the three actors of one run.

    Args:
        address: Of a running Ray, or None: ``RAY_ADDRESS`` if set (as under ``ray job submit``), else an own instance.
        object_store_bytes: Size of an own instance's object store; required of one that is attached to.
        dashboard: Whether an own instance has the dashboard, on the loopback interface.
        on_note: Called with a warning, and the tier whose process gave it or ``ray``.

    Raises:
        PlanError: The Ray that is attached to has a smaller object store.
    """

    def __init__(
        self,
        *,
        address: str | None,
        object_store_bytes: int,
        dashboard: bool,
        on_note: Callable[[str, str], None] = lambda source, note: None,
    ) -> None:
        self._handles: dict[Tier, Any] = {}
        self.pids: dict[Tier, int] = {}
        self.restarts: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.owns_ray = False
        self._on_note = on_note
        # For each process that ends Ray prints a paragraph about memory to stdout; the driver says what happened.
        ray._private.worker._worker_logs_enabled = False
        if ray.is_initialized():
            return
        address = address or os.environ.get("RAY_ADDRESS")
        self.owns_ray = address is None
        if address is not None:
            with _own_signals():
                context = ray.init(address=address, log_to_driver=False, configure_logging=False)
            resources: dict[str, float] = ray.cluster_resources()
            size = int(resources.get("object_store_memory", 0))
            if size < object_store_bytes:
                raise PlanError(
                    f"the Ray at {address} has an object store of {size} bytes, this run needs {object_store_bytes}: "
                    f"start Ray with --object-store-memory {object_store_bytes} or more"
                )
            dashboard_url: str | None = context.dashboard_url
            if dashboard_url and not _listens_here_alone(dashboard_url):
                on_note(
                    "ray",
                    f"the dashboard of the Ray at {address} ({dashboard_url}) listens beyond the loopback interface: "
                    "anyone who reaches its port runs code as you; start Ray with --dashboard-host 127.0.0.1",
                )
            return
        with _own_signals():
            ray.init(
                num_cpus=1,  # no task of ours asks for one; Ray starts an idle process for each
                object_store_memory=max(object_store_bytes, 80 << 20),
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=self._short_temp_dir(),
            )

    def _short_temp_dir(self) -> str | None:
        """Where Ray keeps its sockets, whose names may have 107 bytes; None: where it would anyway."""
        wanted = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        if len(os.fsencode(wanted)) <= 107 - _SESSION_BYTES:
            return None
        self._on_note("ray", f"{wanted} is too long for the names of sockets; temporary files go to /tmp/ray")
        return "/tmp/ray"

    def start(self, run: Path, specs: Mapping[Tier, TierSpec], logs: Path) -> None:
        """Makes the actors and waits until each has built its tier.

        Args:
            run: Directory of the run; the actors are called ``NAME/nvme_store`` and so on, after its last part, in a
                namespace that is the whole path: other runs that share Ray may have a directory of that name too.
            specs: What to make.
            logs: Directory for the actors' logs; its parent exists.

        Raises:
            PlanError: Ray has no GPU to give.
        """
        _check_gpus(sum(spec.num_gpus for spec in specs.values()))
        for tier, spec in specs.items():
            base = _AsyncTierActor if tier is Tier.STORE else _TierActor
            label = f"{CLASS_NAME[tier]}({run.name})"
            remote_class: Any = ray.remote(type(CLASS_NAME[tier], (base,), {"__module__": __name__, "label": label}))
            self._handles[tier] = remote_class.options(
                name=f"{run.name}/{tier}",
                namespace=str(run),
                num_cpus=0,
                num_gpus=spec.num_gpus,
                max_restarts=-1,
                max_task_retries=0,  # the pipeline repeats what is safe to repeat
                runtime_env={"env_vars": openmp_environment(spec.num_threads)},
            ).remote(spec.build, logs, str(tier))
        for tier in specs:
            self.wait_alive(tier)

    def revive(self, tier: Tier, deadline_s: float) -> None:
        """Waits until the tier answers; one that says nothing for so long is stopped or hangs, and is replaced."""
        try:
            self.wait_alive(tier, deadline_s)
        except StalledError:
            self.kill(tier)
            self.wait_alive(tier)

    def wait_alive(self, tier: Tier, deadline_s: float = START_DEADLINE_S) -> None:
        """Waits until the tier answers, through restarts.

        Raises:
            StalledError: It did not within ``deadline_s``.
            ActorLostError: Its constructor fails.
        """
        give_up_s = time.monotonic() + deadline_s
        while True:
            try:
                handle = self._handles.get(tier)
                if handle is None:
                    raise ActorLostError(f"{tier}: the run ended before it was back")
                pid = ray.get(handle.pid.remote(), timeout=max(give_up_s - time.monotonic(), 0.1))
                if self.pids.setdefault(tier, pid) != pid:
                    self.pids[tier] = pid
                    self.restarts[tier] += 1
                return
            except GetTimeoutError:
                raise StalledError(
                    f"{tier}: no answer within {deadline_s:.0f} s of its start; look at the machine's load"
                ) from None
            except RayTaskError as error:
                raise _cause(error) from None
            except RayActorError as error:
                if "creation" in str(error) or time.monotonic() > give_up_s:
                    raise ActorLostError(f"{tier} cannot start: {_ANSI.sub('', str(error))}") from None
                time.sleep(0.1)

    def call(
        self,
        tier: Tier,
        method: str,
        *arguments: Any,
        num_values: int = 0,
        name: str | None = None,
        pid: int | None = None,
        place: Place = NOWHERE,
    ) -> Call:
        """Submits one call. Arguments that are references arrive as what they refer to.

        Args:
            tier: Whose.
            method: Of its class.
            *arguments: Of the method.
            num_values: Layers that the method returns.
            name: Of the task, in Ray's timeline and dashboard.
            pid: The process that is meant; another one answers with a `ReplacedError`. None: any.
            place: What the call is for, in the actor's log.
        """
        remote_run: Any = self._handles[tier].run.options(num_returns=num_values + 1, name=name or f"{tier}.{method}")
        references = remote_run.remote(pid, place, method, *arguments)
        if num_values == 0:
            return Call((), references)
        return Call(tuple(references[:-1]), references[-1])

    def ask(self, tier: Tier, method: str, *arguments: Any, deadline_s: float = 60.0) -> Any:
        """Calls, waits, and returns what the method returned besides layers; asks again when the actor died.

        Raises:
            StalledError: No answer within ``deadline_s``.
            MegatrainError: What the tier raised.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                receipt: Receipt = ray.get(self.call(tier, method, *arguments).receipt, timeout=deadline_s)
                self.note(tier, receipt)
                return receipt.info
            except GetTimeoutError:
                raise StalledError(f"{tier}: {method} gave no answer within {deadline_s:.0f} s") from None
            except RayTaskError as error:
                raise _cause(error) from None
            except RayActorError:
                self.wait_alive(tier)
        raise ActorLostError(f"{tier}: its process died {MAX_ATTEMPTS} times in {method}")

    def note(self, tier: Tier, receipt: Receipt) -> None:
        """Passes on the warnings that came with a receipt."""
        for note in receipt.notes:
            self._on_note(tier, note)

    def memory(self) -> RayMemory:
        """Looks at what Ray takes on this host; the actors and this process are not part of it."""
        here = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == here)
        return RayMemory(node["ObjectStoreSocketName"], lambda: {os.getpid(), *self.pids.values()})

    def kill(self, tier: Tier) -> None:
        """Ends the tier's process at once, even a stopped one; Ray starts a new one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[tier], signal.SIGKILL)

    def restart(self, tier: Tier) -> int:
        """Ends the tier's process and waits for the new one; returns its pid. From any thread."""
        before = self.pids[tier]
        self.kill(tier)
        while self.pids[tier] == before:
            time.sleep(0.1)
            self.wait_alive(tier)
        return self.pids[tier]

    def shutdown(self) -> None:
        """Ends the actors, and Ray if it was started here."""
        for handle in self._handles.values():
            ray.kill(handle)
        self._handles.clear()
        if self.owns_ray:
            ray.shutdown()
            self.owns_ray = False


def _listens_here_alone(dashboard_url: str) -> bool:
    """Whether only this host reaches the dashboard.

    Ray publishes the node's address for one that listens on all interfaces: what listens on its port counts too.
    """
    published = urlsplit(f"//{dashboard_url.rpartition('://')[2]}")
    hosts = {published.hostname or ""}
    for connection in psutil.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == published.port:
            hosts.add(connection.laddr.ip)
    return all(map(_is_loopback, hosts))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _check_gpus(required: float) -> None:
    """An actor that asks for a GPU which Ray cannot give would wait for it, silently."""
    give_up_s = time.monotonic() + GPU_PATIENCE_S
    while required:
        held: dict[str, float] = ray.cluster_resources()
        free: dict[str, float] = ray.available_resources()
        if free.get("GPU", 0.0) >= required:
            return
        if held.get("GPU", 0.0) < required or time.monotonic() > give_up_s:
            raise PlanError(
                f"the run requires {required:g} GPU; Ray has {held.get('GPU', 0.0):g}, and {free.get('GPU', 0.0):g} "
                "available: end what holds it (`ray list actors`), start Ray where the GPU is visible "
                "(CUDA_VISIBLE_DEVICES), or set tiers.device: cpu"
            )
        time.sleep(0.5)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps this process's handlers: Ray would replace the one of SIGTERM by its own, which aborts."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    interrupted = False
    try:
        yield
    except SystemExit as left:  # with these codes Ray's handlers leave, before ours are back
        interrupted = left.code in (1, signal.SIGTERM)
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        terminate = handlers.get(signal.SIGTERM)
        if interrupted and callable(terminate):
            terminate(signal.SIGTERM, None)


def _cause(error: RayTaskError) -> BaseException:
    """What the tier raised, without Ray's wrapping."""
    return error.cause if isinstance(error.cause, BaseException) else error
