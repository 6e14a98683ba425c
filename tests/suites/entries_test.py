"""Suites become entries of CTest by their labels, and a run counts case by case: what failed, crashed or did not run is seen."""
import json
import os
import subprocess
import sys
import tempfile
import textwrap

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# A program as GoogleTest makes them: it lists its cases, and runs those of its filter.
PROGRAM = """\
#!{python}
import json, sys
cases = [("Plain", "One", None), ("Plain", "Two", None), ("Odd", "Long", None)]
cases += [("Policies/Every", name + "/" + str(i), value) for name in ("Moves", "Skips")
          for i, value in enumerate(['"host"', '"stream"'])]
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if "=" in a)
suites = {{}}
for suite, name, value in cases:
    suites.setdefault(suite, []).append({{"name": name, "value_param": value}} if value else {{"name": name}})
json.dump({{"testsuites": [{{"name": s, "testsuite": c}} for s, c in suites.items()]}}, open(options["gtest_output"][5:], "w"))
"""


def lists(folder, *options):
    """Name, filter and labels of each entry."""
    program = os.path.join(folder, "program")
    with open(program, "w") as file:
        file.write(PROGRAM.format(python=sys.executable))
    os.chmod(program, 0o755)
    output = os.path.join(folder, "suites.cmake")
    done = subprocess.run([sys.executable, os.path.join(TESTS, "list_suites.py"), program, "--prefix", "m", "--output", output,
                           "--results", folder, *options], capture_output=True, text=True)
    if done.returncode != 0:
        return done.stderr.strip()
    lines = open(output).read().splitlines()
    found = {}
    for test, properties in zip(lines[::2], lines[1::2]):
        words = [part.split("]==]")[0] for part in test.split("[==[")[1:]]
        labels = properties.split("LABELS [==[")[1].split("]==]")[0]
        found[words[0]] = (words[2].removeprefix("--gtest_filter="), labels)
    return found


def check(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: {found!r}, expected {expected!r}")


def check_entries(folder):
    check("an entry a suite", lists(folder),
          {"m.Plain": ("Plain.*", ""), "m.Odd": ("Odd.*", ""), "m.Every": ("Policies/Every.*", "")})
    check("labels part a suite", lists(folder, "--slow", 'Policies/*"stream"', "--long", "*Long*"),
          {"m.Plain": ("Plain.*", ""), "m.Odd.long": ("Odd.*", "long"),
           "m.Every": ("Policies/Every.Moves/0:Policies/Every.Skips/0", ""),
           "m.Every.slow": ("Policies/Every.Moves/1:Policies/Every.Skips/1", "slow")})
    check("sanitized are those named", lists(folder, "--sanitizer=ADDRESS", "--sanitize", "*", "!Policies/*Skips*", "!Odd.*"),
          {"m.Plain": ("Plain.*", "sanitize"), "m.Odd.unsanitized": ("Odd.*", ""),
           "m.Every": ("Policies/Every.Moves/*", "sanitize"), "m.Every.unsanitized": ("Policies/Every.Skips/*", "")})
    check("shards have all of a filter", lists(folder, "--cases", "Policies/*", "--shards", "Every=2"),
          {"m.Every.1of2": ("Policies/Every.*", ""), "m.Every.2of2": ("Policies/Every.*", "")})
    for options in [("--slow", "Gone.*"), ("--shards", "Gone=2"), ("--cases", "Gone.*")]:
        check(f"{options} names nothing and is refused", isinstance(lists(folder, *options), str), True)


def case(result="COMPLETED", failures=None):
    return {"status": "RUN", "result": result, "file": "", **({"failures": failures} if failures else {})}


def check_count(folder):
    results = os.path.join(folder, "tests", "results")
    os.makedirs(results)
    for name, cases in {"whole": [case(), case("SKIPPED")], "failed": [case(), case(failures=["x"]), case(failures=["y"])],
                        "leaked": [case()]}.items():
        with open(os.path.join(results, name + ".json"), "w") as file:
            json.dump({"testsuites": [{"testsuite": cases}]}, file)
    with open(os.path.join(folder, "test.xml"), "w") as file:
        file.write(textwrap.dedent("""\
            <testsuite>
              <testcase name="whole" time="1" status="run"/>
              <testcase name="failed" time="1" status="fail"><failure/></testcase>
              <testcase name="leaked" time="1" status="fail"><failure/></testcase>
              <testcase name="crashed" time="1" status="fail"><failure/></testcase>
              <testcase name="script" time="1" status="run"/>
              <testcase name="skipped" time="0" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
              <testcase name="missing" time="0" status="notrun"><skipped message="Unable to find executable"/></testcase>
              <testcase name="disabled" time="0" status="disabled"/>
            </testsuite>
            """))

    def counted(tree):
        return subprocess.run([sys.executable, os.path.join(TESTS, "summary.py"), "count", tree], check=True,
                              capture_output=True, text=True).stdout.strip()

    check("cases are counted", counted(folder), "4 passed, 5 failed, 2 skipped")
    check("where nothing ran, something failed", counted(results), "0 passed, 1 failed, 0 skipped")


with tempfile.TemporaryDirectory() as of_entries, tempfile.TemporaryDirectory() as of_count:
    check_entries(of_entries)
    check_count(of_count)
