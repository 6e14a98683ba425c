"""packing: several records in a row, beside a record in each: how full rows are, and target tokens per second.

2,000 records of lengths drawn log-normally (median 180, sigma 0.8, at most a row of 1,025), prepared by tools/prepare_data.py in
both layouts; the gpt2 shape on the host device, two threads, a row at a time. Runs alternate, and the first step of each is left out.
"""
import json
import math
import random
import shutil
import statistics

import harness

RECORDS, MEDIAN, SIGMA, ROW = 2000, 180, 0.8, 1025
STEPS, PAIRS, THREADS = 4, 3, 2
WORDS = 256


def write_tokenizer(folder):
    """A word is a token."""
    vocabulary = {f"w{i}": i for i in range(WORDS)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}))
    return folder / "tokenizer.json"


def write_records(path):
    chance = random.Random(1)
    with path.open("w") as out:
        for _ in range(RECORDS):
            length = round(math.exp(math.log(MEDIAN) + SIGMA * chance.gauss(0.0, 1.0)))
            words = (f"w{chance.randrange(WORDS)}" for _ in range(min(max(length, 2), ROW)))
            out.write(json.dumps({"text": " ".join(words)}) + "\n")


def prepare(python, folder, layout):
    """The token file of a layout, and what share of it is records."""
    out = folder / f"{layout}.bin"
    harness.run([python, harness.ROOT / "tools" / "prepare_data.py", "--tokenizer", folder / "tokenizer", "--out", out, "--layout", layout,
                 "--row-length", str(ROW), "--no-end-token", "--show", "0", folder / "records.jsonl"])
    return out


def pairs(files):
    return json.loads(harness.output([harness.program("bench_packing"), str(ROW - 1), *files]))


def step_seconds(folder, data):
    """Median seconds of a step over one row."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    harness.run([harness.program("tandem"), "train", "--model", "gpt2", "--data", data, "--out", out, "--device", "host", "--policy",
                 "device", "--threads", str(THREADS), "--update-threads", str(THREADS), "--steps", str(STEPS)], env=harness.QUIET)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_seconds"] for line in lines[1:])


def measure():
    harness.build("tandem", "bench_packing")
    python = harness.peers("tokenizers")
    folder = harness.BUILD / "bench-packing"
    shutil.rmtree(folder, ignore_errors=True)
    write_tokenizer(folder / "tokenizer")
    write_records(folder / "records.jsonl")
    padded, packed = prepare(python, folder, "rows"), prepare(python, folder, "packed")
    of_padded, of_packed = pairs([padded]), pairs([packed])
    records = sum(len(json.loads(line)["text"].split()) for line in (folder / "records.jsonl").read_text().splitlines())
    rates = {padded: [], packed: []}  # target tokens a second: those of a row on average, as few rows are trained on
    for _ in range(PAIRS):
        for data, facts in ((padded, of_padded), (packed, of_packed)):
            rates[data].append(facts["targets"] / facts["windows"] / step_seconds(folder, data))
    figures = harness.Figures()
    figures.add("fill", [records / (of_packed["windows"] * ROW)])
    figures.add("fill_of_padded", [records / (of_padded["windows"] * ROW)])
    figures.add("packed_over_padded", harness.ratios(rates[packed], rates[padded]))
    figures.add("pairs_over_needed", [of_packed["made"] / of_packed["seen"]])
    return figures.line("packing", records=RECORDS, row=ROW, steps=STEPS, pairs=PAIRS)
