"""Products of eight-bit factors: one digest in every way of running, after a kill and by other ranks; what the plan says; what is refused."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from program import ProgramTest, main  # noqa: E402

PROFILES = pathlib.Path(__file__).parents[3] / "profiles"
WORK = ["--device", "host", "--threads", "1", "--seq-len", "32", "--micro-batch", "1", "--grad-accum", "2", "--steps", "4", "--lr", "1e-2",
        "--compute", "fp8"]
WAYS = {
    "device": ["--policy", "device"],
    "streamed": ["--policy", "host", "--resident-layers", "0", "--prefetch-layers", "1"],
    "ahead of the norm": ["--policy", "host", "--speculate", "on"],
    "recomputed": ["--policy", "interleave:2", "--recompute", "block", "--resident-layers", "1"],
    "selective": ["--policy", "stream", "--recompute", "selective", "--accumulation-order", "layer"],
    "two ranks": ["--policy", "host", "--device", "host,host"],
}


class EightBitProducts(ProgramTest):
    def train(self, out, *flags, model="tiny-llama"):
        return self.run_program("train", "--data", self.text, "--out", self.root / out, "--model", model, *WORK, *flags)

    def digest(self, out):
        return self.summary(self.root / out)["state_digest"]

    def test_one_digest_in_every_way(self):
        for model in ("tiny-llama", "tiny-gpt2", "tiny-moe"):
            ways = WAYS if model == "tiny-llama" else {way: WAYS[way] for way in ("device", "streamed")}
            for way, flags in ways.items():
                with self.subTest(model=model, way=way):
                    self.succeed(self.train(f"{model} {way}", *flags, model=model))
                    self.assertEqual(self.digest(f"{model} {way}"), self.digest(f"{model} device"))

    def test_each_way_of_computing_is_another_run(self):
        ways = {"bf16": ["--compute", "bf16"], "e4m3": [], "e5m2": ["--fp8-gradients", "e5m2"]}
        for way, flags in ways.items():
            self.succeed(self.train(way, *flags))
        self.assertEqual(len({self.digest(way) for way in ways}), len(ways))
        keys = {way: self.summary(self.root / way)["compute_key"] for way in ways}
        self.assertEqual(len(set(keys.values())), len(ways))
        self.assertIn("products e4m3, gradients e5m2", keys["e5m2"])
        self.succeed(self.train("fast", "--fp8-accumulation", "fast"))
        self.assertIn("fast accumulation", self.summary(self.root / "fast")["compute_key"])

    def test_a_run_goes_on_to_the_same_digest(self):
        self.succeed(self.train("whole", "--checkpoint-every", "2", "--keep", "0"))
        begun = self.root / "whole" / "checkpoints" / "step-00000002"
        self.succeed(self.train("again", "--resume", begun, "--policy", "stream"))
        self.assertEqual(self.digest("again"), self.digest("whole"))

    def test_the_measured_peak_is_the_planned_one(self):
        self.succeed(self.train("run", "--policy", "host", "--resident-layers", "0"))
        summary = self.summary(self.root / "run")
        self.assertEqual(summary["peak_device_bytes"], summary["planned_device_bytes"])

    def test_an_adapter_is_trained_beside_such_products(self):
        for way in ("device", "streamed"):
            self.succeed(self.train(f"lora {way}", "--lora-rank", "4", "--base", "nf4", *WAYS[way]))
        self.assertEqual(self.digest("lora device"), self.digest("lora streamed"))

    def test_the_plan_names_layers_that_stay_as_they_are(self):
        self.assertRegex(self.succeed(self.train("said")).stdout, r"products +- +- +e4m3\n")
        odd = self.succeed(self.train("odd", "--seq-len", "31"))
        self.assertRegex(odd.stdout, r"products .* bf16: a micro-batch of 31 tokens is no multiple of 16")

    def test_streamed_weights_cross_the_link_in_a_byte(self):
        said, sent = {}, {}
        for compute in ("fp8", "bf16"):
            said[compute] = self.succeed(self.train(compute, *WAYS["streamed"], "--compute", compute)).stdout
            sent[compute] = self.summary(self.root / compute)["bytes"]["h2d"]
        self.assertRegex(said["fp8"], r"products +- +- +e4m3; weights cross the link in a byte each\n")
        self.assertNotIn("products", said["bf16"])
        self.assertLess(sent["fp8"], 0.75 * sent["bf16"])
        ranks = self.succeed(self.train("ranks", *WAYS["two ranks"], "--resident-layers", "0")).stdout
        self.assertRegex(ranks, r"products .*; weights cross the link in bf16, as devices own parts of them\n")

    def test_profiles_say_what_it_brings(self):
        def tokens(profile, compute):
            plan = self.succeed(self.run_program("plan", "--model", "qwen2.5-7b", "--profile", PROFILES / f"{profile}.toml", "--seq-len", "1024",
                                                 "--micro-batch", "8", "--state", "bf16-moments", "--compute", compute, "--json"))
            return json.loads(plan.stdout)["predicted"]["tokens_per_second"]
        self.assertGreater(tokens("80gb-pcie5", "fp8"), 1.05 * tokens("80gb-pcie5", "bf16"))
        self.refused(self.run_program("plan", "--model", "llama3.2-1b", "--profile", PROFILES / "24gb-pcie4-3090.toml", "--compute", "fp8"),
                     2, "--compute fp8", "products_fp8", "--compute bf16")

    def test_evaluation_multiplies_as_training_does(self):
        self.succeed(self.train("run"))
        losses = {compute: json.loads(self.succeed(self.run_program(
            "eval", "--model", self.root / "run", "--data", self.text, "--device", "host", "--seq-len", "32", "--compute", compute,
            "--json")).stdout)["loss"] for compute in ("bf16", "fp8")}
        self.assertNotEqual(losses["bf16"], losses["fp8"])
        self.assertAlmostEqual(losses["bf16"], losses["fp8"], delta=0.05)


if __name__ == "__main__":
    main()
