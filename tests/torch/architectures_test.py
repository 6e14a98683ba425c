"""Models of Hugging Face's transformers, streamed: gradients, losses and buffers are those of plain PyTorch, bits do not depend on
policies, and what cannot be streamed is refused. TANDEM_ARCHITECTURES=all takes all of them, otherwise those of a normal run."""
import os
import pathlib
import random
import unittest
import warnings

import numpy
from sandbox import tandem, torch

import architectures
import transformers

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch-architectures.md"
ALL = os.environ.get("TANDEM_ARCHITECTURES") == "all"
STEPS, RATE, BETA = 10, 3e-3, 0.9
TOLERANCE = 1e-3
STATE_BYTES = 16  # bytes of a parameter: weight, gradient and moments
TINY = 1e-6  # norm of a gradient that is none but for roundings


def chosen(rows):
    return [row for row in rows if ALL or row.normal]


def seed(step):
    """All random numbers that a forward may draw: transformers draws of numpy and of Python, too."""
    torch.manual_seed(step)
    numpy.random.seed(step)
    random.seed(step)


def steps(module, optimizer, batch, count=STEPS, after_first=lambda: None, after_backward=lambda: None):
    """Losses of steps on one batch."""
    losses = []
    for step in range(count):
        seed(step)
        loss = module(**batch).loss
        loss.backward()
        if step == 0:
            after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 0:
            after_first()
    return losses


def streamed(row, **options):
    """A streamed model, its optimizer, and the ceiling that it has."""
    module = row.make()
    ceiling = int(STATE_BYTES * row.share * sum(p.numel() for p in module.parameters()))
    tandem.stream(module, **{"device_memory": ceiling, **options})
    return module, module.tandem.optimizer(lr=RATE)


def first_gradients(module, optimizer):
    """Gradients of the first step, by the first moments that began at zero; parameters without one are left out."""
    state = optimizer.state_dict()["state"]
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    return {name: state[numbers[id(p)]]["exp_avg"] / (1 - BETA) for name, p in module.named_parameters() if numbers[id(p)] in state}


def distance(value, reference):
    return ((value - reference).norm() / max(reference.norm().item(), TINY)).item()


class Streamed(unittest.TestCase):
    def test_there_are_thirty(self):
        self.assertGreaterEqual(len({row.model for row in architectures.ARCHITECTURES}), 30)
        self.assertEqual(sum(row.normal for row in architectures.ARCHITECTURES), 6)

    def test_training_is_that_of_pytorch(self):
        for row in chosen(architectures.ARCHITECTURES):
            with self.subTest(row.model):
                self.train_both(row)

    def train_both(self, row, **options):
        plain = row.make()
        batch = row.batch(plain)
        expected, found = {}, {}

        def keep():
            expected.update((name, p.grad.clone()) for name, p in plain.named_parameters() if p.grad is not None)

        references = steps(plain, torch.optim.AdamW(plain.parameters(), lr=RATE), batch, after_backward=keep)
        module, optimizer = streamed(row, **options)
        losses = steps(module, optimizer, batch, after_first=lambda: found.update(first_gradients(module, optimizer)))
        self.assertEqual(set(found), set(expected))
        for name, gradient in expected.items():
            self.assertLess(distance(found[name], gradient), TOLERANCE, name)
        self.assertGreater(abs(references[-1] - references[0]), 20 * TOLERANCE * abs(references[0]))
        for loss, reference in zip(losses, references, strict=True):
            self.assertLess(abs(loss - reference), TOLERANCE * abs(reference))
        for (name, buffer), (_, reference) in zip(module.named_buffers(), plain.named_buffers(), strict=True):
            self.assertLess(distance(buffer.float(), reference.float()), 10 * TOLERANCE, name)

    def test_one_digest_over_policies(self):
        for row in chosen(architectures.ARCHITECTURES):
            with self.subTest(row.model):
                digests = set()
                for policy in ("host", "stream", "interleave:2", "auto"):
                    module, optimizer = streamed(row, policy=policy, **({} if policy in ("host", "auto") else {"device_memory": "64MiB"}))
                    steps(module, optimizer, row.batch(module), 2)
                    digests.add(optimizer.digest())
                self.assertEqual(len(digests), 1)

    def test_refusals_are_named(self):
        for refusal in architectures.REFUSED:
            row = refusal.of
            with self.subTest(row.model), self.assertRaises(tandem.MisuseError) as told:
                module, optimizer = streamed(row, device_memory="64MiB")
                steps(module, optimizer, row.batch(module), 2)
            self.assertIn(refusal.error, str(told.exception))
            self.assertNotIn("\n", str(told.exception))

    def test_tables_that_are_read_are_left_out_of_the_units(self):
        for refusal in architectures.REFUSED:
            if refusal.tables:
                with self.subTest(refusal.of.model):
                    whole, _ = streamed(refusal.of, device_memory="64MiB")
                    units = [name for name in whole.tandem.units if name not in {"loose", *refusal.tables}]
                    self.train_both(refusal.of, device_memory="64MiB", units=units)

    def test_kept_keys_are_refused(self):
        module, _ = streamed(architectures.ARCHITECTURES[0])
        with self.assertRaisesRegex(tandem.MisuseError, "use_cache=False"):
            module(**architectures.ARCHITECTURES[0].batch(module), use_cache=True).loss.backward()

    def test_the_page_has_both_lists(self):
        text = PAGE.read_text()
        for line in architectures.page_lines():
            self.assertIn(line + "\n", text, "put this line into docs/pytorch-architectures.md")
        rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
        self.assertEqual(sorted(rows), sorted(architectures.page_lines()), "lines that belong to no architecture")


if __name__ == "__main__":
    unittest.main()
