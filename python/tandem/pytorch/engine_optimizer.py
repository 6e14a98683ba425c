"""Base of optimizers whose state an engine holds: hyperparameters of groups, the end of a step, state in and out."""
from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import _core
from .._core import GroupValues, OffloadEngine, Plan
from ..errors import MisuseError

_log = logging.getLogger("tandem")

#: Added to a norm that gradients are clipped by, as in torch.nn.utils.clip_grad_norm_.
_NORM_EPS = 1e-6
#: File of a checkpoint with the hyperparameters of the groups.
_GROUPS_FILE = "param-groups.json"
#: Keys of a group that say which parameters it has.
_NOT_SAVED = ("params", "param_names")


class EngineParameter(Protocol):
    """A parameter that an engine trains: `name` for users, `full_name` in the engine's layout."""

    tensor: torch.nn.Parameter
    name: str
    full_name: str


class EngineOptimizer(torch.optim.Optimizer):
    """AdamW on the state of an engine. Subclasses say which parameters there are, and how gradients come and weights go."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._scale = 1.0
        self._norm: float | None = None  # norm of gradients that the engine has, between clip_grad_norm_ and step
        #: Steps that changed nothing, as their gradients were not finite.
        self.skipped_steps = 0
        super().__init__(params, defaults)

    # Methods that subclasses define.

    def _open_engine(self) -> OffloadEngine:
        """The engine. Raises MisuseError where the optimizer is closed."""
        raise NotImplementedError

    def _trained(self) -> Sequence[EngineParameter]:
        """The parameters whose state the engine holds."""
        raise NotImplementedError

    def _give_gradients(self) -> None:
        """Gives the engine what gradients it does not have yet, in an open step. Raises MisuseError where there are none."""
        raise NotImplementedError

    def _values(self) -> list[GroupValues]:
        """Values of each group of the engine's layout."""
        raise NotImplementedError

    def _after_update(self) -> None:
        """Called when the updates of a step have begun."""

    def _before_read(self) -> None:
        """Called before state is read."""

    def _after_write(self) -> None:
        """Called when state has been written."""

    # Groups.

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for name, value, good in (("lr", group["lr"], float(group["lr"]) >= 0), ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1),
                                  ("eps", group["eps"], group["eps"] > 0), ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0)):
            if not good:
                raise ValueError(f"AdamW: {name} is {value}, out of its range")

    @staticmethod
    def _values_of(group: dict[str, Any]) -> GroupValues:
        beta1, beta2 = group["betas"]
        adamw = _core.AdamW(beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"])
        return GroupValues(lr=float(group["lr"]), adamw=adamw)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient; returns what `closure`, which makes the gradients, returns.

        A step whose gradients are not all finite changes nothing. Raises MisuseError where no parameter has a gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norm = self._end_gradients()
        scale = self._scale
        self._norm, self._scale = None, 1.0
        engine = self._open_engine()
        if not math.isfinite(norm):
            engine.skip()
            self.skipped_steps += 1
            _log.warning("a step was skipped: its gradients are not finite (norm %s), %d so far", norm, self.skipped_steps)
            return loss
        try:
            engine.update(scale=scale, groups=self._values())
        except BaseException:
            engine.abort_step()
            raise
        self._after_update()
        return loss

    def _end_gradients(self) -> float:
        """Gives all gradients to the engine, unless that has been done, and returns their norm."""
        if self._norm is None:
            self._give_gradients()
            engine = self._open_engine()
            try:
                self._norm = engine.end_gradients()
            except BaseException:
                engine.abort_step()
                raise
        return self._norm

    def clip_by_engine(self, max_norm: float) -> torch.Tensor:
        """Clips the global norm of all gradients by the engine's norm, and returns that; the step's gradients are complete."""
        norm = self._end_gradients()
        self._scale = min(1.0, max_norm / (norm + _NORM_EPS)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm)

    def _drop_gradients(self) -> None:
        """Drops a step whose gradients are complete."""
        if self._norm is not None:
            self._open_engine().abort_step()
            self._norm, self._scale = None, 1.0

    # State.

    def state_dict(self) -> dict[str, Any]:
        """State as torch.optim.AdamW has it, with tensors on the CPU in fp32, and each parameter's master beside them.
        Empty before the first step. Blocks until updates are done; nothing of it passes through the device's memory."""
        packed = super().state_dict()
        engine = self._open_engine()
        if engine.step > 0:
            self._before_read()
        for index, known in self._indexed():
            steps = engine.step - engine.missed_updates(known.full_name)
            if steps > 0:
                arrays = {name: torch.from_numpy(engine.read(known.full_name, array)).view(known.tensor.shape)
                          for name, array in (("exp_avg", "m"), ("exp_avg_sq", "v"), ("master", "master"))}
                packed["state"][index] = {"step": torch.tensor(float(steps)), **arrays}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` of this class, or of torch.optim.AdamW, gave: groups, moments and counts of steps, and
        masters where there are any, with the weights that belong to them. Raises ValueError where groups do not match."""
        state = state_dict["state"]
        self._check_state(state)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group in self.param_groups:
            self._check_group(group)
        self._write_state(state)

    def _indexed(self) -> list[tuple[int, EngineParameter]]:
        """Trained parameters by their number in state_dict, which counts those of all groups."""
        by_id = {id(known.tensor): known for known in self._trained()}
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        return [(i, by_id[id(parameter)]) for i, parameter in enumerate(everything) if id(parameter) in by_id]

    def _check_state(self, state: dict[int, Any]) -> None:
        for index, known in self._indexed():
            entry = state.get(index)
            if entry is None:
                continue
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if name not in entry:
                    raise ValueError(f"load_state_dict: the state of parameter '{known.name}' has no '{name}'; it is not one of AdamW")
            if entry["exp_avg"].shape != known.tensor.shape:
                raise ValueError(f"load_state_dict: the state of parameter '{known.name}' is of shape {tuple(entry['exp_avg'].shape)}, "
                                 f"and the parameter of {tuple(known.tensor.shape)}")

    def _write_state(self, state: dict[int, Any]) -> None:
        engine = self._open_engine()
        self._before_read()
        engine.wait()
        counts: dict[str, int] = {}
        for index, known in self._indexed():
            entry = state.get(index, {})
            counts[known.full_name] = int(entry.get("step", 0))
            zeros = torch.zeros(known.tensor.shape)
            for name, array in (("exp_avg", "m"), ("exp_avg_sq", "v")):
                engine.write(known.full_name, _host(entry.get(name, zeros)), array)
            if "master" in entry:
                engine.write(known.full_name, _host(entry["master"]))
        engine.set_step(max(counts.values(), default=0))
        for name, steps in counts.items():
            engine.set_missed_updates(name, engine.step - steps)
        self._after_write()

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the engine's checkpoint directory/step-XXXXXXXX, weights included, with the hyperparameters of the groups beside
        it, and returns its path. Takes no memory of the state's size. Raises WriteError."""
        engine = self._open_engine()
        self._before_read()
        groups = [{key: value for key, value in group.items() if key not in _NOT_SAVED} for group in self.param_groups]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / _GROUPS_FILE
            file.write_text(json.dumps({"groups": groups, "skipped_steps": self.skipped_steps}, default=_number))
            return Path(engine.save(directory, [file]))

    def load(self, directory: str | os.PathLike[str]) -> Path:
        """Restores what `save` wrote, from a checkpoint or from the newest whole one in a folder: weights, state, and the
        hyperparameters of the groups. Returns its path. Raises InputError where it is damaged or of other parameters, and
        MisuseError where its groups are others."""
        engine = self._open_engine()
        self._before_read()
        path = Path(engine.load(directory))
        self._after_write()
        file = path / _GROUPS_FILE
        if file.exists():
            told = json.loads(file.read_text())
            if len(told["groups"]) != len(self.param_groups):
                raise MisuseError(f"load: {path} has {len(told['groups'])} groups of parameters, and the optimizer {len(self.param_groups)}: "
                                  "state is loaded, their learning rates are not")
            for group, saved in zip(self.param_groups, told["groups"], strict=True):
                group.update(saved, betas=tuple(saved["betas"]))
            self.skipped_steps = told["skipped_steps"]
        return path

    def digest(self) -> str:
        """Digest of masters, moments and counts, 32 hexadecimal digits: one for all plans. Blocks until updates are done."""
        self._before_read()
        return self._open_engine().state_digest()

    @property
    def plan(self) -> Plan:
        """Plan of the engine: the place of everything; shows as a table."""
        return self._open_engine().plan

    @property
    def engine(self) -> OffloadEngine:
        """The engine, with its counters. Do not open steps of it."""
        return self._open_engine()

    def __reduce__(self) -> Any:
        raise MisuseError("an optimizer whose state an engine holds is neither copied nor pickled: take its state_dict(), or save(folder)")


def _host(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to("cpu", torch.float32).contiguous()


def _number(value: Any) -> Any:
    """A value of a group for JSON: a learning rate may be a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else repr(value)
