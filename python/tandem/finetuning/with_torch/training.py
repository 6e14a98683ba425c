"""The loop of a training by PyTorch: steps, evaluations, the end, and going on from a checkpoint. Imports torch."""
from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ... import _core
from ...errors import InputError
from ..durations import duration
from ..learning_rate import rate
from ..refusal import Refusal
from ..run_folder import RunFolder
from ..stop_signals import StopSignals
from ..token_rows import Order, Row, TokenRows, groups_of
from .figures import StepFigures, summary_of
from .model import Batch, TorchModel, batches_of_documents, batches_of_rows
from .torch_run import TorchRun

#: Skipped steps in a row that end a run.
_SKIP_LIMIT = 10
_SEED_STEP = 1_000_003


@dataclasses.dataclass
class Progress:
    """How far a run is: all that a checkpoint keeps beside the engine's state. Place in the data and random numbers follow from the step."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    eval_loss: float | None = None
    evaluated_step: int | None = None
    best_loss: float | None = None
    best_step: int | None = None
    worse: int = 0  #: evaluations in a row without a lower loss
    ended: str | None = None  #: why no step follows: "steps" or "patience"

    def note_loss(self, loss: float) -> None:
        """Takes the loss of a step down."""
        if math.isfinite(loss):
            self.final_loss = loss
            self.first_loss = loss if self.first_loss is None else self.first_loss

    def note_evaluation(self, loss: float, patience: int) -> bool:
        """Takes an evaluation down; returns whether it is the best so far. A loss that is not finite is none."""
        self.eval_loss, self.evaluated_step = loss, self.step
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.worse = loss, self.step, 0
            return True
        self.worse += 1
        if patience and self.worse >= patience:
            self.ended = "patience"
        return False


class Training:
    """A run of TorchRun, for `with`."""

    def __init__(self, run: TorchRun, progress: Callable[[str], None]) -> None:
        self._run, self._say = run, progress
        self._data = TokenRows(run.data)
        self._validation = None if run.validation is None else TokenRows(run.validation)
        self._order = Order(len(self._data), run.micro_batch * run.accumulation, run.settings.seed)
        self._warmup = round(run.settings.warmup * run.steps)
        rate(run.settings.schedule, run.lr, 1, run.steps, self._warmup)
        self._identity = self._identify()
        self._folder = RunFolder(run.out)
        self._model: TorchModel | None = None
        self._apart = True  # whether a row may hold several documents
        self._resumed: int | None = None
        self._seconds: list[tuple[float, int]] = []  # seconds of this call's steps, with their targets
        self._saved: int | None = None
        self._stop = StopSignals()
        self.state = Progress()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.restore()
        self._folder.close()
        if self._model is not None:
            with contextlib.suppress(Exception):
                self._model.close()

    # The whole.

    def run(self) -> None:
        """Trains to the end, or to a signal."""
        with _deterministic():
            self._open_model()
            self._folder.require_room(self.model.parameters)
            self._resume()
            self._foretell()
            self._stop.watch()
            while self.state.ended is None and self._stop.received is None:
                self._step()
            self._finish() if self.state.ended else self._interrupted()

    def _identify(self) -> dict[str, Any]:
        """All that decides what is learnt."""
        run, settings = self._run, self._run.settings
        return {"data": self._data.digest(), "validation": self._validation.digest() if self._validation else None, "steps": run.steps,
                "micro-batch": run.micro_batch, "accumulation": run.accumulation, "lr": run.lr, "warm-up": settings.warmup,
                "schedule": settings.schedule, "weight decay": settings.weight_decay, "betas": list(settings.betas), "clip": settings.clip,
                "seed": settings.seed, "state": settings.state, "patience": settings.patience, "evaluate every": run.evaluate_every}

    # The model.

    def _open_model(self) -> None:
        """Makes the model, with documents apart by positions where it takes them so, else one document at a time."""
        self._model = self._made(1)
        if self._model.sees_what_follows():
            raise Refusal(f"MODEL {self._run.model}: each of its tokens sees those behind it, so that it fills gaps and continues no text; name another",
                          2)
        packed = self._data.packed or self._validation is not None and self._validation.packed
        if not packed or self._model.takes_positions():
            return
        self._apart = False
        self._say("documents of a row go through the model one beside another: it does not keep them apart by their positions")
        passes = self._run.micro_batch * self._most_groups()
        if passes > 1:
            self._model.close()
            self._model = self._made(passes)

    def _most_groups(self) -> int:
        """Groups of a row's documents that go through the model one after another, at most."""
        return max(1, *(len(groups_of(list(self._data.row(i).documents()), self._tokens_at_once())) for i in range(len(self._data))))

    def _made(self, passes: int) -> TorchModel:
        run = self._run
        model = TorchModel(run.model, run.settings, passes=run.accumulation * passes, tokens_at_once=self._tokens_at_once())
        if self._data.vocabulary > (known := int(model.module.get_input_embeddings().weight.shape[0])):
            model.close()
            raise Refusal(f"DATA {run.data}: its tokenizer has {self._data.vocabulary} tokens, and the model {known}; prepare it with the "
                          "model's own", 4)
        return model

    def _tokens_at_once(self) -> int:
        return self._run.micro_batch * (self._data.row_length - 1)

    @property
    def model(self) -> TorchModel:
        """The model, which is there while the run is."""
        assert self._model is not None
        return self._model

    # Going on.

    def _resume(self) -> None:
        """Takes the newest checkpoint that is whole."""
        for checkpoint in self._folder.checkpoints():
            step = checkpoint.state["step"]
            self._require_same(checkpoint.state.get("identity"))
            try:
                self.model.optimizer.load(checkpoint.engine)
            except InputError as error:
                self._say(f"checkpoint of step {step} passed over: {error}")
                continue
            known = {field.name for field in dataclasses.fields(Progress)}
            self.state = Progress(**{key: value for key, value in checkpoint.state.items() if key in known})
            self._resumed = self._saved = step
            self._say(f"resumed from the checkpoint of step {step} of {self._run.steps}")
            break
        self._folder.open_metrics(self.state.step)

    def _require_same(self, identity: Any) -> None:
        """Refuses to go on with a run that was begun otherwise."""
        for name, value in self._identity.items():
            before = identity.get(name) if isinstance(identity, dict) else None
            if before != value:
                is_data = name in ("data", "validation")
                other = "" if is_data else f" ({before}, now {value})"
                raise Refusal(f"--out {self._run.out}: it holds a run of another {name}{other}; give it as before, or name another --out",
                              4 if is_data else 2)

    def _save(self) -> None:
        state = {**dataclasses.asdict(self.state), "identity": self._identity}
        self._folder.save(state, self.model.optimizer.save, self.state.best_step)
        self._saved = self.state.step

    # Steps.

    @torch.no_grad()
    def _foretell(self) -> None:
        """Says about how long the steps that are left take, before the first: backward computes units again, so that with it a step is
        four times forward."""
        left = self._run.steps - self.state.step
        batches, _ = self._batches_of(self.state.step + 1) if left and self.state.ended is None else ([], 0)
        if not batches:
            return
        self.model.module.eval()
        for _ in range(2):  # the first brings weights and memory
            begun = time.monotonic()
            float(self.model.loss_sum(batches[0]))
        seconds = 4.0 * (time.monotonic() - begun) * len(batches) * left
        self._say(f"this takes about {duration(seconds)}, by a first pass through the model, without evaluation; less where it ends early")

    def _step(self) -> None:
        state, run = self.state, self._run
        figures = StepFigures(self.model)
        lr = rate(run.settings.schedule, run.lr, state.step + 1, run.steps, self._warmup)
        batches, targets = self._batches_of(state.step + 1)
        torch.manual_seed((run.settings.seed * _SEED_STEP + state.step + 1) % 2**63)
        loss, norm, skipped = self._train_on(batches, targets, lr) if targets else (math.nan, math.nan, True)
        state.step += 1
        state.tokens += targets
        state.skipped += skipped
        state.note_loss(loss)
        if state.step == run.steps:
            self.model.optimizer.engine.wait()
            state.ended = "steps"
        line = {"step": state.step, "loss": loss, "grad_norm": norm, "lr": lr, **figures.metrics(targets), "skipped": skipped}
        self._seconds.append((line["step_seconds"], targets))
        better = self._evaluate_if_due(line)
        self._folder.add_metrics(line)
        self._tell(line)
        self._watch_skipped(skipped, targets)
        if better or (run.checkpoint_every > 0 and state.step % run.checkpoint_every == 0):
            self._save()

    def _batches_of(self, step: int) -> tuple[list[Batch], int]:
        """Batches of a step, one backward each, and how many targets they have together."""
        rows = [self._data.row(index) for index in self._order.rows_of(step)]
        size = self._run.micro_batch
        batches = [batch for first in range(0, len(rows), size) for batch in self._batches(rows[first:first + size], self._data)]
        return batches, sum(row.target_count for row in rows)

    def _batches(self, rows: list[Row], data: TokenRows) -> list[Batch]:
        rows = [row for row in rows if row.target_count]
        if not rows:
            return []
        if data.packed and not self._apart:
            return batches_of_documents(rows, self._tokens_at_once())
        return batches_of_rows(rows, data.packed)

    def _train_on(self, batches: list[Batch], targets: int, lr: float) -> tuple[float, float, bool]:
        """Loss and norm of a step, and whether it was skipped."""
        optimizer = self.model.optimizer
        self.model.module.train()
        total = 0.0
        for batch in batches:
            loss = self.model.loss_sum(batch) / targets
            torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = float(optimizer.clip_grad_norm_(self._run.settings.clip or math.inf))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return total, norm, not math.isfinite(norm)

    def _watch_skipped(self, skipped: bool, targets: int) -> None:
        state = self.state
        if targets == 0:
            self._say(f"step {state.step} skipped: its rows hold no target")
            return
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if state.skipped_in_a_row >= _SKIP_LIMIT:
            raise Refusal(f"step {state.step}: {_SKIP_LIMIT} steps in a row without a finite gradient norm; use a smaller --lr, with another "
                          "--out", 6)

    # Evaluation.

    def _evaluate_if_due(self, line: dict[str, Any]) -> bool:
        """Evaluates where that is due; returns whether the loss is the lowest so far."""
        run, state = self._run, self.state
        due = run.evaluate_every > 0 and state.step % run.evaluate_every == 0
        if self._validation is None or not (due or state.ended):
            return False
        line["eval_loss"] = loss = self._evaluate(self._validation)
        before = state.best_loss
        better = state.note_evaluation(loss, run.settings.patience)
        if better:
            self._say(f"step {state.step}: eval loss {loss:.4f} is the lowest so far{f' (before: {before:.4f})' if before is not None else ''}")
        elif state.ended == "patience":
            self._say(f"step {state.step}: {state.worse} evaluations without a lower loss than {state.best_loss}, of step {state.best_step}: no "
                      "step follows")
        return better

    @torch.no_grad()
    def _evaluate(self, data: TokenRows) -> float:
        """Mean loss over all targets."""
        self.model.module.eval()
        total, targets = 0.0, 0
        for first in range(0, len(data), self._run.micro_batch):
            rows = [data.row(index) for index in range(first, min(len(data), first + self._run.micro_batch))]
            targets += sum(row.target_count for row in rows)
            total += sum(float(self.model.loss_sum(batch)) for batch in self._batches(rows, data))
        return total / targets if targets else math.nan

    # The end.

    def _interrupted(self) -> None:
        if self._saved != self.state.step and self.state.step > 0:
            self._save()
        self._say(f"stopped by a signal after step {self.state.step} of {self._run.steps}; the same command goes on")
        raise SystemExit(128 + (self._stop.received or 0))

    def _finish(self) -> None:
        """Keeps the last state, writes the best model, and the summary last of all."""
        if self._saved != self.state.step:
            self._save()
        digest = self.model.optimizer.digest()
        has_ended = self._folder.summary().get("state_digest") == digest and not self._seconds  # in an earlier call, whose figures stay
        if has_ended and self._folder.model.is_dir():
            self._say(f"all is done: {self._folder.model}")
            return
        summary = None if has_ended else self._summary(digest)
        best = self.state.best_step
        if best is not None and best != self.state.step:
            checkpoint = self._folder.checkpoint(best)
            if checkpoint is None:
                raise Refusal(f"--out {self._run.out}: the checkpoint of the best step, {best}, is missing; train again with another --out", 4)
            self.model.optimizer.load(checkpoint.engine)
        self._folder.write_model(self._write_model)
        if summary is not None:
            self._folder.write_summary(summary)
        self._say(f"state_digest {digest}")

    def _write_model(self, folder: Path) -> None:
        self.model.save(folder)
        if self._run.complete is not None:
            self._run.complete(folder)

    def _summary(self, digest: str) -> dict[str, Any]:
        state, run = self.state, self._run
        seconds, tokens = [one for one, _ in self._seconds], sum(targets for _, targets in self._seconds)
        return {**summary_of(self.model), "micro_batches": {"count": run.accumulation, "at_once": 1, "order": None}, "steps": state.step,
                "tokens": state.tokens, "first_loss": state.first_loss, "final_loss": state.final_loss, "eval_loss": state.eval_loss,
                "best_loss": state.best_loss, "best_step": state.best_step, "ended_by": state.ended,
                "tokens_per_second": tokens / sum(seconds) if seconds else None,
                "step_seconds": statistics.median(seconds) if seconds else None, "skipped_steps": state.skipped,
                "resumed_from_step": self._resumed, "state_digest": digest, "version": _core.version, "command": " ".join(sys.argv)}

    def _tell(self, line: dict[str, Any]) -> None:
        left = statistics.median(seconds for seconds, _ in self._seconds[-50:]) * (self._run.steps - self.state.step)
        hours, rest = divmod(round(left), 3600)
        rate_text = "" if not line["tokens_per_second"] else f"  {line['tokens_per_second']:.3g} tok/s"
        evaluated = f"  eval loss {line['eval_loss']:.4f}" if "eval_loss" in line else ""
        evaluated += "  skipped: changes nothing" if line["skipped"] else ""
        self._say(f"step {self.state.step:>{len(str(self._run.steps))}}/{self._run.steps}  loss {line['loss']:.4f}  norm {line['grad_norm']:.3g}  "
                  f"lr {line['lr']:.2e}{rate_text}  {line['step_seconds']:.3f} s{evaluated}  ETA {hours}:{rest // 60:02}:{rest % 60:02}")


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Operations of one result for one input, as far as PyTorch has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
