#!/usr/bin/env python3
"""scripts/run_gpu_checks in a folder like the bundle's, where programs and tools are stand-ins that succeed, fail or
hang as told: what it reports, how it ends, and that what it has learnt is never lost.

Usage: run_gpu_checks_test.py SCRIPT GTEST_PROGRAM
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SCRIPT, SUITE = (Path(word).resolve() for word in sys.argv[1:3])
del sys.argv[1:3]

TANDEM = """#!/bin/bash
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2 ;;
    --policy) policy=$2 ;;
    --model) model=$2 ;;
  esac
  shift
done
if [ "$model" = gpt2 ]; then echo $$ > "$RUN"; sleep 0.4; fi
mkdir -p "$out"
digest=aa
if [ "$policy" = "$OTHER_DIGEST" ]; then digest=bb; fi
echo '{"state_digest": "'$digest'", "compute_key": "cuda gpu=Stand-in"}' > "$out/summary.json"
"""
# The real frame of tests, a single case of it unless another is asked for.
SUITE_WRAPPER = """#!/bin/bash
if [ -n "$NO_GPU" ]; then echo "[  SKIPPED ] 7 tests: no NVIDIA driver is installed"; exit 0; fi
exec "{suite}" --gtest_filter={case} "$@"
"""
SANITIZER = """#!/bin/bash
echo "$*" >> "$LOG"
case $* in *racecheck*) if [ -n "$HANG" ]; then echo > "$HANG"; sleep 60; fi ;; esac
if [ -n "$UNSUPPORTED" ]; then echo "========= Error: Device not supported"; exit 1; fi
case $* in *"$RACE"*) [ -n "$RACE" ] && exit 99 ;; esac
exit 0
"""
SMI = """#!/bin/bash
case $* in
  *query-compute-apps*)
    echo 4242, 10240
    if [ -n "$OWN" ] && [ -e "$RUN" ]; then echo "$(cat "$RUN"), $OWN"; fi ;;
  *memory.used*) if [ -n "$UNCOUNTED" ]; then echo "[N/A]"; elif [ -e "$SEEN" ]; then echo "${MOST:-1500}"; else echo 500; echo > "$SEEN"; fi ;;
  *name*) echo 'Stand-in "GPU"' ;;
  *) echo 600.1 ;;
