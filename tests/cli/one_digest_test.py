"""One training command, one state digest: whatever the policy, the sizes, the overlap and the link."""
import itertools
import json
import random
import re

from program import ProgramTest, main

WORK = ["--device", "host", "--threads", "1", "--seq-len", "32", "--micro-batch", "2", "--grad-accum", "3",
        "--steps", "3", "--lr", "1e-3"]
POLICIES = ["device", "host", "static:0.3", "static:0.7", "interleave:2", "interleave:3",
            "interleave:2,resident=0.5", "stream"]
AXES = {
    "--subgroup-size": ["4097", "1Mi", "1Gi"],  # the last: one a layer
    "--update-threads": ["1", "2"],
    "--numa-node": ["0"],
    "--resident-layers": ["0", "1", "all"],
    "--prefetch-layers": ["1", "2", "4"],
    "--recompute": ["none", "block:2", "offload", "selective", "block:1,selective"],
    "--accumulation-order": ["auto", "micro-batch", "layer"],
    "--link-bandwidth": [None, "400MB/s"],
    "--speculate": ["off", "on", "auto"],
}


def settings(seed):
    """Every value of every axis with every policy at least once, the values paired at random."""
    shuffled = random.Random(seed)
    rounds = max(len(values) for values in AXES.values())
    for policy in POLICIES:
        orders = {flag: list(itertools.islice(itertools.cycle(shuffled.sample(values, len(values))), rounds))
                  for flag, values in AXES.items()}
        for i in range(rounds):
            yield policy, {flag: values[i] for flag, values in orders.items()}


def flags_of(policy, values, layers):
    flags = ["--policy", policy]
    for flag, value in values.items():
        if value is None:
            continue
        if flag == "--resident-layers":
            if policy == "device":
                continue
            value = str(layers) if value == "all" else value
        if (flag, value) == ("--recompute", "offload"):
            flags += ["--recompute", "block", "--offload-activations"]
            continue
        flags += [flag, value]
    return flags


class OneDigest(ProgramTest):
    def digest(self, model, *flags, data=None):
        out = self.root / f"run{next(self.counter)}"
        self.succeed(self.run_program("train", "--model", model, "--data", data or self.text, "--out", out,
                                      *WORK, *flags))
        return self.summary(out)["state_digest"]

    def setUp(self):
        super().setUp()
        self.counter = itertools.count()

    def check_family(self, model, layers, seed, of=1):
        """Checks a family with one in `of` settings."""
        expected = self.digest(model, "--policy", "host")
        for policy, values in itertools.islice(settings(seed), 0, None, of):
            flags = flags_of(policy, values, layers)
            with self.subTest(flags=" ".join(flags)):
                self.assertEqual(self.digest(model, *flags), expected)
        other = self.file("other.txt", self.text.read_text().replace("square", "quadrat"))
        self.assertNotEqual(self.digest(model, "--seed", "7"), expected)
        self.assertNotEqual(self.digest(model, "--lr", "1.1e-3"), expected)
        self.assertNotEqual(self.digest(model, data=other), expected)

    def test_micro_batches_at_once_under_a_ceiling(self):
        """Weights cross the link less often by layer, to the same bits; what does not fit by layer is refused."""
        # One block at a time: tied embeddings have a gradient buffer for each micro-batch.
        small = ["--policy", "host", "--resident-layers", "0", "--prefetch-layers", "1", "--recompute", "block"]
        runs = {}
        for order in ["micro-batch", "layer", "auto"]:
            out = self.root / order
            self.succeed(self.run_program("train", "--model", "tiny-llama", "--data", self.text, "--out", out, *WORK, *small,
                                          "--accumulation-order", order))
            runs[order] = self.summary(out)
        self.assertEqual(runs["micro-batch"]["state_digest"], runs["layer"]["state_digest"])
        losses = {order: [m["loss"] for m in self.metrics(self.root / order)] for order in runs}
        self.assertEqual(losses["micro-batch"], losses["layer"])
        self.assertLess(runs["layer"]["bytes"]["h2d"], 0.5 * runs["micro-batch"]["bytes"]["h2d"])
        self.assertEqual([runs[order]["micro_batches"]["at_once"] for order in runs], [1, 3, 3])
        self.assertIn("twice a step instead of 2 x 3 times", runs["auto"]["micro_batches"]["order"])
        for run in runs.values():
            self.assertEqual(run["peak_device_bytes"], run["planned_device_bytes"])
        work = ["--model", "tiny-llama", "--data", self.text, *WORK, *small]
        least = {}
        for order in ["micro-batch", "layer"]:
            line = self.refused(self.run_program("train", *work, "--accumulation-order", order, "--device-memory", "1MiB"),
                                3, "does not fit")
            self.assertIn("--device-memory", [flag.split()[0] for flag in self.flags_in(line)])
            # Closer than the flag that is advised, which is whole MiB: two at once might fit under that.
            needed = float(re.search(r"needs at least ([\d.]+) MiB", line)[1])
            least[order] = ["--device-memory", f"{needed + 0.05:.2f}MiB"]
        self.assertNotEqual(least["micro-batch"], least["layer"])
        self.refused(self.run_program("train", *work, "--accumulation-order", "layer", *least["micro-batch"]), 3,
                     "does not fit")
        for order, ceiling in [("auto", least["micro-batch"]), ("layer", least["layer"])]:
            out = self.root / f"{order}-fits"
            self.succeed(self.run_program("train", *work, "--accumulation-order", order, *ceiling, "--out", out))
            self.assertEqual(self.summary(out)["state_digest"], runs["layer"]["state_digest"])
            self.assertEqual(self.summary(out)["peak_device_bytes"], self.summary(out)["planned_device_bytes"])
            self.assertEqual(self.summary(out)["micro_batches"]["at_once"] == 3, order == "layer")
        self.assertIn("do not fit", self.summary(self.root / "auto-fits")["micro_batches"]["order"])

    def test_sums_of_layers_whose_vectors_are_frozen(self):
        """Layers of one class whose gradients are fp32 up to different places add up in one buffer, one after another."""
        model = self.file("model/config.json", json.dumps(
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 256, "n_embd": 256, "n_layer": 5,
             "n_head": 4, "n_positions": 48, "n_ctx": 48}))
        digests = set()
        for i, flags in enumerate([["--policy", "device"],
                                   ["--policy", "stream", "--resident-layers", "0", "--subgroup-size", "192Ki",
                                    "--device-memory", "23MiB"]]):
            out = self.root / f"run{i}"
            self.succeed(self.run_program("train", "--model", model, "--data", self.text, "--device", "host", "--threads", "2",
                                          "--seq-len", "16", "--steps", "4", "--grad-accum", "2", "--accumulation-order",
                                          "layer", "--clip", "0", "--on-nonfinite", "stop", "--freeze",
                                          r"h\.[13]\..*(bias|ln)", *flags, "--out", out))
            digests.add(self.summary(out)["state_digest"])
        self.assertEqual(len(digests), 1)

    def test_gpt2_family(self):
        self.check_family("tiny-gpt2", 6, 1)

    def test_llama_family(self):
        self.check_family("tiny-llama", 6, 2, of=3)

    def test_experts(self):
        self.check_family("tiny-moe", 6, 3, of=5)


if __name__ == "__main__":
    main()
