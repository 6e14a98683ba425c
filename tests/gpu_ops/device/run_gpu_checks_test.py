#!/usr/bin/env python3
"""scripts/run_gpu_checks in a folder like the bundle's, where programs and tools are stand-ins that succeed, fail or
hang as told: what it reports, how it ends, and that what it has learnt is never lost.

Usage: run_gpu_checks_test.py SCRIPT GTEST_PROGRAM
"""
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from pathlib import Path

SCRIPT, SUITE = (Path(word).resolve() for word in sys.argv[1:3])
del sys.argv[1:3]

TANDEM = """#!/bin/bash
echo "tandem $*" >> "$LOG"
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
case $out in */digest-$HANGS_IN) sleep 60 ;; esac
if [ "$policy" = "$OTHER_DIGEST" ]; then digest=bb; fi
echo '{"state_digest": "'$digest'", "compute_key": "cuda gpu=Stand-in; attention '${ATTENTION:-cudnn 91900}'"}' > "$out/summary.json"
"""
# The real frame of tests, with a few cases of it whatever is asked for.
SUITE_WRAPPER = """#!/bin/bash
if [ -n "$NO_GPU" ]; then echo "[  SKIPPED ] 7 tests: no NVIDIA driver is installed"; exit 0; fi
echo "$(basename "$0") $GTEST_SHARD_INDEX/$GTEST_TOTAL_SHARDS $*" >> "$LOG"
cases={cases}
case $* in *"filter=*$EMPTY."*) cases=NoSuchTest.* ;; esac
exec "{suite}" "$@" "--gtest_filter=$cases"
"""
# A suite of which a test fails, and which does not end by itself.
BROKEN_SUITE = """#!/bin/bash
echo "[ RUN      ] Ops.Right"; echo "[       OK ] Ops.Right (3 ms)"
echo "[ RUN      ] Ops.Wrong/0"; echo "[  FAILED  ] Ops.Wrong/0, where GetParam() = 4-byte object <00-00 00-00> (2 ms)"
echo "[ RUN      ] Ops.RightAgain"; echo 'words "of" its own'
{end}
"""
SANITIZER = """#!/bin/bash
echo "$*" >> "$LOG"
if [ -z "$NOTHING" ]; then echo "[ RUN      ] A.Test"; fi
case $* in *racecheck*) if [ -n "$HANG" ]; then echo $$ > "$HANG"; sleep 60; fi ;; esac
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
echo "bench $*" >> "$LOG"
if [ -z "${WRITES+set}" ]; then WRITES='{"benchmarks": []}'; fi
for word in "$@"; do case $word in --benchmark_out=*) echo "$WRITES" > "${word#*=}" ;; esac; done
case $1 in *"$FAILING_GROUP"*) exit ${ENDS_WITH:-0} ;; esac
"""
# Notes how long it lets a program run.
TIMEOUT = """#!/bin/bash
echo "limit $3" >> "$LOG"
exec {timeout} "$@"
"""
GROUPS = ["LinearOps", "AttentionOps", "PlainAttention", "NormOps", "PointwiseOps", "ExpertOps", "UpdateOps", "others"]
PARTS = ["device", "ops", "digests", "ceiling", "benchmarks", "group", "offload", "sanitizer"]


