"""The performance model from outside: calibrate, plan, train by it."""
import json
import os
import re

from program import PREDICTED, PROFILES, SMALL, TEXT, ProgramTest, main

BOUNDS = {"compute", "host to device", "device to host", "both ways of the link", "DRAM", "CPU"}


class Calibrated(ProgramTest):
    def setUp(self):
        super().setUp()
        self.profile = self.calibrate()

    def test_a_run_is_planned_by_it_and_keeps_its_bits(self):
        ceiling = ["--device-memory", "18MiB"]
        shown = self.succeed(self.run_program("calibrate", "--show", *SMALL[:6])).stdout
        self.assertIn("matrix products", shown)
        self.assertRegex(shown, r"disk\.bandwidth +[0-9.]+ [MGT]B/s +files written, hashed and flushed")
        plan = json.loads(self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, *ceiling, "--explain",
                                                        "--json")).stdout)
        self.assertLessEqual(PREDICTED, set(plan["predicted"]))
        self.assertIn(plan["bound_by"], BOUNDS)
        times = [c["step_seconds"] for c in plan["candidates"] if c["fits"]]
        self.assertEqual(plan["predicted"]["step_seconds"], min(times))
        self.assertGreater(len(times), 1)
        self.assertTrue(plan["upgrades"])
        result = self.succeed(self.train("--steps", "3", *ceiling, "--out", self.root / "auto"))
        self.assertRegex(result.stdout, r"total .* predicted .* s/step, bound by ")
        self.assertNotIn("not calibrated", result.stderr)
        summary = self.summary(self.root / "auto")
        self.assertEqual(summary["policy"], plan["policy"])
        self.assertEqual(summary["planned_device_bytes"], summary["peak_device_bytes"])
        self.succeed(self.train("--steps", "3", *ceiling, "--policy", "host", "--out", self.root / "host"))
        self.assertEqual(summary["state_digest"], self.summary(self.root / "host")["state_digest"])

        # Profile of a slower CPU and link: times decide whether another plan follows, not which bits.
        honest = self.profile.read_text()
        slower = re.sub(r"(?m)^((?:update|to_device|to_host|both_ways) = \{ value = )([0-9.e+]+)",
                        lambda figure: figure[1] + repr(float(figure[2]) / 25), honest)
        self.assertNotEqual(slower, honest)
        digests = set()
        for name, text in [("slow", slower), ("true", honest)]:
            self.profile.write_text(text)
            self.succeed(self.train("--steps", "45", *ceiling, "--out", self.root / name))
            digests.add(self.summary(self.root / name)["state_digest"])
        self.assertEqual(len(digests), 1)

        # The cost of a save without room for a copy of the state is predicted, told, and measured.
        small = ["--policy", "host", "--checkpoint-every", "4"]
        room = json.loads(self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, *small, "--json")).stdout)
        small += ["--host-memory", str(room["host_bytes"] - (10 << 20))]
        saving = json.loads(self.succeed(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, *small,
                                                          "--json")).stdout)["saving"]
        self.assertEqual([saving["every"], saving["copies_state"]], [4, False])
        self.assertGreaterEqual(saving["step_factor"], 1.0)
        cost = r"[0-9.]+ x for [0-9]+ steps?"
        result = self.succeed(self.train("--steps", "12", *small, "--out", self.root / "saves"))
        self.assertRegex(result.stdout, rf"saving every 4 steps, beside training: .* predicted step {cost}\n")
        self.assertRegex(result.stdout, rf"step-00000004 \(.*, updates waited .* s, step {cost} \(predicted {cost}\)\)\n")

        for damage, word in [(self.profile.read_text().replace("driver = '", "driver = 'another "), "stale"),
                             ("no profile", "not used")]:
            self.profile.write_text(damage)
            result = self.succeed(self.train("--steps", "1", "--dry-run"))
            self.assertIn("warning", result.stderr)
            self.assertIn(word, result.stderr)
            self.assertNotIn("predicted", result.stdout)

    def test_a_calibration_that_looks_wrong_is_used_with_a_warning(self):
        steady = re.sub(r"spread = [0-9.e+-]+", "spread = 0.0", self.profile.read_text())
        varying = re.sub(r"(?m)^(task = .*spread = )0.0", r"\g<1>1.25", steady)
        for text, worst in [(steady, None), (varying, "step.task varies by 125%")]:
            self.profile.write_text(text)
            show = self.run_program("calibrate", "--show", "--json", *SMALL[:6])
            listed = json.loads(self.succeed(show).stdout)["looks_wrong"]
            if worst:
                self.assertIn(worst, " ".join(listed))
            plan = self.run_program("plan", "--model", "tiny-gpt2", *SMALL, "--json")
            bench = self.run_program("bench", "--model", "tiny-gpt2", *SMALL, "--steps", "1", "--policies", "host")
            for result in (plan, self.train("--steps", "1", "--dry-run"), bench):
                warnings = [line for line in self.succeed(result).stderr.splitlines() if "looks wrong" in line]
                self.assertEqual(len(warnings), 1 if listed else 0, result.stderr)
                for word in ([f"in {len(listed)} place", worst or listed[0], "`tandem calibrate`"] if listed else []):
                    self.assertIn(word, warnings[0])
            self.assertEqual(json.loads(plan.stdout)["looks_wrong"], listed)
        # A machine that is named is whoever's word it is.
        named = self.succeed(self.run_program("plan", "--model", "tiny-gpt2", "--profile", self.profile, "--json"))
        self.assertEqual(json.loads(named.stdout)["looks_wrong"], [])
        self.assertNotIn("looks wrong", named.stderr)


