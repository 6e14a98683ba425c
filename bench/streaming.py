"""streaming: 24 layers with two in flight, beside the same model with all its weights on the device.

The link is emulated so that it can keep up: twice what the step needs.
"""
import statistics

import harness
from race import Race

TURNS, WARM_UP = 11, 2
SHAPE = ["layers=24", "width=256", "sequence=128", "batch=2", "policy=host", "prefetch=2"]


def program(*settings):
    return [harness.program("bench_steps"), *SHAPE, *settings]


def needed_link():
    with Race({"streamed": program("resident=0")}) as race:
        facts = race.facts("streamed")
        race.run(5, 2)
        return 2 * (facts["to_device"] + facts["to_host"]) / statistics.median(race.seconds("streamed"))


def measure():
    harness.build("bench_steps")
    link = needed_link()
    figures = harness.Figures()
    with Race({"streamed": program("resident=0", f"link={link}"),
               "resident": program("resident=26", f"link={link}")}) as race:
        facts = {name: race.facts(name) for name in ("streamed", "resident")}
        race.run(TURNS, WARM_UP)
        figures.add("step_ratio", harness.ratios(race.seconds("streamed"), race.seconds("resident")))
        for name in ("streamed", "resident"):
            figures.add(f"{name}_seconds", race.seconds(name))
            figures.add(f"{name}_engine_device_bytes", [facts[name]["engine_device_bytes"]])
    figures.add("device_bytes_ratio", [facts["streamed"]["engine_device_bytes"] / facts["resident"]["engine_device_bytes"]])
    figures.add("link_bytes_per_second", [link])
    return figures.line("streaming", turns=TURNS)
