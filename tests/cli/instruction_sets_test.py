"""One digest under each instruction set that this machine has, whatever the policy; and the limits by which a set is
chosen. The other scripts run with the best that there is."""
import pathlib
import sys

from program import SMALL, ProgramTest, main

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from instruction_sets import limits, sets_here  # noqa: E402

SETTINGS = [["--policy", "device"],
            ["--policy", "static:0.3", "--update-threads", "2", "--recompute", "selective"],
            ["--policy", "interleave:2", "--subgroup-size", "4097", "--accumulation-order", "layer"],
            ["--policy", "stream", "--prefetch-layers", "1", "--resident-layers", "0", "--recompute", "block:2"]]
LICENCES = pathlib.Path("/usr/share/common-licenses")


class InstructionSets(ProgramTest):
    def environment(self):
        return {**super().environment(), **self.limits}

    def setUp(self):
        super().setUp()
        self.limits = {}

    def run_of(self, *arguments):
        out = self.root / f"run{len(list(self.root.iterdir()))}"
        self.succeed(self.run_program("train", *arguments, "--out", out))
        return self.summary(out)

    def test_one_digest_whatever_the_policy(self):
        print(f"instruction sets here: {' '.join(sets_here())}", flush=True)
        for name in sets_here()[:-1]:
            self.limits = limits(name)
            for model in ["tiny-llama", "tiny-moe"]:
                runs = [self.run_of("--model", model, "--data", self.text, *SMALL, "--grad-accum", "3", "--steps", "3", *flags)
                        for flags in [["--policy", "host"], *SETTINGS]]
                self.assertEqual(len({run["state_digest"] for run in runs}), 1, (name, model))
                self.assertIn(f" isa={name} ", runs[0]["compute_key"])

    def test_the_quickstart_trains_to_one_digest(self):
        text = LICENCES if LICENCES.is_dir() else self.text
        flags = ["--model", "tiny-llama", "--data", text, "--device", "host", "--threads", "2", "--seq-len", "256",
                 "--micro-batch", "8", "--steps", "6", "--lr", "1e-3", "--warmup-steps", "2"]
        for name in sets_here()[:-1]:
            self.limits = limits(name)
            split = self.run_of(*flags, "--device-memory", "40MiB", "--policy", "interleave:2", "--subgroup-size", "64Ki",
                                "--recompute", "block")
            whole = self.run_of(*flags, "--policy", "device")
            self.assertEqual(split["state_digest"], whole["state_digest"], name)
            self.assertLess(whole["final_loss"], whole["first_loss"], name)

    def test_updates_are_the_same_under_every_set_of_tandems_own(self):
        """Updates are sequences of single roundings. Products of the library are not, and stay as they are."""
        digests = set()
        for name in sets_here():
            self.limits = {"TANDEM_MAX_ISA": name}
            digests.add(self.run_of("--model", "tiny-gpt2", "--data", self.text, *SMALL, "--steps", "3")["state_digest"])
        self.assertEqual(len(digests), 1)

    def test_a_limit_that_is_no_instruction_set_is_refused(self):
        self.limits = {"TANDEM_MAX_ISA": "avx3"}
        line = self.refused(self.train("--steps", "1", "--out", self.root / "out"), 2, "TANDEM_MAX_ISA=avx3")
        self.assertIn("scalar, avx2 or avx512", line)


if __name__ == "__main__":
    main()
