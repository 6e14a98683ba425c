#!/usr/bin/env python3
"""Says what runs of CTest came to, case by case and suite by suite: a suite counts as many tests as it has cases.

  summary.py count TREE...   prints "N passed, N failed, N skipped" of the last run in these trees
  summary.py times TREE...   prints what each suite proves, and the seconds that it took

A tree is a build folder; its run is in test.xml, as CTest writes it, and in tests/results, a file of GoogleTest's for each
suite. What a suite proves says the comment that its source file begins with, or a script's first line.
"""
import collections
import json
import os
import re
import sys
import xml.etree.ElementTree

Run = collections.namedtuple("Run", "name seconds passed failed skipped source")


def cases(results, name):
    """Passed, failed, skipped, and the file of the first; nothing where the program ended before it wrote of them."""
    try:
        with open(os.path.join(results, name + ".json")) as file:
            found = [case for suite in json.load(file)["testsuites"] for case in suite["testsuite"]]
    except (OSError, ValueError):
        return None
    # A suite that is divided, or chosen from, names the other cases too.
    found = [case for case in found if case["status"] == "RUN"]
    skipped = sum(case["result"] == "SKIPPED" for case in found)
    failed = sum("failures" in case for case in found)
    return len(found) - failed - skipped, failed, skipped, found[0]["file"] if found else None


def was_skipped(entry):
    """Whether a test said so itself; CTest writes the same of what it could not start, with another reason."""
    skipped = entry.find("skipped")
    return skipped is not None and skipped.get("message", "").startswith("SKIP_")


def runs(tree):
    """Results of each entry of CTest that ran in a tree."""
    try:
        root = xml.etree.ElementTree.parse(os.path.join(tree, "test.xml")).getroot()
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        print(f"{tree}: no run of CTest: {error}", file=sys.stderr)
        return []
    found = []
    for entry in root.iter("testcase"):
        name, seconds = entry.get("name"), float(entry.get("time"))
        if entry.get("status") == "disabled":
            continue
        counted = cases(os.path.join(tree, "tests", "results"), name)
        passed, failed, skipped, source = counted or (0, 0, 0, None)
        if entry.get("status") == "run" and counted is None:
            passed = 1
        elif was_skipped(entry):
            skipped = max(skipped, 1)
        elif entry.get("status") != "run":
            failed = max(failed, 1)  # a crash, a leak at the end, a program that is missing: of no case, but not passed
        found.append(Run(name, seconds, passed, failed, skipped, source))
    return found


def count(trees):
    total = [0, 0, 0]
    for tree in trees:
        ran = runs(tree)
        if not ran:
            print("no test ran", file=sys.stderr)
            total[1] += 1
        for run in ran:
            total = [total[0] + run.passed, total[1] + run.failed, total[2] + run.skipped]
    print("{} passed, {} failed, {} skipped".format(*total))


def first_sentence(path):
    """First sentence of the comment or the docstring that a source file begins with."""
    try:
        with open(path) as file:
            text = file.read(4000)
    except (OSError, TypeError):
        return ""
    if path.endswith(".py"):
        found = re.search(r'"""(.*?)"""', text, re.DOTALL)
        words = found.group(1) if found else ""
    else:
        lines = []
        for line in text.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line[2:].strip())
        words = " ".join(lines)
    return re.split(r"(?<=\.) ", " ".join(words.split()), maxsplit=1)[0].rstrip(".")


def source_of(name):
    """A script that CTest runs by itself: cli.resume is tests/cli/resume_test.py."""
    folder, _, rest = name.partition(".")
    here = os.path.dirname(os.path.abspath(__file__))
    for script in [f"{rest}_test.py", f"{rest}.py", f"check_{rest}.py"]:
        if os.path.exists(os.path.join(here, folder, script)):
            return os.path.join(here, folder, script)
    return None


def times(trees):
    for tree in trees:
        ran = runs(tree)
        print(f"\n{tree}: {sum(run.seconds for run in ran):.0f} seconds of {len(ran)} processes\n")
        print(f"{'seconds':>8} {'cases':>6}  suite: what it proves")
        for run in sorted(ran, key=lambda run: -run.seconds):
            proves = first_sentence(run.source or source_of(run.name))
            print(f"{run.seconds:8.1f} {run.passed + run.failed + run.skipped:6}  {run.name}" + (f": {proves}" if proves else ""))


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in ("count", "times"):
        sys.exit(__doc__)
    {"count": count, "times": times}[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