esac
"""
BENCHMARK = """#!/bin/bash
if [ -z "${WRITES+set}" ]; then WRITES='{"benchmarks": []}'; fi
for word in "$@"; do case $word in --benchmark_out=*) echo "$WRITES" > "${word#*=}" ;; esac; done
exit ${ENDS_WITH:-0}
"""


class RunGpuChecks(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="run_gpu_checks_")
        self.addCleanup(folder.cleanup)
        self.work = Path(folder.name)
        self.bundle, tools = self.work / "bundle", self.work / "tools"
        self.report = self.work / "report.json"
        tools.mkdir()
        (self.bundle / "bin").mkdir(parents=True)
        shutil.copy(SCRIPT, self.bundle)
        (self.bundle / "commit").write_text("1234abc\n")
        suites = {name: SUITE_WRAPPER.format(suite=SUITE, case=case)
                  for name, case in {"gpu_suite_device": "CudaDevice.DescribesItself",
                                     "gpu_suite_group": "CudaDevice.DescribesItself",
                                     "gpu_suite_ops": "CudaDeviceMemory.BlocksMayOutliveTheDevice"}.items()}
        for path, text in {**{self.bundle / "bin" / name: text for name, text in suites.items()},
                           self.bundle / "bin" / "tandem": TANDEM, self.bundle / "bin" / "bench_gpu": BENCHMARK,
                           tools / "compute-sanitizer": SANITIZER, tools / "nvidia-smi": SMI}.items():
            path.write_text(text)
            path.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(self.work / "log"),
                            "SEEN": str(self.work / "seen"), "RUN": str(self.work / "run")}

    def command(self, *arguments):
        return [self.bundle / "run_gpu_checks", "--out", self.report, *arguments]

    def run_checks(self, *arguments, **environment):
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=120,
                              env={**self.environment, **environment})
        report = json.loads(self.report.read_text()) if self.report.exists() else None
        return done, report

    def test_all_is_right(self):
        done, report = self.run_checks()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertTrue(report["passed"])
        self.assertEqual(report["finished"], ["suites", "sanitizer", "digests", "ceiling", "benchmarks"])
        self.assertEqual(report["skipped"], {})
        self.assertEqual(report["commit"], "1234abc")
        self.assertEqual(report["machine"]["gpu"], "Stand-in GPU")
        self.assertEqual(report["compute_key"], "cuda gpu=Stand-in")
        self.assertEqual([(s["name"], s["tests"], s["failures"], s["exit"]) for s in report["suites"]],
                         [("gpu_suite_device", 1, 0, 0), ("gpu_suite_group", 1, 0, 0), ("gpu_suite_ops", 1, 0, 0)])
        self.assertEqual(len(report["sanitizer"]), 6)
        self.assertEqual(set(report["digests"].values()), {"aa"})
        self.assertEqual(len(report["digests"]), 10)
        ceiling = report["ceiling"]
        self.assertGreater(ceiling.pop("samples"), 0)
        self.assertEqual(ceiling, {"asked_mib": 2048, "taken_mib": 1000})
        self.assertEqual(report["benchmarks"], {"bench_gpu": {"benchmarks": []}})
        self.assertIn("--tool memcheck --report-api-errors no --error-exitcode 99", (self.work / "log").read_text())

    def test_each_failure_fails_it_and_the_rest_is_done(self):
        for environment, part in (({"RACE": "racecheck"}, "sanitizer"), ({"OTHER_DIGEST": "stream"}, "digests"),
                                  ({"MOST": "2549"}, "ceiling")):
            (self.work / "seen").unlink(missing_ok=True)
            done, report = self.run_checks("--only", "sanitizer,digests,ceiling", **environment)
            self.assertEqual(done.returncode, 1, part)
            self.assertFalse(report["passed"])
            self.assertEqual(report["finished"], ["sanitizer", "digests", "ceiling"])
        (self.bundle / "bin" / "gpu_suite_ops").write_text("#!/bin/bash\nkill -SEGV $$\n")
        done, report = self.run_checks("--only", "suites")
        self.assertEqual((done.returncode, report["passed"]), (1, False))
        self.assertEqual(report["suites"][2]["tests"], 0)
        self.assertEqual(report["suites"][2]["failures"], None)

    def test_what_others_take_meanwhile_does_not_count(self):
        # Of a ceiling of 2,048 MiB; 500 are in use before.
        for most, own, taken in ((9000, 1900, 1964), (9000, 1990, 2054), (2400, 1890, 1900), (600, 1890, 1890),
                                 (600, 2049, 2049)):
            (self.work / "seen").unlink(missing_ok=True)
            done, report = self.run_checks("--only", "ceiling", MOST=str(most), OWN=str(own))
            self.assertEqual(report["ceiling"]["taken_mib"], taken)
            self.assertEqual(done.returncode, int(taken > 2048), done.stderr)

    def test_a_suite_without_tests_fails_it(self):
        wrapper = SUITE_WRAPPER.format(suite=SUITE, case="NoSuchTest.*")
        (self.bundle / "bin" / "gpu_suite_ops").write_text(wrapper)
        done, report = self.run_checks("--only", "suites")
        self.assertEqual((done.returncode, report["suites"][2]["tests"]), (1, 0), "nothing was tested")

    def test_a_tool_that_does_not_know_the_machine_is_noted(self):
        done, report = self.run_checks("--only", "sanitizer", UNSUPPORTED="1")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(len([row for row in report["sanitizer"] if "does not support" in row["note"]]), 6)

    def test_memory_that_is_not_counted_is_left_out(self):
        done, report = self.run_checks("--only", "ceiling,benchmarks", UNCOUNTED="1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("nvidia-smi does not count memory here: left out", done.stderr)
        self.assertIsNone(report["ceiling"])
        self.assertEqual(report["finished"], ["benchmarks"])
        self.assertEqual(report["skipped"], {"ceiling": "nvidia-smi does not count memory here"})

    def test_a_tool_that_is_missing_is_skipped_and_not_passed(self):
        (self.work / "tools" / "compute-sanitizer").unlink()
        done, report = self.run_checks("--only", "sanitizer,benchmarks")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["finished"], ["benchmarks"])
        self.assertEqual(report["skipped"], {"sanitizer": "compute-sanitizer is not installed"})
        self.assertIn("not all was checked", done.stderr)

    def test_half_a_file_of_a_benchmark_leaves_the_report_whole(self):
        for environment in ({"WRITES": '{"benchmarks": [', "ENDS_WITH": "139"}, {"WRITES": '{"benchmarks": ['},
                            {"WRITES": '{"benchmarks": [] }', "ENDS_WITH": "1"}, {"WRITES": ""}):
            done, report = self.run_checks("--only", "benchmarks", **environment)
            self.assertEqual((done.returncode, report["passed"]), (1, False), environment)
            self.assertEqual(report["benchmarks"], {"bench_gpu": None})

    def test_a_run_that_is_killed_has_reported_what_it_knew(self):
        hangs = self.work / "hangs"
        process = subprocess.Popen(self.command("--only", "suites,sanitizer"), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True,
                                   env={**self.environment, "HANG": str(hangs)})
        deadline = time.monotonic() + 60
        while not hangs.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        report = json.loads(self.report.read_text())
        self.assertEqual(report["finished"], ["suites"])
        self.assertEqual(len(report["suites"]), 3)
        self.assertEqual([row["tool"] for row in report["sanitizer"]], ["memcheck", "memcheck"])

    def test_misuse_and_machines_without_a_gpu(self):
        for words in (("--only", "suite"), ("--fast",)):
            done, report = self.run_checks(*words)
            self.assertEqual(done.returncode, 2)
            self.assertIn("usage: run_gpu_checks", done.stderr)
            self.assertIsNone(report)
        done, report = self.run_checks(NO_GPU="1")
        self.assertEqual(done.returncode, 5)
        self.assertEqual(done.stderr, "run_gpu_checks: no GPU: no NVIDIA driver is installed\n")
        self.assertIsNone(report)


if __name__ == "__main__":
    unittest.main()
