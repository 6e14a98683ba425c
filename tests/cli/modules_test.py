"""A step by kinds of modules: bench --modules and what plan --explain says of it, predicted beside measured."""
import json
import re
import signal
import subprocess

from program import PROFILES, PROGRAM, SMALL, ProgramTest, main

LLAMA = {"MLP", "attention", "norms", "QKV projections", "output projection", "head", "embedding"}
WAITS = ["waiting_for_weights_seconds", "waiting_for_gradient_buffers_seconds", "other_seconds"]


class Modules(ProgramTest):
    def setUp(self):
        super().setUp()
        self.calibrate()

    def modules(self, *flags):
        done = self.run_program("bench", *SMALL, "--modules", "--json", "--steps", "1", *flags)
        return json.loads(self.succeed(done).stdout)

    def of(self, step):
        return {row["module"]: row for row in step["modules"]}

    def test_calls_of_each_module_are_those_that_were_counted(self):
        # Each operation is told apart by its weight: one that goes to another module changes two of these sums.
        layer = ["--accumulation-order", "layer"]
        for flags in (["--model", "tiny-gpt2"], ["--model", "tiny-llama", "--recompute", "block"],
                      ["--model", "tiny-llama", "--recompute", "selective", "--grad-accum", "2", *layer],
                      ["--model", "tiny-gpt2", "--freeze", r"h\.0", "--grad-accum", "3"],
                      ["--model", "tiny-llama", "--lora-rank", "4", "--base", "nf4", "--recompute", "none"]):
            step = self.modules("--policy", "host", *flags)
            for row in step["modules"]:
                if row["module"] == "decoding":
                    self.assertIsNone(row["measured"])
                    continue
                for figure in ("matmul_flops", "attention_flops"):
                    self.assertEqual(row["measured"][figure], row["predicted"][figure], (flags, row["module"], figure))
                self.assertGreater(row["measured"]["calls"], 0)

    def test_parts_of_a_step_add_up_to_it(self):
        step = self.modules("--model", "tiny-llama", "--policy", "stream")
        measured, rows = step["measured"], self.of(step)
        self.assertEqual(set(rows), LLAMA)
        modules = sum(row["measured"]["seconds"] for row in rows.values())
        self.assertAlmostEqual(modules, measured["modules_seconds"], places=9)
        parts = modules + sum(measured[part] for part in WAITS)
        self.assertLessEqual(parts, measured["watched_step_seconds"])
        self.assertGreater(parts, 0.9 * measured["watched_step_seconds"])
        self.assertAlmostEqual(measured["modules_over_step"], modules / measured["compute_seconds"], places=5)
        for row in rows.values():
            for half in ("predicted", "measured"):
                self.assertAlmostEqual(row[half]["forward_seconds"] + row[half]["backward_seconds"], row[half]["seconds"],
                                       places=9)
        order = [row["measured"]["seconds"] for row in step["modules"]]
        self.assertEqual(order, sorted(order, reverse=True))
        engine = {row["work"]: row for row in step["engine"]}
        self.assertLessEqual({"copies to the device", "copies to the host", "update on the device"}, set(engine))
        for row in engine.values():
            self.assertEqual(row["bound_by"] is None, row["bound_share"] is None)
        copies = engine["copies to the host"]
        self.assertAlmostEqual(copies["measured"]["bytes"] / copies["predicted"]["bytes"], 1.0, delta=0.02)

    def test_experts_have_a_router(self):
        rows = self.of(self.modules("--model", "tiny-moe"))
        self.assertEqual(set(rows), LLAMA - {"MLP"} | {"experts", "router"})
        self.assertEqual(rows["router"]["measured"]["matmul_flops"], rows["router"]["predicted"]["matmul_flops"])

    def test_watching_leaves_the_state_as_it_is(self):
        # A step of warm-up and one that counts, each of them once watched and once not.
        watched = self.modules("--model", "tiny-gpt2", "--policy", "host")["state_digest"]
        rows = json.loads(self.succeed(self.run_program("bench", *SMALL, "--model", "tiny-gpt2", "--policies", "host",
                                                        "--steps", "3", "--json")).stdout)["policies"]
        self.assertEqual(watched, rows[0]["state_digest"])

    def test_another_machine_is_predicted_alone(self):
        out = self.root / "modules"
        flags = ["--model", "llama3.2-1b", "--seq-len", "512", "--profile", PROFILES / "16gb-pcie4.toml"]
        step = json.loads(self.succeed(self.run_program("bench", *flags, "--modules", "--json", "--out", out)).stdout)
        self.assertEqual(step, json.loads((out / "modules.json").read_text()))
        self.assertIsNone(step["measured"])
        self.assertIsNone(step["state_digest"])
        self.assertTrue(all(row["measured"] is None for row in step["modules"] + step["engine"]))
        explained = json.loads(self.succeed(self.run_program("plan", *flags, "--explain", "--json")).stdout)
        self.assertEqual(explained["modules"], step["modules"])
        self.assertEqual(explained["engine"], step["engine"])
        self.assertEqual(explained["predicted"]["step_seconds"], step["predicted"]["step_seconds"])
        text = self.succeed(self.run_program("bench", *flags, "--modules")).stdout
        self.assertRegex(text, r"\nMLP +[\d.]+ +- +[\d.]+% .* matrix products, \d+% of it reached\n")
        self.assertRegex(text, r"\nstep +[\d.]+ +-\n")
        self.assertIn("\nMLP ", self.succeed(self.run_program("plan", *flags, "--explain")).stdout)

    def test_refusals(self):
        for flags, words in ((["--policies", "host", "stream"], ["--modules", "--policy"]),
                             (["--link-bandwidth", "1GB/s", "2GB/s"], ["--modules", "one value"]),
                             (["--resume", "--out", self.root / "none"], ["--modules", "--resume"]),
                             (["--compute-factors", self.root / "factors"], ["--modules", "--compute-factors"]),
                             (["--out", self.root], ["--out", "exists"])):
            self.refused(self.run_program("bench", *SMALL, "--modules", *flags), 2, *words)
        out = self.root / "refused"
        self.refused(self.run_program("bench", *SMALL, "--modules", "--device-memory", "1MiB", "--out", out), 3)
        self.assertFalse(out.exists())

    def test_a_signal_leaves_no_folder(self):
        out = self.root / "early"
        process = subprocess.Popen([PROGRAM, "bench", *SMALL[:6], "--seq-len", "256", "--micro-batch", "32", "--modules",
                                    "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env=self.environment())
        while (line := process.stderr.readline()) and "measuring modules" not in line:
            pass
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=300)
        self.assertEqual((process.returncode, printed), (130, ""), said)
        self.assertFalse(re.search("tandem: error", said), said)
        self.assertFalse(out.exists())


if __name__ == "__main__":
    main()
