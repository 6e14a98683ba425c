"""tandem: trains models that do not fit on their GPU, in Python over the public C++ interface.

Weights, gradients and Adam state of a layered model are kept where a plan says; each layer is brought to the device just in
time, and updated on the CPU or the GPU. Results have the same bits under every plan. A trainer with a forward and backward
of its own uses `OffloadEngine`; docs/python.md is a walk through it.
"""
from ._core import (
    AdamW,
    Candidate,
    Choice,
    Device,
    DeviceInfo,
    EngineCounters,
    Evaluation,
    Figure,
    Gradients,
    GroupValues,
    LaneSeconds,
    Layer,
    LayerBuilder,
    LayerSeconds,
    MachineProfile,
    MemoryEntry,
    OffloadEngine,
    OffloadOptions,
    Parameter,
    ParameterLayout,
    ParameterOptions,
    Plan,
    PlanningFacts,
    Shares,
    Simulation,
    StepReport,
    Stream,
    Subgroup,
    Tensor,
    Weights,
    make_plan,
    open_device,
    parse_profile,
    read_profile,
    smallest_device_memory,
    version,
)
from .errors import (
    DeviceError,
    Error,
    InputError,
    MisuseError,
    PeerError,
    PlanError,
    StalledError,
    TrainingError,
    UsageError,
    WriteError,
)
from .planning import calibrate, plan, profile, shipped_profiles, simulate

__version__: str = version

__all__ = [name for name in dir() if name[0] != "_" and name not in ("errors", "planning", "version")] + ["__version__"]
