"""The optimizer tier against torch.optim.AdamW, and against death in the middle of an update."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain_ray.actors import cpu_optimizer
from megatrain_ray.actors.cpu_optimizer import AdamWConfig, CpuOptimizer, Hyper, arena_bytes
from megatrain_ray.errors import TrainingError
from megatrain_ray.layout import LayerSpec, pack_layer
from megatrain_ray.packed import GRADS, MASTER, STATE, PackedLayer
from megatrain_ray.tensors import as_tensor, bind

ADAMW = AdamWConfig((0.9, 0.95), 1e-8, 0.1)
LAYERS = (
    pack_layer(0, "embed", [("embed.weight", (97, 66))]),
    pack_layer(
        1, "layer-0000", [("a.weight", (66, 50)), ("a.bias", (66,)), ("norm.weight", (66,)), ("b.weight", (7, 13))]
    ),
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a layer, the last one partial."""
    monkeypatch.setattr(cpu_optimizer, "CHUNK_NUMEL", 1000)


@pytest.fixture
def arena() -> Iterator[str]:
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, arena_bytes(LAYERS, (0, 1)))
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def make(arena: str, compute_dtype: str = "float32", resident: tuple[int, ...] = (0, 1)) -> CpuOptimizer:
    return CpuOptimizer(LAYERS, ADAMW, compute_dtype=compute_dtype, resident=resident, arena_path=arena, num_threads=1)


def flat(spec: LayerSpec, seed: int) -> Tensor:
    """Random values in the tensors, zero in the padding."""
    values = torch.zeros(spec.numel)
    generator = torch.Generator().manual_seed(seed)
    for view in bind(spec, values).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return values


def read_only(values: Tensor) -> NDArray[np.uint8]:
    """As it comes out of the object store."""
    data = values.view(torch.uint8).numpy().copy()
    data.flags.writeable = False
    return data


def packed(spec: LayerSpec, step: int, sections: tuple[str, ...], values: Tensor) -> PackedLayer:
    return PackedLayer(spec.index, step, "float32", sections, read_only(values))


def grads(spec: LayerSpec, step: int) -> PackedLayer:
    return packed(spec, step, GRADS, flat(spec, 1000 * step + spec.index))


def hyper(step: int) -> Hyper:
    return Hyper(step, 1e-2 / step, 0.5 if step % 2 else 1.0)


