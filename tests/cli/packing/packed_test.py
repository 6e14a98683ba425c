"""Training on packed rows, and with documents kept apart: no setting changes what is learnt, and plans count what is attended."""
import json
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from program import PROFILES, ProgramTest, main  # noqa: E402

ROW = 65


class Packed(ProgramTest):
    def write(self, name, rows, layout):
        """A token file of rows, each a list of records, which are filled with padding."""
        tokens, mask = [], []
        for records in rows:
            left = ROW - sum(map(len, records))
            for record in [*records, [0] * left if left else []]:
                tokens += record
                targets = record is not records[-1] or not left
                mask += [2 * (layout == "packed")] * bool(record) + [int(any(record))] * (len(record) - 1)
        path = self.file(f"{name}.bin", struct.pack(f"<{len(tokens)}H", *tokens))
        self.file(f"{name}.mask.bin", bytes(mask))
        self.file(f"{name}.json", json.dumps({"dtype": "uint16", "layout": layout, "row_length": ROW}))
        return path

    def setUp(self):
        super().setUp()
        records = [[1 + (7 * i * i + 3 * j * (1 + i % 5)) % 200 for j in range(2 + 11 * i % 40)] for i in range(60)]
        rows, row = [], []
        for record in records:
            if sum(map(len, row)) + len(record) > ROW:
                rows, row = [*rows, row], []
            row = [*row, record]
        self.packed = self.write("packed", [*rows, row], "packed")
        self.rows = self.write("rows", [[record] for record in records], "rows")
        stream = sum(([*record, 250] for record in records), [])
        self.stream = self.file("stream.bin", struct.pack(f"<{len(stream)}H", *stream))
        self.file("stream.json", json.dumps({"dtype": "uint16", "end_token": 250}))

    def train(self, out, data, *flags, steps=6):
        return self.run_program("train", "--model", "tiny-llama", "--data", data, "--device", "host", "--threads", "1",
                                "--grad-accum", "2", "--steps", steps, "--out", self.root / out, *flags)

    def digest(self, out, data, *flags, **more):
        self.succeed(self.train(out, data, *flags, **more))
        return self.summary(self.root / out)["state_digest"]

    def test_no_setting_changes_what_is_learnt(self):
        one = self.digest("one", self.packed)
        for i, more in enumerate([["--policy", "host"], ["--policy", "interleave:2"], ["--recompute", "block"], ["--threads", "3"],
                                  ["--accumulation-order", "layer"], ["--device", "host,host"]]):
            self.assertEqual(self.digest(f"other-{i}", self.packed, *more), one, more)
        self.assertNotEqual(self.digest("rows", self.rows), one)

    def test_resumes_to_the_bit(self):
        whole = self.digest("whole", self.packed, "--decay-steps", "9", steps=9)
        self.digest("parts", self.packed, "--decay-steps", "9", steps=4)
        self.assertEqual(self.digest("parts", self.packed, "--decay-steps", "9", "--resume", steps=9), whole)

    def test_documents_of_a_stream_are_kept_apart(self):
        flags = ["--seq-len", "32"]
        together = self.digest("together", self.stream, *flags)
        apart = self.digest("apart", self.stream, *flags, "--document-attention")
        self.assertNotEqual(apart, together)
        self.assertEqual(self.digest("stream", self.stream, *flags, "--document-attention", "--policy", "stream"), apart)
        refused = self.train("apart", self.stream, *flags, "--no-document-attention", "--resume", steps=8)
        self.assertEqual(refused.returncode, 4, refused.stderr)

    def test_what_has_no_documents_is_refused(self):
        text = self.file("text.txt", "some text " * 50)
        for data in (text, self.rows):
            result = self.train("out", data, "--seq-len", "16", "--document-attention")
            self.assertEqual(result.returncode, 4, result.stderr)
            self.assertIn("--document-attention", result.stderr)

    def test_evaluates_records_apart(self):
        self.succeed(self.train("run", self.packed, "--eval-data", self.packed))
        result = self.succeed(self.run_program("eval", "--model", self.root / "run", "--data", self.packed, "--device", "host", "--threads", "1",
                                               "--json"))
        loss = json.loads(result.stdout)["loss"]
        self.assertAlmostEqual(loss, self.summary(self.root / "run")["eval_loss"], places=6)

    def test_plans_count_targets_and_what_is_attended(self):
        def plan(data, *flags):
            result = self.succeed(self.run_program("plan", "--model", "tiny-llama", "--profile", PROFILES / "8gb-pcie4.toml", "--json", "--micro-batch",
                                                   "4", *data, *flags))
            return json.loads(result.stdout)["predicted"]
        packed, rows, none = plan(["--data", self.packed]), plan(["--data", self.rows]), plan([], "--seq-len", ROW - 1)
        self.assertEqual(none["tokens_per_second"], none["all_tokens_per_second"])
        self.assertLess(packed["tokens_per_second"], packed["all_tokens_per_second"])
        self.assertGreater(packed["tokens_per_second"], 1.5 * rows["tokens_per_second"])
        self.assertLess(packed["forward_seconds"], none["forward_seconds"])


if __name__ == "__main__":
    main()
