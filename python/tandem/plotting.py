"""Plots of plans, simulations and choices by matplotlib, which the extra [plot] installs."""
from __future__ import annotations

from typing import Any

from ._core import Choice, Plan, Simulation
from .errors import UsageError


def _axes(axes: Any) -> Any:
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("plot: matplotlib is not installed; install tandem-trainer[plot]") from None
    return pyplot.subplots(figsize=(7, 4), layout="constrained")[1]


def plot_plan(plan: Plan, axes: Any = None) -> Any:
    """Bytes by name, a stacked bar for each place. Returns the axes."""
    axes = _axes(axes)
    places = [p for p in ("device", "pinned", "pageable", "file") if any(e.place == p for e in plan.entries)]
    below = dict.fromkeys(places, 0.0)
    for name in dict.fromkeys(entry.name for entry in plan.entries):
        held = {e.place: e.bytes / 2**30 for e in plan.entries if e.name == name}
        axes.bar(list(held), list(held.values()), bottom=[below[p] for p in held], label=name, width=0.6)
        for place, size in held.items():
            below[place] += size
    axes.set_ylabel("GiB")
    axes.set_title(plan.policy)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return axes


def plot_simulation(simulation: Simulation, axes: Any = None) -> Any:
    """Share of each resource over the step. Returns the axes."""
    axes = _axes(axes)
    use = sorted(((share, name) for name, share in simulation.use.items() if share > 0))
    axes.barh([name for _, name in use], [100 * share for share, _ in use])
    axes.set_xlabel("% of the step")
    axes.set_xlim(0, 100)
    axes.set_title(f"{simulation.step_seconds:.3g} s a step, bound by {simulation.bound_by}")
    return axes


def plot_choice(choice: Choice, axes: Any = None) -> Any:
    """Step time of each policy that fits; lighter where its simulation was given up. Returns the axes."""
    axes = _axes(axes)
    shown = [c for c in choice.candidates if c.fits][::-1]
    names = ["its own division" if c.improved else c.policy for c in shown]
    colors = ["#c7d5e8" if c.simulation.given_up else "#1f77b4" for c in shown]
    axes.barh(range(len(shown)), [c.simulation.step_seconds for c in shown], color=colors)
    axes.set_yticks(range(len(shown)), names)
    axes.set_xlabel("seconds a step, predicted")
    axes.set_title(f"chosen: {choice.plan.policy}")
    return axes