def reference(spec: LayerSpec, steps: int) -> list[dict[str, Tensor]]:
    """What torch.optim.AdamW makes of the same gradients: masters after each step, by name."""
    params = {name: view.clone().requires_grad_() for name, view in bind(spec, flat(spec, spec.index)).items()}
    groups = [
        {"params": [params[t.name] for t in spec.tensors if t.decay is decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=ADAMW.betas, eps=ADAMW.eps)
    masters = []
    for step in range(1, steps + 1):
        gradient = bind(spec, flat(spec, 1000 * step + spec.index))
        for group in optimizer.param_groups:
            group["lr"] = hyper(step).learning_rate
        for name, param in params.items():
            param.grad = gradient[name] * hyper(step).grad_scale
        optimizer.step()
        masters.append({name: param.detach().clone() for name, param in params.items()})
    return masters


def assert_close(data: NDArray[np.uint8], spec: LayerSpec, expected: dict[str, Tensor]) -> None:
    for name, view in bind(spec, as_tensor(data, torch.float32)).items():
        torch.testing.assert_close(view, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", LAYERS, ids=lambda spec: spec.name)
def test_in_ram_equals_torch_adamw(arena: str, spec: LayerSpec) -> None:
    optimizer = make(arena)
    optimizer.keep(spec.index, packed(spec, 0, MASTER, flat(spec, spec.index)))
    for step, expected in enumerate(reference(spec, 4), 1):
        emitted = optimizer.update_emit(spec.index, hyper(step), grads(spec, step))
        assert emitted.step == step
        assert_close(emitted.data, spec, expected)
        np.testing.assert_array_equal(emitted.data, optimizer.params(spec.index).data)


def test_paged_equals_in_ram_bit_for_bit(arena: str) -> None:
    spec = LAYERS[1]
    optimizer = make(arena)
    optimizer.keep(spec.index, packed(spec, 0, MASTER, flat(spec, 1)))
    state = packed(spec, 0, STATE, torch.cat([flat(spec, 1), torch.zeros(2 * spec.numel)]))
    for step in (1, 2, 3):
        expected = optimizer.update_emit(1, hyper(step), grads(spec, step)).data.copy()
        emitted, new_state = optimizer.update_paged_emit(1, hyper(step), state, grads(spec, step))
        np.testing.assert_array_equal(emitted.data, expected)
        np.testing.assert_array_equal(new_state.data, optimizer.snapshot(1).data)
        state = PackedLayer(1, new_state.step, "float32", STATE, new_state.data.copy())
    again = optimizer.update_paged(1, hyper(3), state, None)
    assert again.step == 3
    np.testing.assert_array_equal(again.data, state.data)


def test_padding_stays_zero(arena: str) -> None:
    spec = LAYERS[1]
    optimizer = make(arena)
    optimizer.keep(spec.index, packed(spec, 0, MASTER, flat(spec, 1)))
    optimizer.update(1, hyper(1), grads(spec, 1))
    values = as_tensor(optimizer.snapshot(1).section("master"), torch.float32).clone()
    for view in bind(spec, values).values():
        view.zero_()
    assert not values.any()


def test_bfloat16_weights_are_rounded_masters_and_small_updates_survive(arena: str) -> None:
    spec = LAYERS[0]
    optimizer = make(arena, "bfloat16")
    optimizer.keep(spec.index, packed(spec, 0, MASTER, flat(spec, 0)))
    before = as_tensor(optimizer.snapshot(0).section("master"), torch.float32).clone()
    for step in range(1, 101):
        emitted = optimizer.update_emit(0, Hyper(step, 1e-6), grads(spec, step))
    after = as_tensor(optimizer.snapshot(0).section("master"), torch.float32)
    torch.testing.assert_close(as_tensor(emitted.data, torch.bfloat16), after.bfloat16(), rtol=0, atol=0)
    moved = (after - before).abs()[: 97 * 66]
    assert float(moved.median()) > 1e-6  # far below bfloat16's resolution of these weights
    assert float((after.bfloat16() != before.bfloat16()).float().mean()) < 0.05


class Killed(BaseException):
    """Stands for SIGKILL: the shared memory stays as it is, the process does not."""


def test_death_at_any_moment_of_an_update_changes_nothing(arena: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LAYERS[1]
    undisturbed = make(arena)
    undisturbed.keep(spec.index, packed(spec, 0, MASTER, flat(spec, 1)))
    for step in (1, 2):
        undisturbed.update_emit(1, hyper(step), grads(spec, step))
    expected = undisturbed.snapshot(1).data.copy()
    kernel, copy_ = torch._fused_adamw_, Tensor.copy_
    countdown = 0

    def dies_now() -> bool:
        nonlocal countdown
        countdown -= 1
        return countdown == 0

    def dying_copy(target: Tensor, source: Tensor) -> Tensor:
        if dies_now():
            copy_(target[0], source[0])  # some of the journal, not all
            raise Killed
        return copy_(target, source)

    def dying_kernel(*lists: list[Tensor], **constants: Any) -> None:
        if dies_now():
            kernel(*([tensor[: tensor.numel() // 2] if tensor.dim() else tensor for tensor in row] for row in lists),
                   **constants)  # fmt: skip
            raise Killed
        kernel(*lists, **constants)

    deaths = 0
    for moment in range(1, 2 * len(undisturbed._chunks(1)) + 2):
        optimizer = make(arena)
        optimizer.keep(spec.index, packed(spec, 0, MASTER, flat(spec, 1)))
        optimizer.update(1, hyper(1), grads(spec, 1))
        gradient = grads(spec, 2)
        countdown = moment
        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "copy_", dying_copy)
            patched.setattr(torch, "_fused_adamw_", dying_kernel)
            try:
                optimizer.update(1, hyper(2), gradient)
            except Killed:
                deaths += 1
        survivor = make(arena)
        if 2 < moment <= 2 * len(undisturbed._chunks(1)):  # some chunks are of the new step, others are not
            with pytest.raises(TrainingError, match="in the middle of its update: ask again"):
                survivor.inspect(1, None)
        emitted = survivor.update_emit(1, hyper(2), gradient)
        np.testing.assert_array_equal(survivor.snapshot(1).data, expected)
        np.testing.assert_array_equal(emitted.data, survivor.snapshot(1).section("master"))
    assert deaths == 2 * len(undisturbed._chunks(1))


def test_repeating_a_step_does_nothing_and_skipping_one_is_refused(arena: str) -> None:
    spec = LAYERS[1]
    optimizer = make(arena)
    optimizer.keep(spec.index, packed(spec, 0, MASTER, flat(spec, 1)))
    optimizer.update(1, hyper(1), grads(spec, 1))
    before = optimizer.snapshot(1).data.copy()
    optimizer.update(1, hyper(1), None)
    np.testing.assert_array_equal(optimizer.snapshot(1).data, before)
    with pytest.raises(AssertionError, match="is at step 1, asked for 3"):
        optimizer.update(1, hyper(3), grads(spec, 3))
    assert optimizer.status()["steps"] == {"embed": 0, "layer-0000": 1}


def test_weights_of_a_layer_in_parts_leave_only_when_every_part_came(arena: str) -> None:
    """The store may die in the read of one part and not of the next: a replay would keep what came of that."""
    spec = LAYERS[1]
    optimizer = make(arena, "bfloat16", resident=())
    ends = (0, 1024, 2048, spec.numel)
    old, new = (
        [
            PackedLayer(1, step, "float32", MASTER, read_only(flat(spec, step)[start:stop]), start)
            for start, stop in itertools.pairwise(ends)
        ]
        for step in (1, 2)
    )
    assert [optimizer.cast(1, part) is None for part in old] == [True, True, False]
    optimizer.cast(1, new[0])
    with pytest.raises(AssertionError, match="elements before 2048 are missing"):
        optimizer.cast(1, new[2])
    weights = [optimizer.cast(1, part) for part in new][-1]
    assert weights is not None
    assert torch.equal(as_tensor(weights.data, torch.bfloat16), flat(spec, 2).bfloat16())
