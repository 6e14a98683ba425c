"""Flags of the update reach it: every one changes the run, and one step is what the formulas say."""
import array
import itertools
import json
import math
import struct

from program import ProgramTest, main

VOCABULARY, WIDTH, POSITIONS = 256, 8, 32
BIAS = 0.5


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


class Flags(ProgramTest):
    WORK = {"--steps": "4", "--lr": "1e-3", "--warmup-steps": "1", "--clip": "0.5"}
    CHANGES = {
        "--lr": "1.1e-3", "--min-lr": "2e-4", "--warmup-steps": "2", "--decay-steps": "5", "--weight-decay": "0.11",
        "--beta1": "0.91", "--beta2": "0.96", "--eps": "1e-6", "--clip": "0.51", "--seed": "43",
    }

    def run_with(self, name, changes):
        out = self.root / name
        flags = [word for pair in {**self.WORK, **changes}.items() for word in pair]
        self.succeed(self.train(*flags, "--out", out))
        return out

    def test_each_one_changes_the_state(self):
        digests = {}
        for flag, value in [("none", None), *self.CHANGES.items()]:
            out = self.run_with(f"run{flag}", {} if value is None else {flag: value})
            digests.setdefault(self.summary(out)["state_digest"], []).append(flag)
        self.assertEqual([flags for flags in digests.values() if len(flags) > 1], [])

    def test_the_rate_follows_its_schedule(self):
        """Rates from the flags to metrics.jsonl, by the formulas written once more."""
        steps, peak, least, warmup = 9, 1e-3, 3e-5, 3
        shares = {"constant": lambda x: 1.0, "linear": lambda x: 1.0 - x,
                  "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x))}
        for schedule, decay in [("constant", 0), ("linear", 0), ("linear", 7), ("cosine", 0), ("cosine", 7), ("wsd", 4)]:
            with self.subTest(schedule=schedule, decay=decay):
                out = self.run_with(f"{schedule}{decay}", {
                    "--steps": str(steps), "--lr": str(peak), "--min-lr": str(least), "--warmup-steps": str(warmup),
                    "--lr-schedule": schedule, **({"--decay-steps": str(decay)} if decay else {}), "--seq-len": "4",
                    "--micro-batch": "1"})
                begin, end = (steps - decay, steps) if schedule == "wsd" else (warmup, decay or steps)
                share = shares["linear" if schedule == "wsd" else schedule]
                for line in self.metrics(out):
                    step = line["step"]
                    expected = peak * min(1.0, step / warmup)
                    if step > begin:
                        expected = least + (peak - least) * share(min(1.0, (step - begin) / (end - begin)))
                    self.assertLessEqual(abs(line["lr"] - expected), 1e-12 * expected, (step, line["lr"], expected))


class OneStep(ProgramTest):
    """A model whose embedding is zero: all logits are equal, and the one gradient that is not zero can be written down.

    The last norm puts out its bias, whatever came in; so of the embedding, which is the head too, row v has the gradient
    bias * (targets / vocabulary - how often v is the target) / targets. All of its values are exact in bf16.
    """
    FLAGS = {"--lr": 0.25, "--warmup-steps": 4, "--beta1": 0.75, "--beta2": 0.875, "--eps": 0.03125, "--weight-decay": 0.5,
             "--clip": 0.125}

    def setUp(self):
        super().setUp()
        self.counter = itertools.count()
        width, inner = WIDTH, 4 * WIDTH
        self.kernel = [(i % 31 - 15) / 16 for i in range(width * 3 * width)]
        zero = {"wte.weight": [VOCABULARY, width], "wpe.weight": [POSITIONS, width]}
        for name, shape in {"ln_1.bias": [width], "attn.c_attn.bias": [3 * width], "attn.c_proj.weight": [width, width],
                            "attn.c_proj.bias": [width], "ln_2.bias": [width], "mlp.c_fc.weight": [width, inner],
                            "mlp.c_fc.bias": [inner], "mlp.c_proj.weight": [inner, width], "mlp.c_proj.bias": [width]}.items():
            zero[f"h.0.{name}"] = shape
        tensors = {name: (shape, [0.0] * math.prod(shape)) for name, shape in zero.items()}
        for name in ("h.0.ln_1.weight", "h.0.ln_2.weight", "ln_f.weight"):
            tensors[name] = ([width], [1.0] * width)
        tensors["h.0.attn.c_attn.weight"] = ([width, 3 * width], self.kernel)
        tensors["ln_f.bias"] = ([width], [BIAS] * width)
        header, data = {}, b""
        for name, (shape, values) in tensors.items():
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)]}
            data += floats(values)
        text = json.dumps(header).encode()
        self.file("model/model.safetensors", struct.pack("<Q", len(text)) + text + data)
        self.model = self.file("model/config.json", json.dumps(
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": width,
             "n_layer": 1, "n_head": 2, "n_positions": POSITIONS, "n_ctx": POSITIONS})).parent

    def step(self, masks, micro_batch, accumulated):
        """One step over as many rows as there are masks. Returns its run and the targets."""
        length = len(masks[0])
        tokens = [(7 * i * i + 3 * i) % 23 for i in range(length * len(masks))]
        data = self.file("rows.bin", struct.pack(f"<{len(tokens)}H", *tokens))
        self.file("rows.mask.bin", bytes(bit for mask in masks for bit in mask))
        self.file("rows.json", json.dumps({"layout": "rows", "row_length": length, "dtype": "uint16",
                                           "vocab_size": VOCABULARY}))
        out = self.root / f"run{next(self.counter)}"
        flags = [str(word) for pair in self.FLAGS.items() for word in pair]
        self.succeed(self.run_program("train", "--model", self.model, "--data", data, "--device", "host", "--threads", "1",
                                      "--steps", "1", "--micro-batch", micro_batch, "--grad-accum", accumulated, *flags,
                                      "--out", out))
        # The first token of a row is nobody's target.
        return out, [tokens[i] for i in range(len(tokens)) if i % length > 0 and masks[i // length][i % length]]

    def gradient(self, targets):
        """Gradient of each row of the embedding; a row's elements are all alike."""
        count = len(targets)
        return [BIAS * (1.0 / VOCABULARY - targets.count(v) / count) for v in range(VOCABULARY)]

    def array(self, out, name):
        whole = (out / "checkpoints" / "step-00000001" / "state.safetensors").read_bytes()
        length = struct.unpack("<Q", whole[:8])[0]
        begin, end = json.loads(whole[8:8 + length])[name]["data_offsets"]
        return array.array("f", whole[8 + length + begin:8 + length + end])

    def close(self, actual, expected, relative):
        self.assertLessEqual(abs(actual - expected), relative * abs(expected), (actual, expected))

    def check_means(self, out, targets):
        (line,) = self.metrics(out)
        self.close(line["loss"], math.log(VOCABULARY), 1e-6)
        self.close(line["grad_norm"], math.sqrt(WIDTH * sum(g * g for g in self.gradient(targets))), 1e-6)
        self.close(line["tokens_per_second"] * line["step_seconds"], len(targets), 1e-9)
        self.assertEqual(self.summary(out)["tokens"], len(targets))

    def test_means_are_over_targets_and_not_over_tokens(self):
        all_of = [1] * 17
        some = [0] + [1, 0] * 8
        for name, masks, micro_batch, accumulated in [
                ("all", [all_of], 1, 1), ("half", [some, some], 2, 1), ("a row of none", [all_of, [0] * 17], 2, 1),
                ("in turn", [some, some, all_of, all_of, some, some], 2, 3)]:
            with self.subTest(name):
                self.check_means(*self.step(masks, micro_batch, accumulated))

    def test_the_state_is_what_the_formulas_say(self):
        out, targets = self.step([[1] * 17], 1, 1)
        flags = self.FLAGS
        rate = flags["--lr"] / flags["--warmup-steps"]
        gradient = self.gradient(targets)
        norm = math.sqrt(WIDTH * sum(g * g for g in gradient))
        self.assertGreater(norm, 1.5 * flags["--clip"])
        m, v, master = (self.array(out, f"{part}.embedding.tokens") for part in ("m", "v", "master"))
        for row, g in enumerate(gradient):
            g *= flags["--clip"] / norm
            first, second = (1 - flags["--beta1"]) * g, (1 - flags["--beta2"]) * g * g
            moved = -rate * g / (abs(g) + flags["--eps"])
            for i in (row * WIDTH, row * WIDTH + WIDTH - 1):
                self.close(m[i], first, 2e-5)
                self.close(v[i], second, 2e-5)
                self.close(master[i], moved, 2e-5)
        # Without a gradient matrices shrink, and nothing else moves.
        kernel = self.array(out, "master.block.0.attn.c_attn.weight")
        kept = 1 - rate * flags["--weight-decay"]
        for value, before in zip(sorted(kernel), sorted(self.kernel), strict=True):  # it may lie transposed
            self.close(value, before * kept, 1e-6)
        self.assertEqual(set(self.array(out, "master.head.norm.bias")), {BIAS})


if __name__ == "__main__":
    main()
