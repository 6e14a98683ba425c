#!/usr/bin/env python3
"""Writes CTest's entries for a program of GoogleTest: one a suite, instantiations of it together, with its labels.

Run after each build of the program, by tandem_suites of cmake/TandemSuites.cmake. A suite whose cases have different labels
becomes several entries: PREFIX.Suite, PREFIX.Suite.slow and so on.

Patterns are those of a shell, over a case's name, "Policies/EveryPolicy.Moves/3", or with its parameter instead of the
number, "Policies/EveryPolicy.Moves/\"host\""; one with a leading `!` takes away from what those before it have named.
"""
import argparse
import collections
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile


def listing(program):
    """List that the program prints of its suites, without running any."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "listing.json")
        environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=0")
        environment.pop("GTEST_TOTAL_SHARDS", None)
        subprocess.run([program, "--gtest_list_tests", f"--gtest_output=json:{path}"], check=True, timeout=120,
                       stdout=subprocess.DEVNULL, env=environment)
        with open(path) as file:
            return json.load(file)["testsuites"]


def family(suite):
    """EveryPolicy, of Policies/EveryPolicy; Codes, of Types/Codes/0."""
    parts = suite.split("/")
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts[-1]


class Case:
    def __init__(self, suite, described):
        self.suite = suite
        self.name = suite + "." + described["name"]
        self.family = family(suite)
        value = described.get("value_param")
        number = re.search(r"/\d+$", self.name)
        self.texts = [self.name]
        if value is not None and number:
            self.texts.append(self.name[:number.start() + 1] + value)

    def matches(self, patterns):
        named = False
        for pattern in patterns:
            wanted = not pattern.startswith("!")
            if named != wanted and any(fnmatch.fnmatchcase(text, pattern.removeprefix("!")) for text in self.texts):
                named = wanted
        return named


def cases_of(program, patterns):
    found = [Case(suite["name"], case) for suite in listing(program) for case in suite["testsuite"]]
    return [case for case in found if "DISABLED_" not in case.name and case.matches(patterns)]


def labels_of(case, options):
    """Labels of a case, in the order in which they follow an entry's name; `sanitize` does not."""
    labels = []
    if case.matches(options.long):
        labels.append("long")
    if case.matches(options.slow):
        labels.append("slow")
    if case.matches(options.sanitize):
        labels.append("sanitize")
    return tuple(labels)


def filter_of(wanted, everything):
    """GoogleTest's filter for these cases, short where all of a suite, or all parameters of a case, are among them."""
    names = {case.name for case in wanted}
    by_suite, by_case = collections.defaultdict(list), collections.defaultdict(list)
    for case in everything:
        by_suite[case.suite].append(case.name)
        by_case[case.name.rsplit("/", 1)[0]].append(case.name)
    patterns = []
    for case in wanted:
        stem = case.name.rsplit("/", 1)[0]
        if names.issuperset(by_suite[case.suite]):
            pattern = case.suite + ".*"
        elif "." in stem and names.issuperset(by_case[stem]) and stem != case.name:
            pattern = stem + "/*"
        else:
            pattern = case.name
        if pattern not in patterns:
            patterns.append(pattern)
    return ":".join(patterns)


def entries(cases, everything, options):
    """(name, filter, labels, index and number of the shard) of each."""
    groups = collections.defaultdict(list)
    for case in cases:
        groups[case.family, labels_of(case, options)].append(case)
    shards = dict(text.split("=") for text in options.shards)
    for unknown in shards.keys() - {case.family for case in cases}:
        sys.exit(f"{options.program}: no suite {unknown}, which is to be divided")
    for (name, labels), group in groups.items():
        title = ".".join([options.prefix, name, *(label for label in labels if label != "sanitize")])
        if options.sanitizer and "sanitize" not in labels:
            title += ".unsanitized"
        count = min(int(shards.get(name, 1)), len(group))
        for shard in range(count):
            part = title + (f".{shard + 1}of{count}" if count > 1 else "")
            yield part, filter_of(group, everything), labels, (shard, count)


def quoted(text):
    return f"[==[{text}]==]"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--output", required=True, help="file that CTest includes")
    parser.add_argument("--results", required=True, help="folder for what each entry says of its cases")
    parser.add_argument("--sanitizer", default="", help="address or thread, where the tree has one")
    parser.add_argument("--timeout", default="600", help="seconds for an entry")
    for patterns in ["cases", "long", "slow", "sanitize", "shards", "environment"]:
        parser.add_argument("--" + patterns, nargs="*", default=[])
    options = parser.parse_args()

    everything = cases_of(options.program, ["*"])
    cases = [case for case in everything if case.matches(options.cases or ["*"])]
    if not cases:
        sys.exit(f"{options.program}: no case of {options.cases}")
    for pattern in options.cases + options.long + options.slow + options.sanitize:
        if not any(case.matches([pattern.removeprefix("!")]) for case in everything):
            sys.exit(f"{options.program}: no case is named by {pattern}")
    lines = []
    for name, pattern, labels, (shard, count) in entries(cases, everything, options):
        result = os.path.join(options.results, name + ".json")
        lines.append(f"add_test({quoted(name)} {quoted(options.program)} {quoted('--gtest_filter=' + pattern)} --gtest_brief=1"
                     f" {quoted('--gtest_output=json:' + result)})")
        environment = list(options.environment)
        if count > 1:
            environment += [f"GTEST_TOTAL_SHARDS={count}", f"GTEST_SHARD_INDEX={shard}"]
        lines.append(f"set_tests_properties({quoted(name)} PROPERTIES TIMEOUT {options.timeout} COST {20 if count > 1 else 1}"
                     f" LABELS {quoted(';'.join(labels))} ENVIRONMENT {quoted(';'.join(environment))})")
    with open(options.output, "w") as file:
        file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
