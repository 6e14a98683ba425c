"""The stages of a fine-tuning, one after another; each that a call before has finished is passed over."""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from ..display import bytes_text
from ..errors import PlanError
from . import adapting, advice, base_record, defaults, native, plain_template, preparing
from .durations import duration
from .model_facts import architecture_of, files_of, parameters_in
from .processes import Ended
from .refusal import Refusal
from .run_state import RunFolder, fingerprints
from .settings import Settings, as_values, to_toml


def say(text: str) -> None:
    """A line for people; a reader that has gone does not end the work."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


class Choices(NamedTuple):
    """Choices by model and first records, before anything is written."""

    engine: str  # "native" or "torch"
    why: str
    parameters: int
    row_length: int
    template: str | None  # chat template, where the model has none and the data are chats
    turn_end: int | None  # id of the token that ends an answer of a chat
    chats: bool
    stream: bool  # whether texts are joined and cut in windows, not packed as records
    validation: float
    pairs: bool = False  # whether records are preferences, of two rows each


class FineTuning:
    """One call of `tandem finetune`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = RunFolder(settings.out)

    def run(self) -> None:
        """Runs what is left of the stages. Blocks. Raises Refusal, and Ended where a process has said why."""
        settings, folder = self.settings, self.folder
        folder.check(settings)
        folder.require_outside(settings.data)
        adapting.check(settings)
        model = _module("model_source").find_model(settings.model, revision=settings.revision, offline=settings.offline, progress=say,
                                                   frozen=adapting.leaves_weights(settings))
        if settings.adapter and not folder.begun:
            base_record.require_same(settings.adapter, model, f"MODEL {settings.model}")
        with folder.locked() as lock:
            data = _module("data_source").find_data(settings.data, split=settings.split, folder=folder.data, offline=settings.offline, progress=say)
            inputs = fingerprints([*files_of(model), *data, *(adapting.files_of(settings.adapter) if settings.adapter else ())])
            folder.compare(inputs)
            if folder.begun:
                missing = self.missing()
                choices = Choices(**folder.require("choices", Choices._fields, tuple(Choices._field_defaults)))
            else:
                missing = list(adapting.results(settings))
                choices = self.begin(model, data, inputs)
            schedule = native.Schedule(**(folder.stage("schedule") or self.decide(model, choices, folder.require("prepared"))))
            if missing or not folder.report.is_file():
                self.finish(missing, model, choices, schedule, lock)
        self.end(choices)

    def missing(self) -> list[str]:
        """Results that a run which was begun does not have, or has no more; says so."""
        folder = self.folder
        missing = [name for name in adapting.results(self.settings) if not folder.has_result(name)]
        say(f"going on with the run in {folder.out}{'' if missing else ', all of which is done already'}")
        for name in missing:
            if folder.has(name):
                say(f"{folder.out / name} is not there any more: it is written again, from the run's state")
        return missing

    def begin(self, model: Path, data: list[Path], inputs: dict[str, list[Any]]) -> Choices:
        """Decides how to train, and prepares the data: from here on the folder is the run's own."""
        folder = self.folder
        choices = self.choose(model, data)
        choices = self.prepare(data, self.tokenizer(model, choices), choices)
        folder.finish("choices", choices._asdict())
        folder.finish("inputs", inputs)
        folder.begin(self.settings)
        return choices

    def finish(self, missing: list[str], model: Path, choices: Choices, schedule: native.Schedule, lock: int) -> None:
        """Trains, unless that is done, and writes the results that are missing, and the report."""
        folder = self.folder
        if adapting.has_adapters(self.settings):
            base_record.note(folder, model, self.settings.model)
        if missing and (choices.engine == "torch" or not native.has_trained(folder)):
            self.train_or_forget(model, choices, schedule, lock)
        for name in missing:
            self.finish_result(name, model, choices)
            folder.finish(name, {"folder": name})
        native.report(folder)

    def choose(self, model: Path, data: list[Path]) -> Choices:
        """Decides how to train. Refuses what cannot be trained, or does not fit. Changes nothing."""
        settings = self.settings
        engine, why = self.engine(model)
        if engine == "torch":
            native.check_machine(settings)
            _module("with_torch.model").read_description(model, f"MODEL {settings.model}")
        pipeline = preparing.pipeline_of(model, settings.format)
        sample = preparing.take_sample(pipeline, data, self.folder.tokens)
        template = None
        if sample.chats and not sample.has_template:
            template = plain_template.template_of(pipeline)
            pipeline.sources = {"default": template}
            sample = preparing.take_sample(pipeline, data, self.folder.tokens)
            say(f"{settings.model} has no chat template: each message follows a line <|role|>, and {pipeline.end.text} ends an answer")
        stream = sample.texts and sample.longest > min(defaults.USUAL_ROW, sample.positions or defaults.USUAL_ROW)
        if stream and engine == "torch":
            raise Refusal(f"DATA {' '.join(settings.data)}: texts of up to {sample.longest} tokens are cut in windows for tandem's own models alone, "
                          f"and {why}; cut them into records of {{'text': ...}} that fit in its positions", 2)
        alone = sample.complete and sample.records == 1
        if alone and settings.validation:
            say("one record: nothing is held out, and the last state is kept")
        self.check_objective(sample)
        row_length = settings.row_length or _row_length(sample, stream)
        if sample.positions is not None and row_length > sample.positions + 1:
            raise Refusal(f"--row-length {row_length}: the model has {sample.positions} positions, for rows of {sample.positions + 1} tokens at most; "
                          f"give --row-length {sample.positions + 1}, which cuts longer records", 2)
        if engine == "native":
            advice.require_fit(settings, model, row_length)
        return Choices(engine, why, parameters_in(model), row_length, template, sample.turn_end, sample.chats, stream,
                       0.0 if alone else settings.validation, sample.pairs)

    def check_objective(self, sample: preparing.Sample) -> None:
        """Refuses preferences without the flag that learns them, that flag without preferences, and pairs that do not fit in the model."""
        what = f"DATA {' '.join(self.settings.data)}"
        if sample.pairs and self.settings.objective != "dpo":
            raise Refusal(f"{what}: its records are preferences, of a chosen and a rejected answer; give --objective dpo, which learns which of "
                          "both is preferred", 4)
        if not sample.pairs and self.settings.objective == "dpo":
            raise Refusal(f"--objective dpo: {what} has no preferences, which are records with chosen and rejected; leave it out to learn what is "
                          "there, or name other data", 4)
        if sample.pairs and sample.positions is not None and sample.longest > sample.positions + 1:
            raise Refusal(f"{what}: an answer with its prompt has {sample.longest} tokens, and the model {sample.positions} positions; leave such "
                          "pairs out, as an answer cannot be cut", 2)

    def engine(self, model: Path) -> tuple[str, str]:
        """The engine, and the reason for it."""
        asked, name = self.settings.engine, architecture_of(model)
        flag = adapting.what_native_alone_does(self.settings)
        if asked != "torch":
            refused = native.refusal_of_model(model)
            if refused is None:
                return "native", f"{name} is one of tandem's own models"
            if asked == "native" or flag:
                raise Refusal(f"{flag}: it is for tandem's own models: {refused}, or leave it out" if flag else refused, 2)
        if flag:
            raise Refusal(f"{flag}: it is for tandem's own models, and --engine torch trains a module of PyTorch; leave one of them out", 2)
        missing = [package for package in ("torch", "transformers") if importlib.util.find_spec(package) is None]
        if missing:
            raise Refusal(f"{self.settings.model}: {name} is streamed as a PyTorch module, and {' and '.join(missing)} is missing; "
                          f"pip install {' '.join(missing)}", 2)
        return "torch", "--engine torch" if asked == "torch" else f"{name} is none of tandem's own models"

    def tokenizer(self, model: Path, choices: Choices) -> Path:
        """The folder of the tokenizer that data is prepared with."""
        if choices.template is None:
            return model
        folder = self.folder.out / "tokenizer"
        plain_template.write_folder(model, folder, choices.template)
        return folder

    def prepare(self, data: list[Path], tokenizer: Path, choices: Choices) -> Choices:
        """Writes the token files, and notes what is known of them. Returns the choices with the row length of pairs, which all of them
        decide."""
        settings, tokens = self.settings, self.folder.tokens
        layout = "stream" if choices.stream else "rows" if choices.pairs else "packed"
        row_length = None if choices.stream else settings.row_length if choices.pairs else choices.row_length
        preparing.prepare(data, tokenizer, tokens, settings.format, layout, row_length, choices.validation)
        facts = json.loads(tokens.with_suffix(".json").read_bytes())
        if choices.stream:  # each window counts as a record
            facts["rows"] = facts["records"] = max(1, (facts["tokens"] - 1) // (choices.row_length - 1))
        if choices.pairs:  # each answer is a record and a row
            facts["rows"] = facts["records"]
            choices = choices._replace(row_length=facts["row_length"])
        self.folder.finish("prepared", {name: facts[name] for name in ("rows", "records", "tokens", "targets")})
        return choices

    def decide(self, model: Path, choices: Choices, prepared: dict[str, Any]) -> dict[str, Any]:
        """Decides the numbers of the run, which stay as they are when it goes on."""
        settings, rows = self.settings, prepared["rows"]
        least = adapting.least_rows(settings)
        records = prepared["records"] // least  # pairs, where there are some
        tokens = settings.tokens_per_batch or defaults.records_per_step(records) * prepared["tokens"] / records
        wanted = max(least, round(tokens / (choices.row_length - 1)))
        micro_batch = settings.micro_batch or self.micro_batch(model, choices, wanted)
        accumulation = max(1, round(wanted / micro_batch))
        epoch = math.ceil(rows / (micro_batch * accumulation))
        epochs = settings.epochs or (defaults.PREFERENCE_EPOCHS if choices.pairs else defaults.epochs(records))
        steps = settings.steps or max(1, math.ceil(epochs * rows / (micro_batch * accumulation)))
        every = settings.evaluate_every or min(steps, defaults.evaluate_every(epoch))
        schedule = native.Schedule(steps, micro_batch, accumulation, settings.lr or self.learning_rate(choices),
                                   round(settings.warmup * steps), every, settings.checkpoint_every or every)
        return self.folder.finish("schedule", dataclasses.asdict(schedule))

    def learning_rate(self, choices: Choices) -> float:
        """The peak rate where none is given."""
        adapters = adapting.has_adapters(self.settings)
        if choices.pairs:
            return defaults.PREFERENCE_ADAPTER_RATE if adapters else defaults.PREFERENCE_RATE
        return (defaults.adapter_rate if adapters else defaults.learning_rate)(choices.parameters)

    def micro_batch(self, model: Path, choices: Choices, wanted: int) -> int:
        """Rows of a step that are computed at once, of those `wanted`: as many as fit."""
        least = adapting.least_rows(self.settings)
        rows = max(least, defaults.micro_batch(wanted, choices.row_length - 1))
        while choices.engine == "native" and rows > least and not native.fits(self.settings, model, choices.row_length, rows, round(wanted / rows)):
            rows //= 2
        return rows

    def train_or_forget(self, model: Path, choices: Choices, schedule: native.Schedule, lock: int) -> None:
        """Trains; a run that does not fit, or whose input is found to be wrong, before it has saved a step is not begun, so that settings may
        change."""
        try:
            self.train(model, choices, schedule, lock)
        except PlanError as error:
            self.folder.forget()
            raise advice.MayFit(str(error).rstrip(), self.settings, choices.row_length) from None
        except (Refusal, Ended) as error:
            if error.code in (2, 3, 4):
                self.folder.forget()
            raise

    def train(self, model: Path, choices: Choices, schedule: native.Schedule, lock: int) -> None:
        """Tells what is going to be done and how long it takes, and trains."""
        if self.settings.checkpoint_every:  # may be another than that of the first call
            schedule = dataclasses.replace(schedule, checkpoint_every=self.settings.checkpoint_every)
        tokens = schedule.micro_batch * schedule.accumulation * (choices.row_length - 1)
        say(f"engine: {choices.engine}, as {choices.why}")
        say(f"{choices.parameters:,} parameters{adapting.described(self.settings)}; {schedule.steps} steps of up to {tokens:,} tokens, learning rate {schedule.lr:g} after "
            f"{schedule.warmup_steps} steps of warm-up, evaluated every {schedule.evaluate_every} steps")
        if choices.engine == "native":
            seconds = native.predicted_seconds(self.settings, model, choices.row_length, schedule, say)
            if seconds is not None:
                say(f"this takes about {duration(seconds * schedule.steps)}, less where it ends early")
            native.train(self.settings, self.folder, model, choices.row_length, schedule, lock)
        else:
            self.train_with_torch(model, choices, schedule)

    def train_with_torch(self, model: Path, choices: Choices, schedule: native.Schedule) -> None:
        """Trains by streaming the module of transformers, and writes its folder. Raises Ended where a signal has ended it."""
        with_torch, folder = _module("with_torch"), self.folder
        (folder.out / "config.toml").write_text(to_toml({**as_values(self.settings), **dataclasses.asdict(schedule)}), encoding="utf-8")
        validation = folder.tokens.with_name("train-validation.bin")
        run = with_torch.TorchRun(
            model=model, data=folder.tokens, validation=validation if validation.is_file() else None, out=folder.out, settings=self.settings,
            steps=schedule.steps, micro_batch=schedule.micro_batch, accumulation=schedule.accumulation, lr=schedule.lr,
            evaluate_every=schedule.evaluate_every, checkpoint_every=schedule.checkpoint_every,
            complete=lambda part: native.complete_model(part, self.template(choices), choices.turn_end))
        try:
            with_torch.train(run, say)
        except SystemExit as ended:
            raise Ended(int(ended.code or 0)) from None

    def template(self, choices: Choices) -> Path | None:
        """File of the chat template, where the model brings none and the data are chats."""
        return self.folder.out / "tokenizer" / plain_template.NAME if choices.template else None

    def finish_result(self, name: str, base: Path, choices: Choices) -> None:
        """Writes OUT/adapter or OUT/model, which PyTorch's way has done already: it appears with all that it is asked by."""
        folder, result = self.folder, self.folder.out / name
        if not result.is_dir():
            part = native.export(folder, result, *(["--merged"] if name == "model" and adapting.has_adapters(self.settings) else []))
            native.complete_model(part, self.template(choices), choices.turn_end, base)
            if name == "adapter" and not Path(self.settings.model).exists() and self.settings.revision is None:
                native.name_base(part, self.settings.model)
            part.rename(result)

    def end(self, choices: Choices) -> None:
        """Result of the run, and the next command."""
        folder = self.folder
        summary = json.loads((folder.out / "summary.json").read_bytes())
        held_out = f", {summary['eval_loss']:.4f} on what was held out" if summary.get("eval_loss") is not None else ""
        say(f"{summary['steps']} steps: loss {summary['first_loss']:.4f} at first, {summary['final_loss']:.4f} at last{held_out}")
        if summary.get("eval_reward_accuracy") is not None:
            say(f"of {summary['eval_reward_accuracy']:.0%} of the pairs that were held out, the chosen answer has the larger reward")
        if summary.get("lora"):
            size = sum(file.stat().st_size for file in folder.adapter.glob("*.safetensors"))
            say(f"adapter: {folder.adapter}, of rank {summary['lora']['rank']}, over {self.settings.model} in {summary['base_format']}, {bytes_text(size)}")
        if folder.model.is_dir():
            say(f"model:  {folder.model}")
        say(f"report: {folder.report}")
        say(f"next: {self.next_command(choices)}")

    def next_command(self, choices: Choices) -> str:
        """The command that asks the model."""
        model = str(self.folder.out / adapting.results(self.settings)[-1])
        if choices.chats:
            return f"tandem chat {shlex.quote(str(self.folder.out))}"
        if choices.engine == "native":
            return f"tandem sample --model {shlex.quote(model)} --prompt 'The '"
        return shlex.join(["python", "-c", f"from transformers import pipeline; print(pipeline('text-generation', {model!r})('The '))"])


def _row_length(sample: preparing.Sample, stream: bool) -> int:
    """Tokens of a row, and one more, where nobody has said how many."""
    if sample.pairs:
        return max(2, sample.longest)
    if stream:
        return defaults.window_length(sample.mean * sample.records if sample.complete else math.inf, sample.positions)
    return defaults.row_length(sample.longest, sample.mean, sample.positions, sample.complete)


def _module(name: str) -> Any:
    """A module of this package, imported when it is needed."""
    return importlib.import_module(f".{name}", __package__)
