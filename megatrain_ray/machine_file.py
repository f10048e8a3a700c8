"""A machine described in a file, to plan for one that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatrain_ray.config import Number, Text, Whole, parse_bytes, read_yaml
from megatrain_ray.errors import ConfigError
from megatrain_ray.machine import Machine, Speeds

__all__ = ["MachineFile", "load_machine"]

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Rate = Annotated[Number, Field(gt=0)]


class MachineFile(BaseModel):
    """Keys of the file. Sizes as ``64GiB``; bytes a second as ``7GB``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Text
    """For messages."""
    cores: Annotated[Whole, Field(ge=1)]
    """Processor cores."""
    host_memory: Bytes
    """RAM that is free for the run."""
    shared_memory: Bytes | None = None
    """/dev/shm, where Ray keeps its object store; default: half of the RAM, as Linux mounts it."""
    disk_free: Bytes
    """Free space for store and checkpoints."""
    disk_read: Bytes
    """Bytes a second, direct I/O in large blocks, all drives of the store together."""
    disk_write: Bytes
    """The same for writing, sustained: beyond the drive's cache."""
    drive_endurance: Bytes | None = None
    """Bytes that the drives may be written in their life (TBW), all together."""
    checksum: Bytes = 40 * 10**9
    """Bytes a second that the store's four transfer threads check, together."""
    memcpy: Bytes
    """Bytes a second copied between large buffers in host memory, by a few threads."""
    adamw: Rate
    """Parameters a second that AdamW updates with half of the cores; 28 bytes of memory traffic each."""
    device_memory: Bytes | None = None
    """Of the GPU, with ``link``; without both the run computes on the CPU."""
    bfloat16_flops: Rate
    """Operations a second that a decoder layer reaches: about half of a GPU's dense peak."""
    float32_flops: Rate
    """The same in float32."""
    link: Bytes | None = None
    """Bytes a second from pinned host memory to the GPU, with ``device_memory``."""

    def machine(self) -> Machine:
        """As the planner takes it."""
        return Machine(
            host_memory_bytes=self.host_memory,
            host_memory_source=self.name,
            shared_memory_bytes=self.shared_memory or self.host_memory // 2,
            disk_free_bytes=self.disk_free,
            cores=self.cores,
            device_memory_bytes=self.device_memory,
            speeds=Speeds(
                disk_read_bytes_per_s=self.disk_read,
                disk_write_bytes_per_s=self.disk_write,
                checksum_bytes_per_s=self.checksum,
                memcpy_bytes_per_s=self.memcpy,
                adamw_numel_per_s=self.adamw,
                float32_flops_per_s=self.float32_flops,
                bfloat16_flops_per_s=self.bfloat16_flops,
                link_bytes_per_s=self.link,
                source=f"described: {self.name}",
            ),
            drive_endurance_bytes=self.drive_endurance,
        )


def load_machine(path: str | Path) -> Machine:
    """Reads a machine file.

    Raises:
        ConfigError: The first problem, with file, line and key.
    """
    values, lines = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected keys ({', '.join(MachineFile.model_fields)}), got {values!r}")
    try:
        described = MachineFile.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = str(problem["loc"][0])
        where = lines.get((key,), f"{path}:1")
        if problem["type"] == "extra_forbidden":
            known = ", ".join(MachineFile.model_fields)
            raise ConfigError(f"{where}: unknown key {key}; known keys are {known}") from None
        if problem["type"] == "missing":
            raise ConfigError(f"{where}: {key} is missing; add it") from None
        message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        raise ConfigError(f"{where}: {key}: {message}; got {values[key]!r}") from None
    for given, missing in (("device_memory", "link"), ("link", "device_memory")):
        if getattr(described, given) is not None and getattr(described, missing) is None:
            raise ConfigError(f"{lines[given,]}: {missing} is missing; add it: {given} is given")
    return described.machine()
