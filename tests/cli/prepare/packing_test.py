"""Packed rows of tools/prepare_data.py: whole records, full rows, the same bytes however the work is done, and masks.

The tokenizer is a stand-in that makes a token of each byte, so that any Python can run these tests."""
import json
import math
import os
import pathlib
import random
import signal
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import main  # noqa: E402
from stand_in import SLOW, StandInTest  # noqa: E402

END = 256
PACKED = ["--layout", "packed", "--row-length"]


def lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def text(number, length):
    """A record of so many tokens, the last of which is the end token. Its text tells it from others."""
    begin = f"{number:x}."
    return {"text": (begin + "x" * length)[:length - 1]}


class Packing(StandInTest):
    @staticmethod
    def lengths(count):
        """Lengths as those of answers in chats: many short ones, few long ones."""
        drawn = random.Random(20240521)
        return [max(2, round(drawn.lognormvariate(math.log(180), 0.8))) for _ in range(count)]

    def written(self, out=None):
        """Token ids, mask and description."""
        out = out or self.out
        raw = out.read_bytes()
        return (list(struct.unpack(f"<{len(raw) // 2}H", raw)), out.with_suffix(".mask.bin").read_bytes(),
                json.loads(out.with_suffix(".json").read_text()))

    def rows(self, out=None):
        """Records of each row, as pairs of ids and mask; padding is one of them."""
        ids, mask, description = self.written(out)
        length = description["row_length"]
        self.assertEqual((len(ids), len(mask)), (description["rows"] * length,) * 2)
        found = []
        for at in range(0, len(ids), length):
            firsts = [i for i in range(at, at + length) if mask[i] & 2] + [at + length]
            self.assertEqual(firsts[0], at, "a row begins with a record")
            found.append([(ids[a:b], mask[a:b]) for a, b in zip(firsts, firsts[1:])])
        return found

    @staticmethod
    def is_padding(record):
        return set(record[0]) == {END} and not any(m & 1 for m in record[1])

    def records(self, out=None):
        """Ids of the records of all rows, row by row."""
        return [record[0] for row in self.rows(out) for record in row if not self.is_padding(record)]

    def test_rows_are_full_and_no_record_is_cut_that_fits(self):
        lengths = self.lengths(2000)
        self.assertGreater(sum(n > 1025 for n in lengths), 10)
        given = [text(i, n) for i, n in enumerate(lengths)]
        result = self.succeed(self.prepare("--out", self.out, *PACKED, "1025", self.file("in.jsonl", lines(given))))
        wanted = [[*r["text"].encode(), END][:1025] for r in given]
        rows, (ids, mask, description) = self.rows(), self.written()
        self.assertEqual(sorted(self.records()), sorted(wanted))
        full = sum(map(len, wanted)) / len(ids)
        self.assertGreaterEqual(full, 0.97)
        self.assertIn(f"packed 2,000 records in {len(rows)} rows of 1,025: {full:.1%} full\n", result.stdout)
        self.assertIn(f"{sum(n > 1025 for n in lengths)} records cut at --row-length", result.stderr)
        self.assertEqual({k: description[k] for k in ("layout", "row_length", "records", "rows", "tokens", "targets", "end_token")},
                         {"layout": "packed", "row_length": 1025, "records": 2000, "rows": len(rows), "tokens": len(ids),
                          "targets": mask.count(1), "end_token": END})
        # All but a record's first token is learnt of a text; padding comes last in a row, and is one record.
        for row in rows:
            for at, record in enumerate(row):
                padding = self.is_padding(record)
                self.assertEqual(record[1], b"\2" + (b"\0" if padding else b"\1") * (len(record[0]) - 1))
                self.assertTrue(not padding or at == len(row) - 1)
        # Long records do not come first, and those of a row are in their order.
        number = {tuple(ids): i for i, ids in enumerate(wanted)}
        numbers = [[number[tuple(r[0])] for r in row if not self.is_padding(r)] for row in rows]
        self.assertTrue(all(row == sorted(row) for row in numbers))
        longest = [max(row, key=lambda i: (len(wanted[i]), -i)) for row in numbers]
        self.assertEqual(longest, sorted(longest))

    def test_the_same_bytes_however_the_work_is_done(self):
        given = self.file("in.jsonl", lines(text(i, n) for i, n in enumerate(self.lengths(300))))
        made = set()
        for flags in (["--workers", "1"], ["--workers", "3"], ["--workers", "3", "--part-bytes", "300"], ["--part-bytes", "9000"]):
            self.succeed(self.prepare("--out", self.out, *PACKED, "1025", "--validation", "0.1", *flags, given))
            made.add(tuple(p.read_bytes() for p in sorted(self.d.iterdir())))
            self.assertEqual(len(os.listdir(self.d)), 6)
        self.assertEqual(len(made), 1)

    def test_the_same_bytes_after_a_kill(self):
        slow = self.file("slow.jsonl", "".join(SLOW[:100]) + lines(text(i, 2 + i % 50) for i in range(100)))
        self.succeed(self.prepare("--out", self.out, *PACKED, "64", slow))
        whole = [p.read_bytes() for p in sorted(self.d.iterdir())]
        process = self.begin("--out", self.out, *PACKED, "64", slow)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result = self.succeed(self.prepare("--out", self.out, *PACKED, "64", "--part-bytes", "200", slow))
        self.assertIn("going on", result.stderr)
        self.assertEqual([p.read_bytes() for p in sorted(self.d.iterdir())], whole)

    def test_more_parts_than_are_kept_open(self):
        given = [self.file(f"in/{i:03}.txt", text(i, 3 + i * 7 % 40)["text"]) for i in range(230)]
        self.succeed(self.prepare("--out", self.out, *PACKED, "60", self.root / "in"))
        self.assertEqual(sorted(self.records()), sorted([*p.read_bytes(), END] for p in given))

    def test_records_are_cut_and_left_out_as_in_rows(self):
        given = self.file("in.jsonl", lines([{"prompt": "ab", "completion": "cd"}, {"prompt": "abcdefgh", "completion": "i"},
                                             {"prompt": "abcde", "completion": "fgh"}, {"prompt": "x", "completion": ""}]))
        told = []
        for layout in ("rows", "packed"):
            result = self.succeed(self.prepare("--out", self.out, "--layout", layout, "--row-length", "7", given))
            told.append((result.stderr, result.stdout.split("records,")[0].replace("packed 3 records in 2 rows of 7: 100.0% full\n", "")))
        self.assertEqual(told[0], told[1])
        self.assertIn("2 records cut at --row-length", told[0][0])
        self.assertIn("1 records left out: without any target, 1 of them as their targets stand beyond --row-length", told[0][0])
        abcd, abcde, x = ([*b"abcd", END], b"\2\0\1\1\1"), ([*b"abcdefg"], b"\2\0\0\0\0\1\1"), ([*b"x", END], b"\2\1")
        self.assertEqual(self.rows(), [[abcd, x], [abcde]])

    def test_a_record_may_end_with_its_row(self):
        given = self.file("in.jsonl", lines([text(0, 5), text(1, 3), text(2, 2), text(3, 4)]))
        self.succeed(self.prepare("--out", self.out, "--no-end-token", *PACKED, "5", given))
        ids, mask, description = self.written()
        self.assertEqual(description["end_token"], None)
        self.assertEqual((bytes(ids), list(mask)), (b"0.xx\0" + b"1." + b"3.x", [2, 1, 1, 1, 2, 2, 1, 2, 1, 1]))

    def test_a_validation_set_has_rows_of_its_own(self):
        given = [text(i, n) for i, n in enumerate(self.lengths(200))]
        path, held_out = self.file("in.jsonl", lines(given)), self.d / "out-validation.bin"
        result = self.succeed(self.prepare("--out", self.out, *PACKED, "1025", "--validation", "0.1", path))
        self.assertIn("packed 180 records in ", result.stdout)
        self.assertIn("packed 20 records in ", result.stdout)
        training, validation = self.records(), self.records(held_out)
        self.assertEqual((len(training), len(validation)), (180, 20))
        self.assertEqual(sorted(training + validation), sorted([*r["text"].encode(), END][:1025] for r in given))
        self.assertEqual(self.written(held_out)[2]["validation_of"], "out.bin")

    def test_the_longest_record_is_a_row_where_no_length_is_given(self):
        self.succeed(self.prepare("--out", self.out, "--layout", "packed", self.file("in.jsonl", lines([text(0, 4), text(1, 9)]))))
        self.assertEqual(self.written()[2]["row_length"], 9)

    def test_rows_longer_than_the_models_positions(self):
        given = self.file("in.jsonl", lines([text(0, 4), text(1, 70)]))
        rows = ["--layout", "rows"]
        for config, what in [({"n_positions": 64}, 64), ({"max_position_embeddings": 64}, 64), ({"text_config": {"n_positions": 64}}, 64)]:
            self.file("model/config.json", json.dumps(config))
            for flags in ([*PACKED, "66"], [*rows, "--row-length", "66"], rows, ["--layout", "packed"]):
                line = self.refused(self.prepare("--out", self.out, *flags, given))
                self.assertIn(f"config.json has {what} positions", line)
                self.assertIn("give --row-length 65", line)
            self.succeed(self.prepare("--out", self.out, *PACKED, "65", given))
            self.assertEqual(self.written()[2]["row_length"], 65)
            for path in self.d.iterdir():
                path.unlink()
        self.succeed(self.prepare("--out", self.out, given))  # a stream is cut in windows
        for config in ({}, {"n_positions": None, "max_position_embeddings": "64"}):  # says nothing
            self.file("model/config.json", json.dumps(config))
            self.succeed(self.prepare("--out", self.out, *PACKED, "66", given))

    def test_a_row_length_that_no_memory_holds(self):
        given = self.file("in.jsonl", lines([text(0, 4)]))
        for layout in ("rows", "packed"):
            line = self.refused(self.prepare("--out", self.out, "--layout", layout, "--row-length", "999999999999", given))
            self.assertIn("--row-length 999999999999: at most", line)

    def refused(self, result):
        """One line with exit code 2, behind those of progress, and no outputs."""
        self.assertEqual(result.returncode, 2, result.stderr + result.stdout)
        lines = [line for line in result.stderr.splitlines() if " parts, " not in line]
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("prepare_data.py: error: "), lines[0])
        self.assertEqual(list(self.d.iterdir()), [])
        return lines[0]

    def test_the_program_reads_what_is_written(self):
        given = self.file("in.jsonl", lines(text(i, n % 60 + 2) for i, n in enumerate(self.lengths(60))))
        self.succeed(self.prepare("--out", self.out, *PACKED, "65", given))
        model = self.file("config.json", json.dumps({
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 1, "n_head": 2,
            "n_positions": 64, "n_ctx": 64}))
        run = self.root / "run"
        self.succeed(self.run_program("train", "--model", model, "--data", self.out, "--out", run, "--epochs", "1", "--micro-batch", "1",
                                      "--device", "host", "--threads", "1"))
        self.assertEqual(self.summary(run)["tokens"], self.written()[2]["targets"])

    def test_its_own_files_are_replaced_and_not_read(self):
        given = self.file("d/in.jsonl", lines(text(i, 5 + i) for i in range(9)))
        for flags in ([*PACKED, "20"], [*PACKED, "20"], []):
            result = self.succeed(self.prepare("--out", self.out, *flags, given.parent))
        self.assertIn("out.mask.bin", result.stderr)  # left out
        self.assertEqual(json.loads((self.d / "out.json").read_text())["records"], 9)
        self.assertEqual(sorted(os.listdir(self.d)), ["in.jsonl", "out.bin", "out.json"])


if __name__ == "__main__":
    main()
