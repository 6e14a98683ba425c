"""Policies side by side: bench, on this machine and over a profile of another."""
import bisect
import json
import re
import signal
import subprocess
import time

from program import PREDICTED, PROFILES, PROGRAM, SMALL, ProgramTest, main

SHARES = {"cpu_share", "gpu_streamed_share", "resident_share"}


class Bench(ProgramTest):
    def test_policies_side_by_side(self):
        self.calibrate()
        out = self.root / "report"
        result = self.succeed(self.run_program("bench", "--model", "tiny-gpt2", *SMALL, "--device-memory", "24MiB",
                                               "--steps", "2", "--policies", "host", "stream", "device", "auto",
                                               "--out", out, "--json"))
        report = json.loads(result.stdout)
        self.assertEqual(report, json.loads((out / "report.json").read_text()))
        self.assertLessEqual({"machine", "model", "version", "policies", "best", "chosen_by_auto"}, set(report))
        ran = [p for p in report["policies"] if p["fits"]]
        self.assertEqual([p["policy"] for p in report["policies"]], ["host", "stream", "device", "auto"])
        self.assertEqual([p["policy"] for p in ran][:2], ["host", "stream"])
        self.assertEqual(len({p["state_digest"] for p in ran}), 1)
        for policy in ran:
            self.assertEqual(set(policy["plan"]), SHARES)
            self.assertLessEqual(PREDICTED, set(policy["predicted"]))
            self.assertLessEqual(PREDICTED | {"tokens_per_second"}, set(policy["measured"]))
            self.assertAlmostEqual(sum(policy["plan"].values()), 1.0, places=6)
            self.assertEqual(policy["measured"]["steps"], 2)
            self.assertGreaterEqual(policy["measured"]["spread"], 0.0)
            self.assertEqual(policy["peak_device_bytes"], policy["planned_device_bytes"])
        host, stream = ran[:2]
        # Three fp32 values of each parameter, against its gradient in bf16.
        self.assertGreater(stream["d2h_bytes"], 4 * host["d2h_bytes"])
        page = (out / "report.html").read_text()
        self.assertNotRegex(page, r"(src|href)=[\"']https?:")
        for policy in ran:
            self.assertIn(policy["state_digest"], page)
            json.loads((out / f"simulated-{policy['policy']}.trace.json").read_text())

    def test_compute_factors_are_measured_once_and_a_damaged_file_is_told(self):
        self.calibrate()  # else each bench calibrates anew, and differently
        factors = self.root / "factors.json"
        bench = ["bench", "--model", "tiny-gpt2", *SMALL, "--steps", "1", "--policies", "host", "--compute-factors", factors]
        self.assertIn("measuring forward", self.succeed(self.run_program(*bench)).stderr)
        self.assertNotIn("measuring forward", self.succeed(self.run_program(*bench)).stderr)
        kept = json.loads(factors.read_text())
        for damaged in ("", "{", "[1]", json.dumps({**kept, "slower": [1]}), json.dumps({**kept, "slower": "fast"})):
            factors.write_text(damaged)
            self.refused(self.run_program(*bench), 4, str(factors))

    def test_state_and_frozen_weights_are_those_of_training(self):
        self.calibrate()
        def digest(*flags):
            rows = json.loads(self.succeed(self.run_program("bench", "--model", "tiny-gpt2", *SMALL, "--steps", "1",
                                                            "--policies", "host", "stream", "--json",
                                                            *flags)).stdout)["policies"]
            (digest,) = {row["state_digest"] for row in rows}
            return digest, rows[0]["planned_host_bytes"]
        whole, bytes_of_fp32 = digest()
        split, bytes_of_split = digest("--state", "split")
        moments, bytes_of_moments = digest("--state", "bf16-moments")
        in_bytes, bytes_of_bytes = digest("--state", "8bit-moments")
        lion, bytes_of_lion = digest("--state", "lion")
        frozen, bytes_of_some = digest("--freeze", "wte|wpe|h\\.0")
        self.assertEqual(split, whole)
        self.assertEqual(len({whole, moments, in_bytes, lion, frozen}), 5)
        self.assertLess(bytes_of_bytes, bytes_of_moments)
        self.assertLess(bytes_of_moments, bytes_of_split)
        self.assertLess(bytes_of_split, bytes_of_fp32)
        self.assertLess(bytes_of_lion, bytes_of_split)
        self.assertLess(bytes_of_some, bytes_of_fp32)

    def sweep(self, out, *flags):
        return ["bench", "--model", "tiny-gpt2", *SMALL, "--steps", "1", "--policies", "host", "stream", "--device-memory",
                "2MiB", "24MiB", "--link-bandwidth", "60MB/s", "2GB/s", "--out", out, *flags]

    def lines(self, out):
        path = out / "rows.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def test_a_sweep_has_a_row_for_each_policy_and_setting(self):
        self.calibrate()
        out = self.root / "sweep"
        result = self.succeed(self.run_program(*self.sweep(out, "--json")))
        rows = json.loads(result.stdout)["policies"]
        settings = [{"device-memory": m, "link-bandwidth": b} for m in ("2MiB", "24MiB") for b in ("60MB/s", "2GB/s")]
        self.assertEqual([(r["setting"], r["policy"]) for r in rows],
                         [(s, p) for s in settings for p in ("host", "stream")])
        self.assertEqual([r["fits"] for r in rows], [False] * 4 + [True] * 4)
        self.assertTrue(all("fit" in r["why"] for r in rows[:4]), rows[0])
        self.assertEqual(len({r["state_digest"] for r in rows[4:]}), 1)
        slow, fast = [r["predicted"]["step_seconds"] for r in rows[5::2]]
        self.assertGreater(slow, fast)
        for row in rows[4:]:
            self.assertLessEqual(row["predicted"]["ideal_step_seconds"], row["predicted"]["step_seconds"])
        self.assertRegex(result.stderr, r"8 of 8: stream, device-memory 24MiB, link-bandwidth 2GB/s, about 0:\d\d:\d\d left")
        self.assertEqual(len(self.lines(out)), 9)
        self.refused(self.run_program(*self.sweep(out)), 2, "exists")
        self.refused(self.run_program("bench", *SMALL, "--device-memory", "24MiB", "lots"), 2, "lots")
        self.refused(self.run_program("bench", *SMALL, "--resume"), 2, "--out")

    def test_an_interrupted_sweep_goes_on_with_the_rows_that_are_missing(self):
        self.calibrate()
        out = self.root / "sweep"
        # Steps that would take minutes, so that there is time to interrupt them.
        slow = [*self.sweep(out, "--json"), "--update-rate", "20k"]
        process = subprocess.Popen([PROGRAM, *map(str, slow)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=self.environment())
        while len(self.lines(out)) < 5 and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 130, said)
        self.assertEqual(len(self.lines(out)), 5)
        self.assertEqual(json.loads(printed)["missing"], 4)
        self.assertIn("--resume", said)
        self.assertEqual(len(json.loads((out / "report.json").read_text())["policies"]), 4)

    def interrupted_at(self, words, number, bench):
        """Exit code of a bench that gets the signal once it has said the words, and what it said after them."""
        process = subprocess.Popen([PROGRAM, *map(str, bench)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=self.environment())
        while (line := process.stderr.readline()) and words not in line:
            pass
        process.send_signal(number)
        printed, said = process.communicate(timeout=300)
        self.assertEqual(printed, "")
        self.assertNotIn("tandem: error", said)
        return process.returncode, said

    def test_a_signal_before_the_first_row(self):
        # Steps that are long enough to be interrupted.
        bench = ["bench", "--model", "tiny-gpt2", *SMALL[:6], "--seq-len", "256", "--micro-batch", "32", "--steps", "1",
                 "--policies", "host"]
        out = self.root / "early"
        code, said = self.interrupted_at("calibrating", signal.SIGTERM, [*bench, "--out", out])
        self.assertEqual(code, 143, said)
        self.assertNotIn("measuring", said)
        self.assertIn("--resume", said)
        self.assertFalse(out.exists())
        out.mkdir()  # an empty folder, left by a bench that was killed
        profile = self.calibrate()
        code, said = self.interrupted_at("measuring forward", signal.SIGINT, [*bench, "--out", out, "--resume"])
        self.assertEqual(code, 130, said)
        self.assertEqual(list(out.iterdir()), [])
        profile.unlink()
        code, said = self.interrupted_at("calibrating", signal.SIGINT, bench)
        self.assertEqual(code, 130, said)
        self.assertNotIn("--resume", said)

    def test_what_is_refused_leaves_no_folder(self):
        out = self.root / "refused"
        for code, flags in [(4, ["--profile", self.root / "none"]), (2, ["--profile", self.text]),
                            (5, ["--device", "cuda:7"]),
                            (4, [*SMALL, "--steps", "1", "--policies", "host", "--compute-factors", self.text])]:
            self.refused(self.run_program("bench", "--model", "tiny-gpt2", "--out", out, *flags), code)
            self.assertFalse(out.exists())

    def test_resuming_keeps_what_is_done_and_refuses_another_bench(self):
        out = self.root / "sweep"
        # Not calibrated before: it does that itself.
        whole = json.loads(self.succeed(self.run_program(*self.sweep(out, "--json"))).stdout)["policies"]
        self.assertLessEqual(PREDICTED, set(whole[7]["predicted"]))
        head, *rows = self.lines(out)
        # The file of a bench that was killed while it wrote the seventh row.
        (out / "rows.jsonl").write_text("\n".join([head, *rows[:6], rows[6][:40]]))
        result = self.succeed(self.run_program(*self.sweep(out, "--json", "--resume")))
        again = json.loads(result.stdout)["policies"]
        self.assertEqual(again[:6], whole[:6])
        self.assertEqual([(r["setting"], r["policy"]) for r in again], [(r["setting"], r["policy"]) for r in whole])
        self.assertEqual(again[7]["state_digest"], whole[7]["state_digest"])
        self.assertEqual(again[7]["predicted"], whole[7]["predicted"])  # by the calibration of the first run
        self.assertNotIn("4 of 8", result.stderr)
        result = self.succeed(self.run_program(*self.sweep(out, "--json", "--resume")))
        self.assertEqual(json.loads(result.stdout)["policies"], again)
        for other in (["--steps", "2"], ["--seed", "7"], ["--update-threads", "2"]):
            words = [w for w in self.sweep(out, "--resume")]
            for flag, value in [other]:
                if flag in words:
                    words[words.index(flag) + 1] = value
                else:
                    words += [flag, value]
            self.refused(self.run_program(*words), 2, other[0][2:], other[1])
        (out / "rows.jsonl").write_text(head.replace('"machine":"', '"machine":"another ') + "\n")
        self.refused(self.run_program(*self.sweep(out, "--resume")), 2, "machine", "another")
        self.refused(self.run_program(*self.sweep(self.text.parent, "--resume")), 2, "rows.jsonl")

    def test_a_sweep_over_a_profile(self):
        result = self.succeed(self.run_program("bench", "--model", "llama3.2-1b", "--profile", PROFILES / "16gb-pcie4.toml",
                                               "--policies", "host", "interleave:2", "interleave:4", "--subgroup-size",
                                               "10M", "100M", "--json"))
        rows = json.loads(result.stdout)["policies"]
        self.assertEqual([r["setting"]["subgroup-size"] for r in rows], ["10M"] * 3 + ["100M"] * 3)
        self.assertTrue(all(r["measured"] is None for r in rows))

    def test_without_overhead_no_step_is_predicted_longer(self):
        # Simulated alone, a plan may take longer without overhead than with it, as tasks come in another order.
        result = self.succeed(self.run_program("bench", "--model", "llama3.2-1b", "--seq-len", "512", "--profile",
                                               PROFILES / "gh200-coherent.toml", "--policies", "host", "stream",
                                               "interleave:2", "interleave:3", "--device-memory", "4GiB",
                                               "--link-bandwidth", "1GB/s", "--json"))
        rows = json.loads(result.stdout)["policies"]
        self.assertEqual(len(rows), 4)
        for row in rows:
            self.assertLessEqual(row["predicted"]["ideal_step_seconds"], row["predicted"]["step_seconds"])

    def test_advice_of_a_row_is_flags_of_bench(self):
        result = self.succeed(self.run_program("bench", "--model", "qwen3-4b", "--profile", PROFILES / "16gb-pcie4.toml",
                                               "--host-memory", "50GiB", "--policies", "host", "auto"))
        advice = re.search(r"host +the plan does not fit in host memory: .*; try (--policy auto), or (--host-memory \d+MiB), "
                           r"or (--state-dir DIR) on a fast disk, for [\d.]+ GiB of the state\n", result.stdout).groups()
        for flags, policy in ((["--host-memory", "50GiB", *advice[0].split()], "auto"),
                              (["--policies", "host", *advice[1].split()], "host"),
                              (["--host-memory", "50GiB", "--policies", "host", *advice[2].split()], "host")):
            followed = self.succeed(self.run_program("bench", "--model", "qwen3-4b", "--profile", PROFILES / "16gb-pcie4.toml",
                                                     *flags, "--json"))
            (row,) = json.loads(followed.stdout)["policies"]
            self.assertEqual((row["policy"], row["fits"]), (policy, True))

    def test_bench_over_a_profile(self):
        out = self.root / "report"
        result = self.succeed(self.run_program("bench", "--model", "llama3.2-1b", "--profile",
                                               PROFILES / "16gb-pcie4.toml", "--policies", "host", "device", "auto",
                                               "--out", out, "--json"))
        report = json.loads(result.stdout)
        host, device, auto = report["policies"]
        self.assertTrue(host["fits"])
        for row in (host, auto):
            self.assertRegex(row["activations"], "^(kept|(selectively )?recomputed|recomputed, inputs offloaded|"
                                                 "[0-9]+ of 16 blocks recomputed, others selectively)$")
        self.assertLessEqual(auto["predicted"]["step_seconds"], host["predicted"]["step_seconds"])
        self.assertEqual(report["best"], "auto")
        self.refused(self.run_program("bench", "--model", "tiny-gpt2", "--policies", "fast"), 2, "fast")
        self.refused(self.run_program("bench", "--model", "tiny-gpt2", "--out", out), 2, "exists")
        for twice in (["--policies", "host", "auto", "host"], ["--link-bandwidth", "1GB/s", "1GB/s"]):
            self.refused(self.run_program("bench", "--model", "tiny-gpt2", *twice), 2, f"{twice[0]} {twice[-1]}", "twice")

    def test_the_timeline_of_a_large_step_is_whole(self):
        out = self.root / "report"
        self.succeed(self.run_program("bench", "--model", "llama3.1-8b", "--seq-len", "512", "--grad-accum", "4", "--profile",
                                      PROFILES / "80gb-pcie4.toml", "--policies", "interleave:2", "--subgroup-size", "10M",
                                      "--out", out))
        (trace,) = out.glob("simulated-*.trace.json")
        events = json.loads(trace.read_text())["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = {}  # by lane: begin, end, and kind
        for e in events:
            if e["ph"] == "X":
                begin = e["ts"] / 1e6
                spans.setdefault(lanes[e["tid"]], []).append((begin, begin + e["dur"] / 1e6, e["name"].split()[0]))
        self.assertGreater(sum(map(len, spans.values())), 20000)
        drawn = {}
        page = json.loads(re.search(r'id="report">(.*?)</script>', (out / "report.html").read_text(), re.S)[1])
        for lane, name, begin, end in page["timeline"]:
            drawn.setdefault(lane, []).append((begin, end, name))
        self.assertLess(len(page["timeline"]), 10000)
        self.assertEqual(set(drawn), set(spans))
        hair = max(end for lane in spans.values() for _, end, _ in lane) / 1000
        for lane, busy in spans.items():
            with self.subTest(lane=lane):
                bars, busy = sorted(drawn[lane]), sorted(busy)
                self.assertTrue(all(a[1] <= b[0] + 1e-9 for a, b in zip(bars, bars[1:])), "drawn over one another")

                def is_drawn(begin, end):
                    bar = bars[max(0, bisect.bisect_right(bars, ((begin + end) / 2,)) - 1)]
                    return bar[0] <= begin + 1e-9 and end - 1e-9 <= bar[1]
                self.assertEqual([s for s in busy if not is_drawn(s[0], s[1])][:3], [])
                idle = [(a[1], b[0]) for a, b in zip(busy, busy[1:]) if b[0] - a[1] > 1.01 * hair]
                self.assertEqual([gap for gap in idle if is_drawn(*gap)][:3], [], "drawn as busy")
                kinds = {name.split()[0] for _, _, name in bars}
                self.assertLessEqual(kinds, {kind for _, _, kind in busy})
                long = {kind for begin, end, kind in busy if end - begin > hair}
                self.assertLessEqual(long, kinds)

    def test_seconds_of_updates_are_those_of_the_steps_measured(self):
        self.calibrate()
        report = json.loads(self.succeed(self.run_program(
            "bench", *SMALL, "--policies", "host", "--update-rate", "4M", "--steps", "1", "--json")).stdout)
        (row,) = report["policies"]
        # The pace is emulated: with the update of the step before, too, it would be twice as long.
        self.assertLess(row["measured"]["update_seconds"], 1.5 * row["predicted"]["update_seconds"])


if __name__ == "__main__":
    main()
