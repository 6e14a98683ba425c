"""adam-before: the CPU update in each state format against that of an earlier build, and the formats against fp32.

TANDEM_BENCH_BEFORE names the earlier program: bench_adam_race, its commit behind a hyphen. All exist at once and step in turn, so
that each pair sees the same machine.
"""
import os
from pathlib import Path

import harness
from adam import COUNT, ROUNDED, WARM_UP, check_same_work, ours
from race import Race

PAIRS = 31
FORMATS = ("fp32", "split", *ROUNDED)


def earlier():
    given = os.environ.get("TANDEM_BENCH_BEFORE", "")
    path, _, commit = given.rpartition("-")
    if not path or not Path(given).is_file():
        raise harness.BenchError(f"TANDEM_BENCH_BEFORE={given}: names no program bench_adam_race-COMMIT; build one at that commit")
    return given, commit


def measure():
    program, commit = earlier()
    harness.build("bench_adam_race")
    commands = ours(COUNT, *FORMATS)
    commands |= {f"{name} before": [program, *command[1:]] for name, command in ours(COUNT, *FORMATS).items()}
    with Race(commands) as race:
        race.run(PAIRS, WARM_UP, check_same_work)
    figures = harness.Figures()
    for name in FORMATS:
        spelled = name.replace("-", "_")
        figures.add(f"{spelled}_over_before", harness.ratios(race.seconds(f"{name} before"), race.seconds(name)))
        if name != "fp32":
            figures.add(f"{spelled}_over_fp32", harness.ratios(race.seconds("fp32"), race.seconds(name)))
    for name in FORMATS:
        figures.add(f"{name.replace('-', '_')}_seconds", race.seconds(name))
    return figures.line("adam-before", parameters=COUNT, threads=harness.cores(), pairs=PAIRS, before=commit)
