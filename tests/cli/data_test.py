"""Token files with masks and rows, as train and eval take them."""
import json
import struct

from program import ProgramTest, main


class Masks(ProgramTest):
    def tokens(self, name, values, mask=None, **description):
        path = self.file(f"{name}.bin", struct.pack(f"<{len(values)}H", *values))
        if mask is not None:
            self.file(f"{name}.mask.bin", bytes(mask))
        if description:
            self.file(f"{name}.json", json.dumps(description))
        return path

    def evaluate(self, model, data, *flags):
        result = self.run_program("eval", "--model", model, "--data", data, "--threads", "1", "--json", *flags)
        return json.loads(self.succeed(result).stdout)

    def model(self):
        """Trained on ids, so that it takes ids."""
        out = self.root / "model"
        data = self.tokens("ids", [i * i % 251 for i in range(3000)])
        self.succeed(self.train("--steps", "2", "--out", out, data=data))
        return out

    def test_only_targets_count(self):
        model = self.model()
        values = [i * i % 251 for i in range(65)]
        whole = self.evaluate(model, self.tokens("whole", values), "--seq-len", "64")
        self.assertEqual((whole["tokens"], whole["windows"]), (64, 1))
        parts = []
        for name, chosen in [("even", lambda i: i % 2 == 0), ("odd", lambda i: i % 2 == 1)]:
            mask = [int(chosen(i)) for i in range(65)]
            parts.append(self.evaluate(model, self.tokens(name, values, mask), "--seq-len", "64"))
        self.assertEqual([p["tokens"] for p in parts], [32, 32])
        # The two halves of the targets add up to all of them.
        self.assertAlmostEqual(sum(p["loss"] * p["tokens"] for p in parts), whole["loss"] * 64, delta=64 * 1e-6)

    def test_padding_of_rows_changes_nothing(self):
        model = self.model()
        row = [i * 7 % 251 for i in range(20)]
        short = self.tokens("short", row, [1] * 20, layout="rows", row_length=20, dtype="uint16")
        padded = self.tokens("padded", row + [0] * 12, [1] * 20 + [0] * 12, layout="rows", row_length=32, dtype="uint16")
        one, two = self.evaluate(model, short, "--seq-len", "31"), self.evaluate(model, padded)
        self.assertEqual(one, two)
        self.assertEqual(one["tokens"], 19)

    def test_training_counts_targets_and_skips_what_has_none(self):
        values = [i * i % 251 for i in range(4 * 33)]
        mask = [0] * 33 + [int(i % 3 == 0) for i in range(33)] + [1] * 33 + [0] * 33
        data = self.tokens("rows", values, mask, layout="rows", row_length=33, dtype="uint16", vocab_size=256)
        out = self.root / "run"
        arguments = ["train", "--model", "tiny-gpt2", "--data", data, "--out", out, "--epochs", "1", "--device", "host",
                     "--threads", "1", "--eval-data", data]
        result = self.succeed(self.run_program(*arguments))
        summary, metrics = self.summary(out), self.metrics(out)
        self.assertEqual(summary["steps"], 4)  # a row each
        self.assertEqual(summary["skipped_steps"], 2)
        self.assertEqual(summary["tokens"], 10 + 32)
        self.assertEqual(result.stderr.count("hold no target"), 2)
        self.assertEqual([m["loss"] is None for m in metrics], [m["skipped"] for m in metrics])
        self.assertIn('seq-len = 32', (out / "config.toml").read_text())

    def test_accumulation_is_the_same_loss(self):
        values = [i * i % 251 for i in range(8 * 33)]
        mask = [int(i * i % 7 < 3) for i in range(8 * 33)]
        data = self.tokens("rows", values, mask, layout="rows", row_length=33, dtype="uint16")
        losses = []
        for name, micro, accumulated in [("a", 4, 1), ("b", 1, 4)]:
            out = self.root / name
            self.succeed(self.run_program("train", "--model", "tiny-gpt2", "--data", data, "--out", out, "--steps", "4",
                                          "--micro-batch", micro, "--grad-accum", accumulated, "--device", "host",
                                          "--threads", "1", "--lr", "1e-3"))
            losses.append([m["loss"] for m in self.metrics(out)])
        for one, four in zip(*losses):
            self.assertAlmostEqual(one, four, delta=2e-3 * one)
        self.assertAlmostEqual(losses[0][0], losses[1][0], delta=1e-6 * losses[0][0])

    def test_what_a_bare_file_is_taken_for(self):
        data = self.tokens("bare", [i * i % 251 for i in range(300)])
        result = self.succeed(self.train("--steps", "1", data=data))
        self.assertEqual([line for line in result.stderr.splitlines() if "bare.bin" in line],
                         [f"tandem: warning: data {data}: nothing says what its tokens are, so it is taken for a stream of"
                          " uint16"])
        self.tokens("bare", [i * i % 251 for i in range(300)], [1] * 300)
        result = self.succeed(self.train("--steps", "1", data=data))
        self.assertIn("bare.json is missing, though bare.mask.bin lies beside it", result.stderr)
        self.tokens("bare", [i * i % 251 for i in range(300)], [1] * 300, dtype="uint16")
        self.assertNotIn("bare", self.succeed(self.train("--steps", "1", data=data)).stderr)


if __name__ == "__main__":
    main()
