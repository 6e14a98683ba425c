"""Plans by the performance model, profiles of machines, and simulated steps."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from . import _core
from ._core import (
    Choice,
    Device,
    LayerSeconds,
    MachineProfile,
    OffloadOptions,
    ParameterLayout,
    Plan,
    PlanningFacts,
    Simulation,
)
from .errors import MisuseError, UsageError

Seconds = Sequence[LayerSeconds | tuple[float, float]]


def shipped_profiles() -> list[str]:
    """Names of the machine profiles that come with tandem."""
    folder = resources.files(__package__) / "profiles"
    return sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".toml"))


def profile(name: str | os.PathLike[str]) -> MachineProfile:
    """The profile in a TOML file, or a shipped one by its name, such as "24gb-pcie4".

    Raises UsageError that lists the names where there is none, and as `read_profile`.
    """
    if os.path.exists(name) or os.sep in os.fspath(name):
        return _core.read_profile(name)
    names = shipped_profiles()
    if os.fspath(name) not in names:
        raise UsageError(f"profile '{os.fspath(name)}': neither a file nor a profile that tandem brings along; "
                         f"those are {', '.join(names)}")
    return _core.parse_profile((resources.files(__package__) / "profiles" / f"{name}.toml").read_text(), os.fspath(name))


def _seconds(layout: ParameterLayout, machine: MachineProfile, tokens: float | None, compute: Seconds | None,
             recompute: bool) -> list[LayerSeconds]:
    """Seconds of each layer: as timed by the caller, or estimated for so many tokens of a micro-batch."""
    if (tokens is None) == (compute is None):
        raise MisuseError("give either tokens, those of a micro-batch, or compute, the seconds of each layer")
    if compute is None:
        return _core.matrix_seconds(machine, layout, float(tokens or 0), recompute)
    return [s if isinstance(s, LayerSeconds) else LayerSeconds(forward=s[0], backward=s[1]) for s in compute]


def plan(layout: ParameterLayout, options: OffloadOptions | None = None, *, device: Device | None = None,
         facts: PlanningFacts | None = None, profile: MachineProfile | None = None, tokens: float | None = None,
         compute: Seconds | None = None, recompute: bool = False) -> Choice:
    """The plan that is predicted to be the fastest of all that fit, with what it was compared with.

    `profile`: figures of the machine, by `calibrate` or `tandem.profile`; `device` or `facts`: what memory there is, by
    default that of the profile. `tokens`: those of a micro-batch, from which the seconds of each layer are estimated as
    nothing but products with its matrices; or `compute`: (forward, backward) seconds of each layer for one micro-batch, as
    you timed them. Blocks for tenths of a second to several.

    Raises PlanError where nothing fits, UsageError on options out of range, MisuseError.
    """
    if profile is None:
        raise MisuseError("plan: no profile; measure one with tandem.calibrate(), or take a shipped one with "
                          "tandem.profile(name)")
    if facts is None:
        facts = device.facts() if device is not None else PlanningFacts(
            device_capacity=int(profile["device.memory"].value), host_available=int(profile["machine.host_memory"].value),
            device_is_host=profile.device_kind == "host")
    return _core.choose_plan(layout, options or OffloadOptions(), facts, profile,
                             _seconds(layout, profile, tokens, compute, recompute))


def simulate(layout: ParameterLayout, plan: Plan, profile: MachineProfile, *, tokens: float | None = None,
             compute: Seconds | None = None, recompute: bool = False, micro_batches: int | None = None,
             overlap_updates: bool = True, save: bool = False, disk_share: float = 0.0, coarse_pieces: int = 0) -> Simulation:
    """One step of a plan in virtual time on the machine of a profile. `tokens` and `compute` as in `plan`;
    `micro_batches` is by default as many as the plan allows.

    Raises MisuseError where the plan is not one of the layout.
    """
    options = _core.SimulationOptions(micro_batches=micro_batches or plan.max_micro_batches, overlap_updates=overlap_updates,
                                      save=save, disk_share=disk_share, coarse_pieces=coarse_pieces)
    return _core.simulate(layout, plan, profile, _seconds(layout, profile, tokens, compute, recompute), options)


def calibrate(device: Device | str = "auto", *, seconds_per_figure: float = 0.4, working_set: int | str = 0,
              progress: Callable[[str], object] | None = None, disk_folder: str | os.PathLike[str] | None = None,
              state_folder: str | os.PathLike[str] | None = None, cache: bool = False) -> MachineProfile:
    """Measures this machine: a device, its link and its host. Takes some 10 to 30 seconds, in which nothing else should run.

    `progress` is told before each figure; what it raises ends the measurement, as Ctrl-C does. `cache`: keeps the profile
    where the program `tandem` looks for it. Raises DeviceError, WriteError, and PlanError where there is too little memory.
    """
    opened = _core.open_device(device) if isinstance(device, str) else device
    measured = _core.calibrate(opened, seconds_per_figure=seconds_per_figure, working_set=working_set, progress=progress,
                               disk_folder=disk_folder, state_folder=state_folder)
    if cache:
        _core.cache_profile(measured, _core.cached_profile_path(opened))
    return measured
