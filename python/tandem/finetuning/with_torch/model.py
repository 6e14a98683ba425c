"""A model of transformers that is streamed, and its losses over rows. Imports torch."""
from __future__ import annotations

import importlib
import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...streaming import StreamOptimizer, empty_parameters, stream
from ..model_folder import SMALL_FILES
from ..refusal import Refusal
from ..token_rows import NO_TARGET, Document, Row, groups_of

_EPS = 1e-8
#: Documents of a row that the model is tried with, in tokens.
_TRIED = (5, 11)
#: Difference of logits that rounding may make, as a share of their standard deviation.
_ROUNDING = 0.2
#: Bytes of activations of a token: per hidden element of a block that is kept and of one that computes, and per entry of the vocabulary.
_KEPT_BYTES, _COMPUTED_BYTES, _LOGIT_BYTES = 2, 80, 14

#: Sequences that are computed at once: tokens, positions or None, and targets.
Batch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def transformers_package(what: str) -> Any:
    """The package transformers, without its bars. Raises Refusal where it is not installed."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise Refusal(f"{what}: PyTorch's way needs the package transformers; pip install transformers", 2) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def read_description(folder: Path, what: str) -> Any:
    """The configuration of a folder's model. Raises Refusal where transformers has no language model of its kind."""
    transformers = transformers_package(what)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise Refusal(f"{what}: transformers {transformers.__version__} does not know its kind ({str(error).splitlines()[0]}); "
                      "pip install --upgrade transformers, or name another", 2) from None
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise Refusal(f"{what}: a {config.model_type} is no language model that continues text; name another", 2)
    return config


class TorchModel:
    """A streamed model with its optimizer."""

    def __init__(self, folder: Path, settings: Any, *, passes: int, tokens_at_once: int) -> None:
        """Reads the weights in bf16. `passes`: backward passes of a step, at most; `tokens_at_once`: those of a forward, at most.
        Raises Refusal, and tandem's own errors where the model cannot be streamed or does not fit."""
        config = read_description(folder, f"MODEL {folder}")
        transformers = transformers_package(f"MODEL {folder}")
        self.folder = folder
        torch.manual_seed(settings.seed)
        with empty_parameters():
            self.module: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.parameters = sum(p.numel() for p in self.module.parameters())
        on_gpu = settings.device not in ("host", "cpu") and torch.cuda.is_available()
        stream(self.module, source=folder, device=settings.device, device_memory=settings.device_memory, host_memory=settings.host_memory,
               policy=settings.policy, state=settings.state, state_folder=settings.state_folder, accumulation=passes, seed=settings.seed,
               reserved_device_memory=_activation_bytes(config, tokens_at_once) if on_gpu else 0)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        groups = [{"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
                  {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
        self.optimizer: StreamOptimizer = self.module.tandem.optimizer([g for g in groups if g["params"]], lr=0.0, betas=tuple(settings.betas),
                                                                       eps=_EPS)
        self.device = self.optimizer.engine.device

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the losses of all targets, in fp32."""
        tokens, positions, targets = (None if part is None else part.to(self.place) for part in batch)
        assert tokens is not None and targets is not None
        given = {} if positions is None else {"position_ids": positions}
        logits = self.module(input_ids=tokens, use_cache=False, **given).logits
        chosen = targets != NO_TARGET
        return torch.nn.functional.cross_entropy(logits[chosen].float(), targets[chosen], reduction="sum")

    @property
    def place(self) -> torch.device:
        """Device on which it computes."""
        return torch.device(next(self.module.parameters()).device)

    def sees_what_follows(self) -> bool:
        """Whether a token's logits depend on the tokens behind it, as in models that fill gaps: it would see its own target. It is tried."""
        first, second = _TRIED
        random = torch.Generator().manual_seed(2)
        vocabulary = int(self.module.config.get_text_config().vocab_size)
        before, one, other = (torch.randint(0, vocabulary, (1, length), generator=random) for length in (first, second, second))
        found = [self._logits(torch.cat([before, behind], 1), None)[:first] for behind in (one, other)]
        return bool((found[0] - found[1]).abs().max() > _ROUNDING * found[0].std())

    def takes_positions(self) -> bool:
        """Whether documents may share a row: whether transformers keeps them apart in this model by positions that begin anew. It is
        tried: the logits of a document are to be those that it has alone, whatever stands before it."""
        if "position_ids" not in inspect.signature(self.module.forward).parameters:
            return False
        first, second = _TRIED
        random = torch.Generator().manual_seed(1)
        vocabulary = int(self.module.config.get_text_config().vocab_size)
        before, other, alone = (torch.randint(0, vocabulary, (1, length), generator=random) for length in (first, first, second))
        positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
        found = self._logits(alone, None)
        rows = [self._logits(torch.cat([start, alone], 1), positions)[first:] for start in (before, other)]
        apart = torch.equal(rows[0], rows[1]) if self.place.type == "cpu" else torch.allclose(rows[0], rows[1], atol=_ROUNDING * found.std().item())
        return apart and bool((rows[0] - found).abs().max() <= _ROUNDING * found.std())

    @torch.no_grad()
    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        self.module.eval()
        given = {} if positions is None else {"position_ids": positions.to(self.place)}
        logits: torch.Tensor = self.module(input_ids=tokens.to(self.place), use_cache=False, **given).logits[0]
        return logits.float()

    def save(self, folder: Path) -> None:
        """Writes configuration, weights and tokenizer into a folder."""
        self.module.save_pretrained(folder)
        for pattern in SMALL_FILES[1:]:
            for file in self.folder.glob(pattern):
                target = folder / file.relative_to(self.folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)

    def close(self) -> None:
        """Gives the memory back."""
        self.optimizer.zero_grad()
        self.module.tandem.close()


def _activation_bytes(config: Any, tokens: int) -> int:
    """Bytes of the device that so many tokens take at most beside the units' weights: inputs of units, one unit that is computed, and
    logits in bf16 and twice in fp32."""
    text = config.get_text_config()
    hidden, layers = int(getattr(text, "hidden_size", 4096)), int(getattr(text, "num_hidden_layers", 32))
    return tokens * (hidden * (_KEPT_BYTES * layers + _COMPUTED_BYTES) + int(text.vocab_size) * _LOGIT_BYTES)


def batches_of_rows(rows: Sequence[Row], packed: bool) -> list[Batch]:
    """Rows as one batch, padded to the longest: behind its last target, where nothing sees it. `packed`: whether a row may hold several
    documents, which positions tell apart."""
    length = max(len(row.inputs) for row in rows)
    tokens, positions = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), NO_TARGET)
    for line, row in enumerate(rows):
        own = len(row.inputs)
        tokens[line, :own], targets[line, :own] = torch.from_numpy(row.inputs), torch.from_numpy(row.targets)
        positions[line, :own], positions[line, own:] = torch.from_numpy(row.positions), torch.arange(length - own)
    return [(tokens, positions if packed else None, targets)]


def batches_of_documents(rows: Sequence[Row], tokens: int) -> list[Batch]:
    """The documents of rows, each as if it were alone: in batches of no more than so many tokens."""
    return [_padded(group) for row in rows for group in groups_of(list(row.documents()), tokens)]


def _padded(documents: Sequence[Document]) -> Batch:
    length = max(len(document.inputs) for document in documents)
    tokens, targets = torch.zeros(len(documents), length, dtype=torch.long), torch.full((len(documents), length), NO_TARGET)
    for line, document in enumerate(documents):
        own = len(document.inputs)
        tokens[line, :own], targets[line, :own] = torch.from_numpy(document.inputs), torch.from_numpy(document.targets)
    return tokens, None, targets
