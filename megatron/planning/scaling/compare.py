"""Runs that belong together, and the efficiency of the larger ones against the smallest. Needs no torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planning.published import Published, published
from megatron.planning.scaling.figures import Figures
from megatron.planning.scaling.runs import MeasuredRun

_TOO_GOOD = 1.1
WEAK, STRONG, SWEEP, OTHER = "weak", "strong", "sweep", "other"


@dataclass(frozen=True)
class Series:
    """Runs of which one thing varies.

    kind       weak (batch per replica is fixed), strong (batch is fixed), sweep (of `parameter`) or other
    parameter  what varies, as an axis is labelled
    members    in order of what varies
    base       the smallest valid run, against which efficiency is taken; None without one, and for sweeps
    """

    name: str
    kind: str
    parameter: str
    members: tuple[Figures, ...]
    base: Figures | None = None

    @property
    def devices(self) -> str:
        """What a process has, in words: GCDs where they are or the model is one of the paper's."""
        gcds = self.published is not None or any(m.device == "GCD" for m in self.members)
        return "GCDs" if gcds else "devices"

    @property
    def published(self) -> Published | None:
        """The paper's model, when these runs are of it."""
        run = self.members[0].run
        return published(run.get("num_layers"), run.get("hidden_size"))

    def value(self, member: Figures) -> float | None:
        """What varies, of this run."""
        if self.kind == SWEEP:
            return member.run.point.get("value")
        return member.run.world_size

    def efficiency(self, member: Figures) -> float | None:
        """Throughput per device over that of the base: weak efficiency in weak scaling, strong in strong scaling.

        With a fixed batch this is T_base N_base / (T N), with a batch that grows along T_base / T. None without a base
        and for a run that is invalid.
        """
        if self.base is None or not member.valid:
            return None
        mine, its = member.tokens_per_s_per_device, self.base.tokens_per_s_per_device
        return mine / its if mine and its else None

    def remarks(self, member: Figures) -> list[str]:
        """Everything to say about a run, the gravest first."""
        said = [member.run.failure] if member.run.failure else []
        said += [*member.problems, *member.notes]
        efficiency = self.efficiency(member)
        if efficiency is not None and efficiency > _TOO_GOOD:
            said.append(f"efficiency of {efficiency:.0%}: the smallest run was slowed down by something")
        return said


def compare(measured: Sequence[Figures]) -> list[Series]:
    """Put runs into series: by the experiment that their points name, else by model and layout of a replica."""
    groups: dict[tuple[object, ...], list[Figures]] = {}
    for each in measured:
        groups.setdefault(_key(each.run), []).append(each)
    return [_series(members) for _, members in sorted(groups.items(), key=lambda item: str(item[0]))]


def _key(run: MeasuredRun) -> tuple[object, ...]:
    if run.point.get("experiment"):
        return ("experiment", run.point["experiment"])
    names = (
        "num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "micro_batch_size", "virtual_pipeline_model_parallel_size",
    )  # fmt: skip
    return ("model", *(run.get(name) for name in names), run.dtype_name, run.get("recompute_granularity"))


def _series(members: list[Figures]) -> Series:
    point = members[0].run.point
    name = point.get("experiment") or _model_name(members[0].run)
    kind = point.get("kind") or _kind(members)
    parameter = str(point.get("parameter") or "value") if kind == SWEEP else "devices"
    series = Series(name, kind, parameter, tuple(members))
    ordered = sorted(members, key=lambda m: (series.value(m) is None, series.value(m) or 0, m.run.name))
    valid = [m for m in ordered if m.valid and m.run.world_size]
    one_size = len({m.run.world_size for m in valid}) < 2
    comparable = kind in (WEAK, STRONG) and (one_size or _kind(valid) == kind)
    return Series(name, kind, parameter, tuple(ordered), valid[0] if valid and comparable else None)


def _model_name(run: MeasuredRun) -> str:
    known = published(run.get("num_layers"), run.get("hidden_size"))
    if known is not None:
        return known.name
    if run.get("num_layers"):
        return f"{run.get('num_layers')} layers of {run.get('hidden_size')}"
    return "unknown model"


def _kind(members: Sequence[Figures]) -> str:
    """What is fixed while the number of devices varies."""
    worlds = {m.run.world_size for m in members}
    if len(worlds) < 2 or None in worlds:
        return OTHER
    batches = {m.batch for m in members if m.batch}
    per_replica = {m.batch / m.run.replicas for m in members if m.batch and m.run.replicas}
    if len(batches) == 1:
        return STRONG
    return WEAK if len(per_replica) == 1 else OTHER
