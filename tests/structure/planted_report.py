"""The end of the scripts that plant faults: failures, counts, exit code."""


def report(outcomes):
    """Prints the failures among the outcomes, which are None where a case went well, and how many cases there were. Returns the
    exit code."""
    failures = [outcome for outcome in outcomes if outcome]
    for failure in failures:
        print(failure)
    print(f"{len(outcomes)} cases, {len(failures)} failures")
    return 1 if failures else 0