def matches(name, gtest_filter):
    wanted, _, unwanted = gtest_filter.partition("-")
    return any(fnmatch.fnmatchcase(name, p) for p in (wanted or "*").split(":")) and not any(
        fnmatch.fnmatchcase(name, p) for p in unwanted.split(":"))


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
        two = "CudaDevice.DescribesItself:CudaDeviceMemory.BlocksMayOutliveTheDevice"
        suites = {f"gpu_suite_{name}": SUITE_WRAPPER.format(suite=SUITE, cases=cases) for name, cases in
                  {"device": two, "ops": "CudaDevice.DescribesItself", "group": two, "offload": two}.items()}
        for path, text in {**{self.bundle / "bin" / name: text for name, text in suites.items()},
                           self.bundle / "bin" / "tandem": TANDEM, self.bundle / "bin" / "bench_gpu": BENCHMARK,
                           tools / "compute-sanitizer": SANITIZER, tools / "nvidia-smi": SMI,
                           tools / "timeout": TIMEOUT.format(timeout=shutil.which("timeout"))}.items():
            self.script(path, text)
        self.environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(self.work / "log"),
                            "SEEN": str(self.work / "seen"), "RUN": str(self.work / "run")}

    def script(self, path, text):
        path.write_text(text)
        path.chmod(0o755)

    def command(self, *arguments):
        return [self.bundle / "run_gpu_checks", "--out", self.report, "--jobs", "2", *arguments]

    def asked(self, first):
        return [line for line in (self.work / "log").read_text().splitlines() if line.startswith(first + " ")]

    def packed(self):
        with tarfile.open(f"{self.report}.logs.tar.gz") as archive:
            return {Path(member.name).name: archive.extractfile(member).read().decode()
                    for member in archive if member.isfile()}

    def run_checks(self, *arguments, **environment):
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=120,
                              env={**self.environment, **environment})
        report = json.loads(self.report.read_text()) if self.report.exists() else None
        return done, report

    def test_all_is_right(self):
        done, report = self.run_checks()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertTrue(report["passed"])
        self.assertEqual(report["finished"], PARTS)
        self.assertEqual(report["skipped"], {})
        self.assertEqual(report["commit"], "1234abc")
        self.assertEqual(report["machine"]["gpu"], "Stand-in GPU")
        self.assertEqual(report["compute_key"], "cuda gpu=Stand-in; attention cudnn 91900")
        suites = [(s["name"], s["tests"], s["failures"], s["exit"], s["failed"], s["died_in"]) for s in report["suites"]]
        self.assertEqual(suites, [("gpu_suite_device", 2, 0, 0, [], None)] +
                         [(f"gpu_suite_ops.{group}", 1, 0, 0, [], None) for group in GROUPS] +
                         [(f"gpu_suite_{name}.{i}of2", 1, 0, 0, [], None) for name in ("group", "offload") for i in (1, 2)])
        self.assertEqual(set(report["digests"].values()), {"aa"})
        self.assertEqual(len(report["digests"]), 10)
        ceiling = report["ceiling"]
        self.assertGreater(ceiling.pop("samples"), 0)
        self.assertRegex(" ".join(self.asked("tandem")), "--model gpt2 .*--steps 200 ")
        self.assertEqual(ceiling, {"asked_mib": 2048, "taken_mib": 1000})
        self.assertEqual(report["benchmarks"], {f"bench_gpu.{group}": {"benchmarks": []} for group in
                                                ("copy", "kernel", "product", "attention", "experts", "others")})
        self.assertEqual([(row["tool"], row["suite"]) for row in report["sanitizer"]],
                         [(tool, f"gpu_suite_{suite}") for tool in ("memcheck", "racecheck", "initcheck")
                          for suite in ("device", "ops", "ops.experts", "offload")])
        self.assertIn("--tool memcheck --report-api-errors no --error-exitcode 99", (self.work / "log").read_text())
        self.assertLess(done.stdout.index("cuda gpu=Stand-in"), done.stdout.index("== device"), "before all else")

    def test_few_files_hold_all_that_was_said(self):
        self.run_checks("--only", "ops,digests,ceiling,benchmarks,group")
        self.assertEqual(sorted(p.name for p in self.work.glob("report*")), ["report.json", "report.json.logs.tar.gz"])
        packed = self.packed()
        self.assertIn("[ RUN      ] CudaDevice.DescribesItself", packed["gpu_suite_ops.others.log"])
        self.assertEqual(json.loads(packed["gpu_suite_ops.NormOps.json"])["tests"], 1)
        for name in ("key.log", "digest-auto.log", "ceiling.log", "bench_gpu.copy.json", "gpu_suite_group.2of2.log"):
            self.assertIn(name, packed)
        self.run_checks("--only", "device", "--logs", str(self.work / "logs"))
        self.assertTrue((self.work / "logs" / "gpu_suite_device.json").exists())

    def test_each_test_has_its_process_and_is_in_one_alone(self):
        self.run_checks("--only", "ops,group,benchmarks")
        filters = [line.split("--gtest_filter=")[1].split()[0] for line in self.asked("gpu_suite_ops")]
        self.assertEqual(len(filters), 8)
        for name in ("Activations/LinearOps.A/f32", "Activations/AttentionOps.B/bf16", "Activations/PlainAttention.C/f32",
                     "Activations/NormOps.D/bf16", "Activations/PointwiseOps.E/f32", "Activations/ExpertOps.F/bf16",
                     "UpdateOps.G", "RefusedOps.H", "Scratch.I", "ExpertChoice.J", "Some/NewOps.K/3"):
            self.assertEqual(sum(matches(name, f) for f in filters), 1, name)
        self.assertEqual(sorted(line.split()[1] for line in self.asked("gpu_suite_group")), ["0/2", "1/2"])
        filters = [line.split("--benchmark_filter=")[1].split()[0] for line in self.asked("bench")]
        self.assertEqual(len(filters), 6)
        for name in ("copy/a", "kernel/copy", "product/b", "attention/c", "experts/d", "head_loss/e", "new/f"):
            self.assertEqual(sum((f[0] == "-") != bool(re.search(f.lstrip("-"), name)) for f in filters), 1, name)

    def test_each_failure_fails_it_and_the_rest_is_done(self):
        for environment, part in (({"RACE": "racecheck"}, "sanitizer"), ({"OTHER_DIGEST": "stream"}, "digests"),
                                  ({"MOST": "2549"}, "ceiling"), ({"NOTHING": "1"}, "sanitizer")):
            (self.work / "seen").unlink(missing_ok=True)
            done, report = self.run_checks("--only", f"{part},device", **environment)
            self.assertEqual(done.returncode, 1, part)
            self.assertFalse(report["passed"])
            self.assertEqual(report["finished"], [part, "device"])

    def test_a_suite_that_breaks_off_or_hangs_says_where(self):
        stubborn = "trap '' TERM; while true; do sleep 0.1; done"
        for end, code in (("kill -SEGV $$", 139), ("sleep 60", 124), (stubborn, 137)):
            self.script(self.bundle / "bin" / "gpu_suite_group", BROKEN_SUITE.format(end=end))
            begun = time.monotonic()
            done, report = self.run_checks("--only", "device,group,offload", "--seconds", "1", "--jobs", "1")
            self.assertLess(time.monotonic() - begun, 30)
            self.assertEqual((done.returncode, report["passed"]), (1, False))
            self.assertEqual(report["finished"], ["device", "group", "offload"])
            _, broken, after = report["suites"]
            self.assertEqual((broken["exit"], broken["tests"], broken["failures"]), (code, 3, None))
            self.assertEqual((broken["failed"], broken["died_in"]), (["Ops.Wrong/0"], "Ops.RightAgain"))
            self.assertIn("words of its own", broken["said"])
            self.assertEqual((after["name"], after["exit"], after["died_in"]), ("gpu_suite_offload.1of1", 0, None))
            self.assertIn('words "of" its own', done.stderr)

    def test_a_run_that_hangs_costs_no_other(self):
        done, report = self.run_checks("--only", "digests", "--seconds", "1", HANGS_IN="host")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(report["digests"].pop("host"), "")
        self.assertEqual(list(report["digests"].values()), ["aa"] * 9)
        self.assertIn("its time was up", done.stderr)

    def test_what_there_is_no_time_for_is_skipped(self):
        _, report = self.run_checks("--minutes", "0", "--only", "suites")
        self.assertEqual(list(report["skipped"]), ["device", "ops", "group", "offload"])
        done, report = self.run_checks("--minutes", "0")
        self.assertEqual((done.returncode, report["finished"]), (0, []))
        self.assertEqual(list(report["skipped"]), PARTS)
        self.assertEqual(report["skipped"]["sanitizer"], "no time was left for memcheck.gpu_suite_device")
        self.assertIn("not all was checked", done.stderr)
        for minutes, most in (("1", 60), ("9", 240)):
            (self.work / "log").unlink(missing_ok=True)
            self.run_checks("--minutes", minutes, "--only", "ops")
            limits = [int(line.split()[1]) for line in self.asked("limit")]
            self.assertTrue(most - 10 < max(limits) <= most, limits)

    def test_plain_attention_is_told_unless_it_is_wanted(self):
        done, report = self.run_checks("--only", "device", ATTENTION="plain")
        self.assertEqual((done.returncode, report["passed"]), (1, False))
        self.assertEqual(report["skipped"], {"cudnn": "attention is the plain one"})
        self.assertIn("cuDNN is not used", done.stderr)
        done, report = self.run_checks("--only", "device", "--plain-attention", ATTENTION="plain")
        self.assertEqual((done.returncode, report["skipped"]), (0, {}), done.stderr)

    def test_what_others_take_meanwhile_does_not_count(self):
        # The ceiling is 2,048 MiB; 500 are in use before.
        for most, own, taken in ((9000, 1900, 1964), (9000, 1990, 2054), (2400, 1890, 1900), (600, 1890, 1890),
                                 (600, 2049, 2049)):
            (self.work / "seen").unlink(missing_ok=True)
            done, report = self.run_checks("--only", "ceiling", MOST=str(most), OWN=str(own))
            self.assertEqual(report["ceiling"]["taken_mib"], taken)
            self.assertEqual(done.returncode, int(taken > 2048), done.stderr)

    def test_a_suite_without_tests_fails_it(self):
        for name, part in (("gpu_suite_ops", "ops"), ("gpu_suite_offload", "offload")):
            self.script(self.bundle / "bin" / name, SUITE_WRAPPER.format(suite=SUITE, cases="NoSuchTest.*"))
            done, report = self.run_checks("--only", part)
            self.assertEqual((done.returncode, report["suites"][1]["tests"]), (1, 0), "nothing was tested")

    def test_a_kind_of_operation_without_tests_fails_it(self):
        done, report = self.run_checks("--only", "ops", EMPTY="NormOps")
        self.assertEqual((done.returncode, [s["tests"] for s in report["suites"]]), (1, [1, 1, 1, 0, 1, 1, 1, 1]))

    def test_a_shard_may_be_empty(self):
        self.script(self.bundle / "bin" / "gpu_suite_group", SUITE_WRAPPER.format(suite=SUITE, cases="CudaDevice.*"))
        done, report = self.run_checks("--only", "group")
        self.assertEqual((done.returncode, [s["tests"] for s in report["suites"]]), (0, [1, 0]))

    def test_a_suite_that_no_part_runs_is_told(self):
        self.script(self.bundle / "bin" / "gpu_suite_new", "#!/bin/bash\n")
        done, _ = self.run_checks("--only", "device")
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "no part runs .*gpu_suite_new")

    def test_a_tool_that_does_not_know_the_machine_is_noted(self):
        done, report = self.run_checks("--only", "sanitizer", UNSUPPORTED="1")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(len([row for row in report["sanitizer"] if "does not support" in row["note"]]), 12)

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
            self.assertEqual(set(report["benchmarks"].values()), {None})
        done, report = self.run_checks("--only", "benchmarks", FAILING_GROUP="^product", ENDS_WITH="139")
        self.assertEqual([name for name, result in report["benchmarks"].items() if result is None], ["bench_gpu.product"])

    def begin_and_hang(self):
        hangs = self.work / "hangs"
        hangs.unlink(missing_ok=True)
        process = subprocess.Popen(self.command("--only", "device,sanitizer", "--jobs", "1"), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True,
                                   env={**self.environment, "HANG": str(hangs)})
        deadline = time.monotonic() + 60
        while not (hangs.exists() and hangs.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return process, int(hangs.read_text())

    def test_a_run_that_is_killed_has_reported_what_it_knew(self):
        process, hanging = self.begin_and_hang()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.kill(hanging, signal.SIGKILL)
        report = json.loads(self.report.read_text())
        self.assertEqual(report["finished"], ["device"])
        self.assertEqual([suite["name"] for suite in report["suites"]], ["gpu_suite_device"])
        self.assertEqual([row["tool"] for row in report["sanitizer"]], ["memcheck"] * 4)
        self.assertIn("gpu_suite_device.log", self.packed())

    def test_a_run_that_is_ended_leaves_nothing_running(self):
        process, hanging = self.begin_and_hang()
        process.terminate()
        self.assertEqual(process.wait(timeout=20), 1)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{hanging}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertFalse(Path(f"/proc/{hanging}").exists())
        self.assertIn("[ RUN      ] A.Test", self.packed()["racecheck.gpu_suite_device.log"])

    def test_misuse_and_machines_without_a_gpu(self):
        for words in (("--only", "suite"), ("--fast",), ("--minutes", "9m")):
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
