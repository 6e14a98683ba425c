"""overlap: steps of 12 layers on the host device, beside the same steps with every overlap switched off.

The link is emulated so that moving a step's bytes takes as long as computing it; then the CPU update is emulated at a
quarter of the rate at which it would take as long as the rest of the step.
"""
import statistics

import harness
from race import Race

TURNS, WARM_UP = 11, 2
SHAPE = ["layers=12", "width=256", "sequence=128", "batch=2"]


def program(*settings):
    return [harness.program("bench_steps"), *SHAPE, *settings]


def compute_alone():
    """Seconds of a step that moves nothing, and the bytes that a streaming one moves each way."""
    with Race({"resident": program("policy=device"), "moving": program("policy=host")}) as race:
        facts = race.facts("moving")
        race.run(5, 2)
        return statistics.median(race.seconds("resident")), facts


def measure():
    harness.build("bench_steps")
    compute, facts = compute_alone()
    link = (facts["to_device"] + facts["to_host"]) / compute
    figures = harness.Figures()
    with Race({"overlapped": program("policy=host", f"link={link}"),
               "serial": program("policy=host", f"link={link}", "overlap=0")}) as race:
        race.run(TURNS, WARM_UP)
        figures.add("step_over_serial", harness.ratios(race.seconds("overlapped"), race.seconds("serial")))
        for name in ("overlapped", "serial"):
            figures.add(f"{name}_seconds", race.seconds(name))
    rate = facts["parameters"] / compute / 4
    with Race({"interleave": program("policy=interleave:2", f"update_rate={rate}"),
               "host": program("policy=host", f"update_rate={rate}")}) as race:
        race.run(TURNS, WARM_UP)
        figures.add("interleave_over_host", harness.ratios(race.seconds("interleave"), race.seconds("host")))
        for name in ("interleave", "host"):
            figures.add(f"{name}_seconds", race.seconds(name))
    figures.add("compute_seconds", [compute])
    figures.add("link_bytes_per_second", [link])
    return figures.line("overlap", turns=TURNS)