class Uncalibrated(ProgramTest):
    def test_auto_says_that_nothing_is_known(self):
        result = self.succeed(self.train("--steps", "1"))
        self.assertIn("tandem calibrate", result.stderr)
        self.assertNotIn("predicted", result.stdout)
        self.refused(self.run_program("plan", "--model", "tiny-gpt2", *SMALL, "--explain"), 2, "calibrate")

    def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(self):
        result = self.run_program("calibrate", *SMALL[:6], "--out", self.text / "profile.toml")
        self.refused(result, 7, "cannot write")
        self.assertNotIn("measuring", result.stderr)

    def test_what_is_measured_does_not_replace_a_profile_that_is_to_be_read(self):
        for profile in (self.text, self.root / "none"):
            self.refused(self.run_program("calibrate", *SMALL[:6], "--profile", profile), 2, "--show", "--out FILE")
        self.assertEqual(self.text.read_text(), TEXT)
        self.refused(self.run_program("calibrate", "--show", "--out", self.root / "new.toml"), 2, "--out", "--show")
        self.assertEqual([p.name for p in self.root.iterdir()], [self.text.name])


class OtherMachines(ProgramTest):
    def test_every_profile_plans_and_explains(self):
        for profile in sorted(PROFILES.glob("*.toml")):
            result = self.succeed(self.run_program("plan", "--model", "gpt2-medium", "--seq-len", "512", "--recompute", "block",
                                                   "--profile", profile, "--explain"))
            self.assertIn("chosen", result.stdout, profile)
            self.assertIn("nothing looks wrong",
                          self.succeed(self.run_program("calibrate", "--show", "--profile", profile)).stdout)

    def test_without_a_ceiling_the_margin_of_a_run_is_left(self):
        def device_bytes(*ceiling):
            return json.loads(self.succeed(self.run_program("plan", "--model", "llama3.2-1b", "--recompute", "block", "--profile",
                                                            PROFILES / "8gb-pcie4.toml", "--json", *ceiling)).stdout)["device_bytes"]
        memory = (8188 - 512) << 20
        self.assertLessEqual(device_bytes(), memory - memory // 20)
        self.assertGreater(device_bytes("--device-memory", f"{memory >> 20}MiB"), memory - memory // 20)

    def test_what_is_planned_does_not_depend_on_the_machine_that_plans(self):
        cores = os.sched_getaffinity(0)
        if len(cores) < 2:
            self.skipTest("one core")
        shipped = (PROFILES / "8gb-pcie4.toml").read_text()
        of_host = self.file("host.toml", shipped.replace('device_kind = "cuda"', 'device_kind = "host"'))

        def planned():
            return [self.succeed(self.run_program("plan", "--model", "gpt2-medium", "--recompute", "block", "--profile", profile,
                                                  "--json", *flags)).stdout
                    for profile in (PROFILES / "8gb-pcie4.toml", of_host) for flags in ([], ["--fit", "micro-batch"])]
        with_all = planned()
        os.sched_setaffinity(0, {min(cores)})
        try:
            self.assertEqual(planned(), with_all)
        finally:
            os.sched_setaffinity(0, cores)

    def test_an_explanation_says_what_its_figures_are(self):
        plan = ["plan", "--model", "gpt2-medium", "--seq-len", "512", "--recompute", "block", "--device-memory", "3GiB",
                "--profile", PROFILES / "8gb-pcie4.toml"]
        whole = json.loads(self.succeed(self.run_program(*plan, "--explain", "--json")).stdout)
        without = json.loads(self.succeed(self.run_program(*plan, "--json")).stdout)
        self.assertEqual(set(whole) - set(without), {"upgrades", "modules", "engine"})
        # Rates of parameters, 4 bytes a value; the kernel that updates casts as it writes.
        b, ug, uc = 1.25e10 / 4, 7.77143e9, 1.22143e9
        stride = 1 + (3 / b + 1 / ug) / (1 / uc - 1 / (2 * b))
        self.assertAlmostEqual(whole["published_stride"], stride, places=6)
        text = self.succeed(self.run_program(*plan, "--explain")).stdout
        self.assertIn(f"on the CPU (here); one subgroup in {stride:.1f} streamed (as published)\n", text)
        self.assertIn(f"\npolicies compared, with activations {whole['activations']}; \"or more\": given up", text)
        self.assertNotIn("rules of thumb", self.succeed(self.run_program(*plan, "--explain", "--policy", "host")).stdout)
        # A CPU that keeps pace with the link leaves nothing to stream.
        fast = self.file("fast.toml", re.sub(r"(?m)^update = \{ value = 1.22143e\+09", "update = { value = 1e+12",
                                             (PROFILES / "8gb-pcie4.toml").read_text()))
        plan[-1] = fast
        self.assertIn("no subgroup streamed", self.succeed(self.run_program(*plan, "--explain")).stdout)

    def test_a_save_is_predicted_where_the_profile_knows_the_disk(self):
        def planned(disk, *flags, model="llama3.2-1b"):
            profile = self.file("machine.toml", (PROFILES / "8gb-pcie4.toml").read_text() + disk)
            return self.run_program("plan", "--model", model, "--seq-len", "512", "--policy", "host",
                                    "--checkpoint-every", "50", "--profile", profile, *flags)
        factors = []
        for rate in (1e8, 1e9, 1e10):
            disk = f"\n[disk]\nbandwidth = {rate}\n"
            factors.append(json.loads(self.succeed(planned(disk, "--json")).stdout)["saving"]["step_factor"])
        self.assertGreater(factors[0], 5 * factors[1])
        self.assertGreater(factors[1], factors[2])
        self.assertGreaterEqual(factors[2], 1.0)
        self.assertIn("predicted step", self.succeed(planned("\n[disk]\nbandwidth = 1e9\n", "--explain")).stdout)
        self.assertIn("the disk's rate is unknown", self.succeed(planned("")).stdout)
        copies = json.loads(self.succeed(planned("", "--json", model="gpt2")).stdout)
        self.assertEqual(copies["saving"], {"every": 50, "copies_state": True, "step_factor": None, "steps": None})
        # A copy is written beside so many steps as its pace and the next save leave it.
        steps = []
        for rate in (1e7, 1e9, 1e10):
            saving = json.loads(self.succeed(planned(f"\n[disk]\nbandwidth = {rate}\n", "--json",
                                                     model="gpt2")).stdout)["saving"]
            self.assertTrue(saving["copies_state"])
            self.assertGreaterEqual(saving["step_factor"], 1.0)
            steps.append(saving["steps"])
        self.assertEqual(steps[0], 50)
        self.assertGreater(steps[1], steps[2])
        self.assertIn("checkpoint copy", {e["name"] for e in copies["entries"]})
        self.refused(planned("\n[disk]\nbandwidth = -1.0\n"), 2, "disk.bandwidth")

    def test_the_largest_that_fits_does_and_one_more_does_not(self):
        machine = ["--profile", PROFILES / "8gb-pcie4.toml"]
        self.refused(self.run_program("plan", "--model", "gpt2", *machine, "--compute", "fp32"), 2, "on a GPU")
        fitted = json.loads(self.succeed(self.run_program("plan", "--model", "llama3.2-1b", "--seq-len", "512", *machine,
                                                          "--fit", "micro-batch", "--json")).stdout)["fit"]
        count = int(re.fullmatch(r"--micro-batch (\d+)", fitted).group(1))
        flags = ["plan", "--model", "llama3.2-1b", "--seq-len", "512", *machine, "--micro-batch"]
        self.succeed(self.run_program(*flags, count))
        self.refused(self.run_program(*flags, count + 1), 3)

    def test_the_longest_sequence_may_be_all_positions_or_a_few_tokens(self):
        shape = self.root / "shape.json"
        shape.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 5001,
                                     "n_embd": 256, "n_head": 4, "n_layer": 4, "n_positions": 1000}))
        flags = ["plan", "--model", shape, "--device", "host", "--policy", "host", "--device-memory"]
        longest = {}
        for memory in ["1GiB", "32MiB", "15MiB"]:
            fitted = json.loads(self.succeed(self.run_program(*flags, memory, "--fit", "seq-len", "--json")).stdout)["fit"]
            longest[memory] = int(re.fullmatch(r"--seq-len (\d+)", fitted).group(1))
            self.succeed(self.run_program(*flags, memory, "--seq-len", longest[memory]))
        self.assertEqual(longest["1GiB"], 1000)
        self.assertEqual(longest["32MiB"] % 64, 0)
        self.assertIn(longest["15MiB"], range(1, 64))
        self.refused(self.run_program(*flags, "15MiB", "--seq-len", longest["15MiB"] + 1), 3)
        self.refused(self.run_program(*flags, "32MiB", "--seq-len", longest["32MiB"] + 64), 3)

    def test_what_does_not_fit_says_why(self):
        machine = ["--profile", PROFILES / "8gb-pcie4.toml"]
        self.refused(self.run_program("plan", "--model", "llama3.1-8b", *machine, "--fit", "seq-len"), 3,
                     "not even a sequence of one token", "host memory")
        self.refused(self.run_program("plan", "--model", "gpt2", *machine, "--device-memory", "100GiB"), 3,
                     "--device-memory 100", "7.50 GiB")

    def test_the_hosts_system_keeps_its_part_of_the_memory(self):
        shipped = (PROFILES / "8gb-pcie4.toml").read_text()

        def plan(host, *flags, devices=1):
            text = re.sub(r"(?m)^host_memory = \{ value = \d+", f"host_memory = {{ value = {host}", shipped)
            text = text.replace("devices = { value = 1", f"devices = {{ value = {devices}")
            return self.run_program("plan", "--model", "gpt2-medium", "--seq-len", "512", "--policy", "host", "--recompute",
                                    "block", "--speculate", "off", "--profile", self.file("machine.toml", text), "--json", *flags)
        needed = json.loads(self.succeed(plan(64 << 30)).stdout)["host_bytes"]
        self.assertGreater(needed, 4 << 30)
        # 3 GiB and a 64th are the system's.
        enough = -((needed + (3 << 30)) * 64 // -63)
        self.succeed(plan(enough))
        self.refused(plan(enough - 4096), 3, "host memory", "is available")
        # Each of two devices has half of the rest.
        enough = -((2 * needed + (3 << 30)) * 64 // -63)
        self.succeed(plan(enough, devices=2))
        self.refused(plan(enough - 4096, devices=2), 3, "host memory")
        # A user who knows better says so, up to all that the host has.
        self.succeed(plan(needed, "--host-memory", needed))
        self.refused(plan(needed - 4096, "--host-memory", needed), 3, "host memory")
        # A small host keeps half.
        self.succeed(self.run_program("plan", "--model", "tiny-gpt2", "--profile", self.file("small.toml", re.sub(
            r"(?m)^host_memory = \{ value = \d+", "host_memory = { value = 1000000000", shipped))))

    def test_the_largest_model_is_the_same_whatever_model_was_named(self):
        machine = ["--profile", PROFILES / "8gb-pcie4.toml", "--fit", "model", "--device-memory", "2GiB"]
        # Models that fit at all do so with all blocks computed again, and are planned sooner where that is said.
        named = [["--model", "gpt2"], ["--seq-len", "1024"]]
        fitted = [self.fit_of(*machine), *(self.fit_of(*machine, "--recompute", "block", *flags) for flags in named)]
        self.assertEqual(len(set(fitted)), 1, fitted)

    def fit_of(self, *flags):
        return json.loads(self.succeed(self.run_program("plan", *flags, "--json")).stdout)["fit"]

    def test_what_was_chosen_has_its_own_time(self):
        flags = ["plan", "--model", "gpt2-medium", "--device-memory", "3GiB", "--profile", PROFILES / "8gb-pcie4.toml", "--json"]
        for policy in ("host", "auto"):
            plan = json.loads(self.succeed(self.run_program(*flags, "--policy", policy)).stdout)
            fastest = plan["candidates"][0]
            self.assertAlmostEqual(fastest["step_seconds"], plan["predicted"]["step_seconds"], places=6)

    def test_some_blocks_are_kept_where_all_do_not_fit(self):
        def plan(*flags):
            return self.run_program("plan", "--model", "gpt2", "--seq-len", "1024", "--micro-batch", "40", "--compute", "bf16",
                                    "--profile", PROFILES / "8gb-pcie4.toml", "--json", *flags)
        for more in ("none", "selective"):
            self.refused(plan("--recompute", more), 3, "does not fit")
        ways = [[], ["--offload-activations"]]
        least = min(json.loads(self.succeed(plan("--recompute", "block", *way)).stdout)["predicted"]["step_seconds"]
                    for way in ways)
        chosen = json.loads(self.succeed(plan()).stdout)
        self.assertRegex(chosen["activations"], "^[1-9][0-9]? of 12 blocks recomputed, others selectively$")
        self.assertLess(chosen["predicted"]["step_seconds"], 0.95 * least)

    def test_no_upgrade_makes_a_step_longer(self):
        plan = json.loads(self.succeed(self.run_program("plan", "--model", "gpt2-medium", "--device-memory", "3GiB", "--recompute",
                                                        "block", "--profile", PROFILES / "8gb-pcie4.toml", "--explain",
                                                        "--json")).stdout)
        self.assertEqual(plan["activations"], "recomputed")
        self.assertEqual(len(plan["upgrades"]), 5)
        for upgrade in plan["upgrades"]:
            self.assertLessEqual(upgrade["step_seconds"], plan["predicted"]["step_seconds"] * 1.0001, upgrade["what"])

    def test_what_fits_is_what_a_plan_accepts(self):
        """The search for what fits goes by all policies that a plan goes by, not by those that need no simulation."""
        flags = ["plan", "--profile", PROFILES / "80gb-pcie4.toml", "--device-memory", "7GiB", "--host-memory", "60GiB", "--json"]
        fitted = json.loads(self.succeed(self.run_program(*flags, "--fit", "model", "--policy", "auto")).stdout)
        self.assertEqual(fitted["fit"], "--model qwen3-4b")
        self.assertLessEqual(fitted["host_bytes"], 60 << 30)

    def test_offloaded_activations_take_the_profiles_host_memory(self):
        def plan(batch, *flags):
            return self.run_program("plan", "--model", "llama3.1-8b", "--seq-len", "4096", "--profile",
                                    PROFILES / "80gb-pcie4.toml", "--policy", "host", "--recompute", "block",
                                    "--offload-activations", "--micro-batch", batch, "--speculate", "off", "--json", *flags)
        one, four = (json.loads(self.succeed(plan(batch)).stdout)["host_bytes"] for batch in [1, 4])
        # Inputs of 32 blocks and of the head, 4096 x 4096 bf16 each, of three sequences more; three stay on the device.
        self.assertEqual(four - one, 3 * ((33 - 3) * 4096 * 4096 * 2 + 3 * 4096 * 4))  # and tokens, targets and losses
        ceiling = ["--host-memory", str(one + (four - one) // 2)]
        self.succeed(plan(1, *ceiling))
        self.refused(plan(4, *ceiling), 3, "host memory")
        fitted = json.loads(self.succeed(plan(1, *ceiling, "--fit", "micro-batch")).stdout)
        self.assertLessEqual(fitted["host_bytes"], int(ceiling[1]))
        self.assertIn(fitted["fit"], ["--micro-batch 2", "--micro-batch 3"])

    def test_offloaded_activations_cost_what_the_link_carries(self):
        profile = (PROFILES / "24gb-pcie4.toml").read_text()
        narrow = self.file("narrow.toml", re.sub(r"((?:to_device|to_host|both_ways) = \{ value = )[\d.e+]+", r"\g<1>1e9", profile))

        def plan(*flags):
            return json.loads(self.succeed(self.run_program(
                "plan", "--model", "llama3.2-1b", "--seq-len", "4096", "--micro-batch", "8", "--profile", narrow, "--json",
                *flags)).stdout)
        sent = plan("--offload-activations")
        # Inputs of 16 blocks and of the head but three, 8 x 4096 x 2048 bf16 each, both ways.
        self.assertGreater(sent["predicted"]["step_seconds"], 2 * 14 * 8 * 4096 * 2048 * 2 / 1e9)
        self.assertLess(plan("--recompute", "block")["predicted"]["step_seconds"], 0.9 * sent["predicted"]["step_seconds"])
        chosen = plan()
        self.assertNotIn("offloaded", chosen["activations"])
        self.assertLess(chosen["predicted"]["step_seconds"], 0.9 * sent["predicted"]["step_seconds"])

    def test_the_largest_model_that_fits_is_what_any_policy_fits(self):
        flags = ["--profile", PROFILES / "dram-starved.toml", "--recompute", "block", "--grad-accum", "2", "--seq-len", "512"]
        fitted = self.succeed(self.run_program("plan", "--model", "gpt2-xl", *flags, "--fit", "model", "--json"))
        self.assertEqual(json.loads(fitted.stdout)["fit"], "--model qwen3-4b")
        self.refused(self.run_program("plan", "--model", "qwen2.5-7b", *flags), 3)

    def test_a_profile_that_is_none_is_refused(self):
        self.refused(self.run_program("plan", "--model", "gpt2", "--profile", self.text), 2)
        self.refused(self.run_program("plan", "--model", "gpt2", "--profile", self.root / "none"), 4)


if __name__ == "__main__":
    main()
