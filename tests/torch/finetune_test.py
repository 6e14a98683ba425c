"""Training of a fine-tuning by PyTorch: documents of a row do not see each other, a loss is the mean over targets, the rate is the
program's; killed at any moment it comes to the bits of a run that was not; the best model is left, whole, and answers."""
import dataclasses
import errno
import io
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import warnings

import sandbox  # noqa: F401
import torch

try:
    import transformers

    import finetune_runs as runs
except ImportError as error:
    print(f"skipped: no {error.name}")
    sys.exit(77)

import numpy  # noqa: E402

import tandem  # noqa: E402
from tandem.finetuning.with_torch import model as torch_model  # noqa: E402
from tandem.finetuning.learning_rate import rate  # noqa: E402
from tandem.finetuning.refusal import Refusal  # noqa: E402
from tandem.finetuning.token_rows import NO_TARGET, Order, TokenRows, groups_of  # noqa: E402
from tandem.finetuning.with_torch import chat, train  # noqa: E402

warnings.simplefilter("ignore")


class RunTest(unittest.TestCase):
    """Runs in a folder of the class, over the model `kind` unless a test makes another."""

    kind = "neox"

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.base = pathlib.Path(folder.name) / "base"
        cls.base.mkdir()
        runs.make_model(cls.base / "model", cls.kind)
        runs.prepare(cls.base, cls.base / "model", runs.chats(40), validation=0.15)
        cls.whole = None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name) / "own"
        shutil.copytree(self.base, self.folder, ignore=shutil.ignore_patterns("run"))
        self.said = []

    def train(self, out="run", **changed):
        train(runs.run_of(self.folder, out, **changed), self.said.append)
        return self.summary(out)

    def summary(self, out="run"):
        return json.loads((self.folder / out / "summary.json").read_text())

    def metrics(self, out="run"):
        lines = [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in lines], list(range(1, len(lines) + 1)))
        return [{key: line.get(key) for key in ("step", "loss", "grad_norm", "lr", "skipped", "eval_loss")} for line in lines]

    def result(self, out="run"):
        """All that two equal runs have in common."""
        model = self.folder / out / "model" / "model.safetensors"
        told = {key: self.summary(out)[key] for key in ("state_digest", "tokens", "first_loss", "best_loss", "best_step", "skipped_steps")}
        return told, self.metrics(out), model.read_bytes()

    def uninterrupted(self, steps=8):
        """The result of a run that nothing disturbs."""
        if type(self).whole is None:
            train(runs.run_of(self.base, steps=steps), lambda _: None)
            folder, self.folder = self.folder, self.base
            type(self).whole = self.result()
            self.folder = folder
        return type(self).whole

    def refuses(self, code, *texts, **changed):
        with self.assertRaises(Refusal) as caught:
            self.train(**changed)
        self.assertEqual(caught.exception.code, code, caught.exception)
        for text in texts:
            self.assertIn(text, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class Rows(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        runs.make_tokenizer(cls.folder / "model")
        cls.records = runs.chats(30)

    def documents(self, layout, row_length):
        rows = TokenRows(runs.prepare(self.folder, self.folder / "model", self.records, layout, layout, row_length))
        found = [document for index in range(len(rows)) for document in rows.row(index).documents()]
        self.assertEqual(sum(rows.row(index).target_count for index in range(len(rows))),
                         sum(int((document.targets != NO_TARGET).sum()) for document in found))
        return sorted((document.inputs.tolist(), document.targets.tolist()) for document in found)

    def test_packed_documents_are_those_of_rows_of_their_own(self):
        packed, alone = self.documents("packed", 193), self.documents("rows", 193)
        self.assertEqual(packed, alone)
        self.assertEqual(len(packed), len(self.records))

    def test_targets_are_the_answers(self):
        rows = TokenRows(runs.prepare(self.folder, self.folder / "model", self.records[:1], "one", "rows", 65))
        row = rows.row(0)
        text = bytes(b - 1 if b else 0 for b in row.targets[row.targets != NO_TARGET])  # ids are places in the sorted alphabet
        self.assertEqual(len(text), len("It is 0.\n") + 1)  # its end token, too
        self.assertEqual(row.targets[-1], 0)

    def test_groups_hold_each_document_once_and_no_more_than_they_may(self):
        rows = TokenRows(runs.prepare(self.folder, self.folder / "model", self.records, "groups", "packed", 257))
        documents = [document for index in range(len(rows)) for document in rows.row(index).documents()]
        for tokens in (1, 64, 100, 256):
            groups = groups_of(documents, tokens)
            self.assertEqual(sum(map(len, groups)), len(documents))
            for group in groups:
                self.assertTrue(len(group) == 1 or len(group) * max(len(d.inputs) for d in group) <= tokens)

    def test_an_epoch_visits_each_row_once_in_an_order_of_its_own(self):
        order = Order(10, 4, 42)
        seen = [row for step in range(1, 6) for row in order.rows_of(step)]
        self.assertEqual(sorted(seen[:10]), list(range(10)))
        self.assertEqual(sorted(seen[10:]), list(range(10)))
        self.assertNotEqual(seen[:10], seen[10:])
        self.assertEqual(Order(10, 4, 42).rows_of(4), order.rows_of(4))
        self.assertNotEqual([Order(10, 10, 43).rows_of(1)], [seen[:10]])

    def test_files_that_are_no_rows(self):
        stream = runs.prepare(self.folder, self.folder / "model", self.records, "stream", "stream", None)
        file = runs.prepare(self.folder, self.folder / "model", self.records, "short")
        file.write_bytes(file.read_bytes()[:-2])
        for file in (stream, file, self.folder / "none.bin"):
            with self.assertRaises(Refusal) as caught:
                TokenRows(file)
            self.assertEqual(caught.exception.code, 4)


class Rate(unittest.TestCase):
    def test_it_is_that_of_the_program(self):
        """Rates by hand from docs/cli.md: warm-up in a line, then down to a tenth at the last step."""
        rates = {kind: [rate(kind, 1.0, step, 10, 2) for step in (1, 2, 6, 9, 10)] for kind in ("constant", "linear", "cosine", "wsd")}
        expected = {"constant": [0.5, 1, 1, 1, 1], "linear": [0.5, 1, 0.55, 0.2125, 0.1],
                    "cosine": [0.5, 1, 0.55, 0.1 + 0.45 * (1 + math.cos(math.pi * 7 / 8)), 0.1], "wsd": [0.5, 1, 1, 1, 0.1]}
        for kind, values in expected.items():
            numpy.testing.assert_allclose(rates[kind], values, rtol=1e-12, err_msg=kind)
        self.assertEqual([rate("wsd", 1.0, step, 100, 0) for step in (90, 95, 100)], [1.0, 0.55, 0.1])
        self.assertEqual(rate("cosine", 1.0, 1, 1, 0), 0.1)


class Loss(RunTest):
    """The first step against transformers' own model in fp32, document by document."""

    NOISE = 0.12  # bound on the error of a token's loss, in bf16

    def reference(self, rows, apart=True):
        """Losses of all targets of rows, their mean, and the norm of its gradient."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.bfloat16).float().train()
        losses = []
        for each in (document for row in rows for document in (row.documents() if apart else [row])):
            logits = model(input_ids=torch.from_numpy(each.inputs)[None], use_cache=False).logits[0]
            chosen = torch.from_numpy(each.targets) != NO_TARGET
            losses.append(torch.nn.functional.cross_entropy(logits[chosen], torch.from_numpy(each.targets)[chosen], reduction="none"))
        loss = torch.cat(losses).sum() / sum(row.target_count for row in rows)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        return torch.cat(losses).detach(), float(loss.detach()), float(norm)

    def first_step(self, **changed):
        """Losses of all targets of the first step, its loss and its norm."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        cross_entropy, found = torch.nn.functional.cross_entropy, []

        def watched(logits, targets, reduction):
            self.assertEqual(reduction, "sum")
            losses = cross_entropy(logits, targets, reduction="none")
            if torch.is_grad_enabled():  # else it only measures time
                found.append(losses.detach())
            return losses.sum()

        with unittest.mock.patch("torch.nn.functional.cross_entropy", watched):
            self.train(steps=1, evaluate_every=0, checkpoint_every=0, **changed)
        line = self.metrics()[0]
        return torch.cat(found), line["loss"], line["grad_norm"]

    def check_kind(self, kind, layout="packed", own_way=False):
        shutil.rmtree(self.folder / "model")
        runs.make_model(self.folder / "model", kind)
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        for file in self.folder.glob("chat-validation.*"):
            file.unlink()
        rows = TokenRows(runs.prepare(self.folder, self.folder / "model", runs.chats(40), layout=layout))
        chosen = [rows.row(index) for index in Order(len(rows), 4, 42).rows_of(1)]
        self.assertGreater(len({row.target_count for row in chosen}), 1)  # else a mean of means would be the same
        losses, loss, norm = self.reference(chosen)
        for micro_batch, accumulation in ((2, 2), (1, 4), (4, 1)):
            with self.subTest(kind=kind, micro_batch=micro_batch):
                found, found_loss, found_norm = self.first_step(micro_batch=micro_batch, accumulation=accumulation)
                self.assertLess(self.apart(found, losses, own_way), self.NOISE)
                self.assertLess(abs(found_loss - loss), 2e-3 * loss)
                self.assertLess(abs(found_norm - norm), 2e-2 * norm)
        self.assertEqual(any("one beside another" in line for line in self.said), own_way)
        if layout == "packed":
            leaking = self.reference(chosen, apart=False)[0]
            self.assertGreater(self.apart(leaking, losses, False), 3 * self.NOISE)

    @staticmethod
    def apart(found, losses, sort):
        """Largest difference of a target's loss; sorted where documents are not in the order of the rows."""
        return float((found.sort().values - losses.sort().values if sort else found - losses).abs().max())

    def test_rotary_positions(self):
        self.check_kind("neox")

    def test_learnt_positions(self):
        self.check_kind("gpt2")

    def test_models_that_take_no_positions(self):
        self.check_kind("bloom", own_way=True)

    def test_models_with_a_state(self):
        self.check_kind("jamba", own_way=True)

    def test_rows_of_one_record(self):
        self.check_kind("neox", "rows")

    def test_the_clip_acts_and_the_norm_is_that_before(self):
        found = {}
        for clip in (0.0, 1e-3, 1e9):
            found[clip] = (*self.first_step(clip=clip)[1:], self.summary()["state_digest"])
        self.assertEqual(found[0.0], found[1e9])
        self.assertEqual(found[0.0][:2], found[1e-3][:2])
        self.assertNotEqual(found[0.0][2], found[1e-3][2])

    def test_matrices_decay_alone(self):
        model = torch_model.TorchModel(self.folder / "model", runs.settings(weight_decay=0.1), passes=1, tokens_at_once=1)
        decays = {parameter: group["weight_decay"] for group in model.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in model.module.named_parameters():
            self.assertEqual(decays[parameter], 0.1 if parameter.dim() >= 2 else 0.0, name)
        model.close()


class Run(RunTest):
    def test_what_a_run_leaves(self):
        summary = self.train()
        self.assertLess(summary["final_loss"], 0.9 * summary["first_loss"])
        self.assertEqual((summary["steps"], summary["ended_by"], summary["skipped_steps"], summary["resumed_from_step"]), (8, "steps", 0, None))
        lines = self.metrics()
        self.assertEqual([line["step"] for line in lines if line["eval_loss"] is not None], [3, 6, 8])
        self.assertEqual(summary["tokens"], self.targets_of(8))
        self.assertEqual(summary["best_loss"], min(line["eval_loss"] for line in lines if line["eval_loss"] is not None))
        self.assertEqual(sorted(path.name for path in (self.folder / "run").iterdir()), ["checkpoints", "metrics.jsonl", "model", "summary.json"])
        for key in ("parameters", "device", "policy", "planned_device_bytes", "peak_host_bytes", "compute_key", "version", "command"):
            self.assertIn(key, summary)

    def targets_of(self, steps):
        rows = TokenRows(self.folder / "chat.bin")
        order = Order(len(rows), 4, 42)
        return sum(rows.row(index).target_count for step in range(1, steps + 1) for index in order.rows_of(step))

    def eval_loss(self, folder):
        """Mean loss of a folder's model over the validation set, document by document, by transformers alone."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
        rows, total, targets = TokenRows(self.folder / "chat-validation.bin"), 0.0, 0
        with torch.no_grad():
            for each in (document for index in range(len(rows)) for document in rows.row(index).documents()):
                logits = model(input_ids=torch.from_numpy(each.inputs)[None]).logits[0]
                total += float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(each.targets), reduction="sum"))
                targets += int((each.targets != NO_TARGET).sum())
        return total / targets

    def test_patience_ends_a_run_and_the_best_model_is_kept(self):
        summary = self.train(steps=200, lr=0.2, warmup=0.0, schedule="constant", evaluate_every=1, patience=3)
        self.assertEqual(summary["ended_by"], "patience")
        self.assertEqual(summary["steps"], summary["best_step"] + 3)
        self.assertLess(summary["best_loss"], summary["eval_loss"])
        self.assertLess(abs(self.eval_loss(self.folder / "run" / "model") - summary["best_loss"]), 1e-2 * summary["best_loss"])
        kept = {path.name for path in (self.folder / "run" / "checkpoints").iterdir()}
        self.assertLessEqual({f"step-{step:08}" for step in (summary["best_step"], summary["steps"])}, kept)
        self.assertLessEqual(len(kept), 3)
        before = self.result()
        self.train(steps=200, lr=0.2, warmup=0.0, schedule="constant", evaluate_every=1, patience=3)  # takes no further step
        self.assertEqual(self.result(), before)
        self.assertIn("all is done", self.said[-1])

    def test_a_step_that_is_not_finite_leaves_no_trace(self):
        loss_sum = torch_model.TorchModel.loss_sum
        calls = 0

        def poisoned(model, batch):
            nonlocal calls
            calls += torch.is_grad_enabled()
            return loss_sum(model, batch) * (math.inf if calls in (3, 4) and torch.is_grad_enabled() else 1)

        with unittest.mock.patch.object(torch_model.TorchModel, "loss_sum", poisoned):
            summary = self.train(steps=2, evaluate_every=0, checkpoint_every=0)
        lines = self.metrics()
        self.assertEqual([line["skipped"] for line in lines], [False, True])
        self.assertEqual((summary["skipped_steps"], lines[1]["loss"], lines[1]["grad_norm"]), (1, None, None))
        self.assertEqual(self.summary()["state_digest"], self.digest_of_one_step(lines[0]["lr"]))

    def digest_of_one_step(self, lr):
        """Digest after the first step alone, at the same rate."""
        with unittest.mock.patch("tandem.finetuning.with_torch.training.rate", lambda *_: lr):
            return self.train(out="one", steps=1, evaluate_every=0, checkpoint_every=0) and self.summary("one")["state_digest"]

    def test_ten_such_steps_end_a_run(self):
        with unittest.mock.patch.object(torch_model.TorchModel, "loss_sum", _infinite), \
                self.assertRaisesRegex(Refusal, "10 steps in a row") as caught:
            self.train(steps=50, evaluate_every=0)
        self.assertEqual(caught.exception.code, 6)
        self.assertEqual(len(self.metrics()), 10)

    def test_the_model_loads_in_transformers_with_its_tokenizer(self):
        self.train(evaluate_every=0)
        folder = self.folder / "run" / "model"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.assertEqual(model.dtype, torch.bfloat16)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.assertEqual(tokenizer.decode(tokenizer("What is 3?")["input_ids"]), "What is 3?")

    def test_the_model_appears_complete(self):
        """With all that is added to it; where that fails there is none, and the next call writes it. Deleted, it is written again. The figures
        of the run stay."""
        model = self.folder / "run" / "model"

        def add(folder):
            self.assertTrue((folder / "model.safetensors").is_file())
            self.assertFalse(model.exists())
            if not failing:
                (folder / "added.txt").write_text("by the caller")
            else:
                raise OSError("no room")

        run = dataclasses.replace(runs.run_of(self.folder), complete=add)
        failing = True
        with self.assertRaises(Refusal):
            train(run, self.said.append)
        self.assertFalse(model.exists())
        failing = False
        train(run, self.said.append)
        expected = self.result()
        self.assertEqual(expected, self.uninterrupted())
        summary = self.summary()
        shutil.rmtree(model)
        train(run, self.said.append)
        self.assertEqual((self.result(), self.summary()), (expected, summary))
        self.assertEqual((model / "added.txt").read_text(), "by the caller")
        self.assertEqual([path.name for path in (self.folder / "run").glob(".*")], [])

    def test_models_and_data_that_will_not_do(self):
        runs.prepare(self.folder, self.folder / "model", runs.chats(9), layout="stream", row_length=None)
        self.refuses(4, "cannot be read as rows")
        runs.prepare(self.folder, self.folder / "model", runs.chats(9))
        description = self.folder / "chat.json"
        description.write_text(json.dumps({**json.loads(description.read_text()), "vocab_size": 300}))
        self.refuses(4, "its tokenizer has 300 tokens, and the model 257")
        transformers.T5Config().save_pretrained(self.folder / "model")
        self.refuses(2, "a t5 is no language model")
        (self.folder / "model" / "config.json").write_text('{"model_type": "nonesuch"}')
        self.refuses(2, "does not know its kind")

    def test_a_schedule_that_is_none(self):
        self.refuses(2, "'linera': is no schedule; use constant, linear, cosine or wsd", schedule="linera")
        self.assertFalse((self.folder / "run").exists())

    def test_a_disk_without_room_for_checkpoints(self):
        with unittest.mock.patch("shutil.disk_usage", return_value=shutil._ntuple_diskusage(10**9, 10**9, 10**6)):
            self.refuses(7, "checkpoints and model take 0.00 GB more")
        self.assertFalse((self.folder / "run" / "metrics.jsonl").exists())

    def test_a_ceiling_that_is_too_low(self):
        with self.assertRaises(tandem.PlanError):
            self.train(device_memory="64KiB")


def _infinite(model, batch):
    """A loss without a finite gradient."""
    return sum(model.module(input_ids=batch[0], use_cache=False).logits.float().flatten()[:1]) * math.inf


class GoingOn(RunTest):
    """Each way to be interrupted, and the result of an uninterrupted run after it, to the bit; with dropout."""

    kind = "dropout"

    def check_same(self, **changed):
        self.train(**changed)
        self.assertEqual(self.result(), self.uninterrupted())

    def test_two_runs_are_equal(self):
        self.check_same()

    def test_under_another_policy_and_ceiling(self):
        self.check_same(policy="host", device_memory="2MiB")

    def test_a_signal_saves_and_ends(self):
        def stop(line):
            if line.startswith("step 5/"):
                os.kill(os.getpid(), signal.SIGTERM)
        with self.assertRaises(SystemExit) as caught:
            train(runs.run_of(self.folder), stop)
        self.assertEqual(caught.exception.code, 143)
        self.assertEqual(len(self.metrics()), 5)
        self.check_same()
        self.assertIn("resumed from the checkpoint of step 5 of 8", self.said)
        self.assertEqual(self.summary()["resumed_from_step"], 5)

    def test_signals_that_are_ignored_stay_so(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.addCleanup(signal.signal, signal.SIGHUP, before)
        train(runs.run_of(self.folder), lambda line: os.kill(os.getpid(), signal.SIGHUP) if line.startswith("step 5/") else None)
        self.assertEqual(self.result(), self.uninterrupted())
        self.assertEqual(signal.getsignal(signal.SIGHUP), signal.SIG_IGN)
        self.assertEqual(signal.getsignal(signal.SIGTERM), signal.SIG_DFL)

    def interrupted(self, at, error=KeyboardInterrupt):
        """A run that ends in the middle of the function `at` of RunFolder, the third time it is called."""
        from tandem.finetuning import run_folder
        original, calls = getattr(run_folder.RunFolder, at), 0

        def failing(*arguments):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise error
            return original(*arguments)

        with unittest.mock.patch.object(run_folder.RunFolder, at, failing), self.assertRaises(error):
            self.train()

    def test_an_exception_in_the_middle(self):
        self.interrupted("add_metrics")
        self.check_same()
        shutil.rmtree(self.folder / "run")
        self.interrupted("save")
        self.check_same()

    def test_a_checkpoint_that_is_damaged_is_passed_over(self):
        self.train()
        newest = self.folder / "run" / "checkpoints" / "step-00000008"
        state = next(newest.rglob("state.safetensors"))
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 1
        state.write_bytes(content)
        shutil.rmtree(self.folder / "run" / "model")
        self.check_same()
        self.assertTrue(any("checkpoint of step 8 passed over" in line for line in self.said))

    def test_a_full_disk(self):
        fsync, calls = os.fsync, 0

        def full(descriptor):
            nonlocal calls
            calls += 1
            if calls == 6:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        with unittest.mock.patch("os.fsync", full):
            self.refuses(7, "No space left on device", "goes on from the last checkpoint")
        self.check_same()

    def test_other_settings_are_refused_by_name(self):
        self.train(steps=8)
        self.refuses(2, "another lr (0.005, now 0.004)", lr=4e-3)
        self.refuses(2, "another seed", seed=43)
        runs.prepare(self.folder, self.folder / "model", runs.chats(41), validation=0.15)
        self.refuses(4, "another data; give it as before")

    def test_killed_at_random_moments(self):
        kills = int(os.environ.get("TANDEM_KILLS", 3))
        train(runs.run_to_kill(self.folder, "whole", kills), self.said.append)
        done = subprocess.run([sys.executable, runs.__file__, str(sandbox.PACKAGE), str(self.folder), str(kills)], capture_output=True, text=True,
                              timeout=500)
        self.assertEqual(done.returncode, 0, done.stderr)
        told = json.loads(done.stdout.splitlines()[-1])
        self.assertEqual(told["status"], 0, done.stderr)
        self.assertGreaterEqual(len(told["reached"]), kills / 2)
        self.assertTrue(any(told["reached"]), told)  # one was killed when it had come somewhere
        self.assertEqual(self.result("killed"), self.result("whole"))


class Chat(RunTest):
    def ask(self, *lines, folder=None, system=None, max_tokens=40, temperature=0.0):
        out = io.StringIO()
        chat(folder or self.folder / "run", system=system, max_tokens=max_tokens, temperature=temperature,
             stream_in=io.StringIO("".join(line + "\n" for line in lines)), stream_out=out)
        return out.getvalue()

    def trained(self, template=None):
        """A run that has learnt its questions by heart."""
        shutil.rmtree(self.folder / "model")
        runs.make_model(self.folder / "model", template=template, spread=0.1)
        for file in self.folder.glob("chat-validation.*"):
            file.unlink()
        records = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
                   for q, a in (("What is red?", "A colour."), ("Who are you?", "tandem."))]
        runs.prepare(self.folder, self.folder / "model", records, row_length=97)
        summary = self.train(steps=60, micro_batch=1, accumulation=1, lr=2e-2, warmup=0.05, evaluate_every=0, checkpoint_every=0)
        self.assertLess(summary["final_loss"], 0.05)

    def test_it_answers_what_it_has_learnt_in_plain_lines(self):
        self.trained()
        self.assertEqual(self.ask("What is red?", "/reset", "Who are you?"), "A colour.\ntandem.\n")
        self.assertEqual(self.ask("What is red?", folder=self.folder / "run" / "model"), "A colour.\n")
        self.assertEqual(self.ask("What is red?", "/exit", "What is red?"), "A colour.\n")
        self.assertEqual(self.ask("What is red?", max_tokens=3), "A c\n")
        out = io.StringIO()
        with self.assertRaisesRegex(Refusal, "1 of the lines had no room"):
            chat(self.folder / "run", system=None, max_tokens=9, temperature=0.0, stream_out=out,
                 stream_in=io.StringIO("What is red?" * 30 + "\nWhat is red?\n"))
        self.assertIn("(left out: the conversation has", out.getvalue())
        self.assertTrue(out.getvalue().endswith("\nA colour.\n"), out.getvalue())

    def test_it_answers_by_its_template(self):
        self.trained("{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
                     "{% if add_generation_prompt %}[assistant]{% endif %}")
        self.assertEqual(self.ask("Who are you?", "/reset", "What is red?"), "tandem.\nA colour.\n")

    def test_a_conversation_is_kept(self):
        self.trained()
        given = []  # texts that were made tokens

        class Watched(transformers.AutoTokenizer):
            @staticmethod
            def from_pretrained(folder):
                tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
                kind, call = type(tokenizer), type(tokenizer).__call__
                tokenizer.__class__ = type("Seen", (kind,), {"__call__": lambda self, text, **how: given.append(text) or call(self, text, **how)})
                return tokenizer

        with unittest.mock.patch("transformers.AutoTokenizer", Watched):
            self.ask("What is red?", "", "Who are you?", system="Be short.")
        self.assertEqual(given[0], "<|system|>\nBe short.\n<|user|>\nWhat is red?\n<|assistant|>\n")
        self.assertTrue(given[-1].startswith(given[0]), given)
        self.assertTrue(given[-1].endswith("\n<|user|>\nWho are you?\n<|assistant|>\n"), given)

    def test_draws(self):
        self.trained()
        torch.manual_seed(1)
        self.assertGreater(len({self.ask("What is red?", temperature=30.0, max_tokens=8) for _ in range(3)}), 1)

    def test_folders_that_will_not_do(self):
        for folder in (self.folder / "none", self.folder.parent):
            with self.assertRaises(Refusal) as caught:
                self.ask("Hello", folder=folder)
            self.assertEqual(caught.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
