"""Tables in notebooks: HTML of plans, profiles, simulations and choices."""
from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ._core import Choice, MachineProfile, Plan, Simulation, profile_units


def _row(tag: str, cells: Iterable[str]) -> str:
    shown = [f'<{tag} style="text-align:{"left" if i == 0 else "right"}">{escape(c)}</{tag}>' for i, c in enumerate(cells)]
    return f"<tr>{''.join(shown)}</tr>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], caption: str = "") -> str:
    """A table of text; the first column is aligned to the left."""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(_row("td", row) for row in rows)
    return f"<table>{title}<thead>{_row('th', head)}</thead><tbody>{body}</tbody></table>"


def bytes_text(count: int) -> str:
    """"1.50 GiB", "512.0 MiB", "100 B"."""
    for unit, shift, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.{digits}f} {unit}"
    return f"{count} B"


def plan_html(plan: Plan) -> str:
    """Rows of the memory table, a column for each place."""
    names = list(dict.fromkeys(entry.name for entry in plan.entries))
    places = [p for p in ("device", "pinned", "pageable", "file") if any(e.place == p for e in plan.entries)]
    held = {(e.name, e.place): e.bytes for e in plan.entries}
    rows = [[name, *(bytes_text(held[name, p]) if (name, p) in held else "-" for p in places)] for name in names]
    total = f"{plan.policy}: {bytes_text(plan.device_bytes)} on the device, {bytes_text(plan.host_bytes)} on the host at most"
    return table(["", *places], rows, total) + f"<pre>{escape(plan.notes())}</pre>"


def profile_html(profile: MachineProfile) -> str:
    """All figures that are known, with unit and meaning."""
    units = profile_units()
    rows = [[key, f"{figure.value:.4g}", units[key][0], f"{figure.spread:.0%}", figure.source]
            for key, figure in profile.figures.items() if figure.value > 0]
    return table(["figure", "value", "unit", "spread", "source"], rows, f"{profile.name}: {profile.device}")


def simulation_html(simulation: Simulation) -> str:
    """Seconds of a step, and shares of the resources."""
    seconds = [[name, f"{getattr(simulation, name + '_seconds'):.4g} s"]
               for name in ("step", "forward", "backward", "update", "exposed_update")]
    use = [[name, f"{share:.0%}"] for name, share in sorted(simulation.use.items(), key=lambda item: -item[1])]
    return table(["", "predicted"], seconds, f"bound by {simulation.bound_by}") + table(["resource", "share"], use)


def choice_html(choice: Choice) -> str:
    """Policies that were compared, the fastest first."""
    rows = []
    for candidate in choice.candidates:
        name = "a division of its own" if candidate.improved else candidate.policy
        step = candidate.simulation
        seconds = "-" if not candidate.fits else f"{'> ' if step.given_up else ''}{step.step_seconds:.4g} s"
        bound = step.bound_by if candidate.fits and not step.given_up else "-"
        rows.append([name, "yes" if candidate.fits else "no", bytes_text(candidate.device_bytes), seconds, bound])
    chosen = f"chosen: {choice.plan.policy}, {choice.simulation.step_seconds:.4g} s a step"
    return table(["policy", "fits", "device", "step", "bound by"], rows, chosen) + plan_html(choice.plan)
