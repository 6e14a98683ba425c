"""Training other than of all weights on targets: adapters over a frozen model, a part of the weights, preferences. Its flags of the program,
and the results."""
from __future__ import annotations

from pathlib import Path

from .model_folder import ADAPTER_FILES
from .refusal import Refusal
from .settings import SETTINGS, Settings, flag_of

#: Settings of adapters, which are of no use without one of TRAINED.
OF_ADAPTERS = ("lora_alpha", "lora_targets", "lora_experts", "lora_dropout", "lora_rslora", "lora_modules_to_save")
TRAINED = ("lora_rank", "adapter")
#: Settings of preferences, which say nothing without --objective dpo.
OF_PREFERENCES = ("dpo_beta", "dpo_reference")
#: Formats of a frozen model, each as small as the one before, or smaller.
BASES = ("bf16", "int8", "fp8", "nf4", "nf4-double")


def has_adapters(settings: Settings) -> bool:
    """Whether adapters are trained, and not the model itself."""
    return any(getattr(settings, name) is not None for name in TRAINED)


def leaves_weights(settings: Settings) -> bool:
    """Whether some of the model's own weights are not trained."""
    return has_adapters(settings) or settings.freeze is not None


def least_rows(settings: Settings) -> int:
    """Rows that are computed at once at least: one, or both answers of a pair."""
    return 2 if settings.objective == "dpo" else 1


def check(settings: Settings) -> None:
    """Refuses settings that are of no use without others, or beside them: as `tandem train` does where that has them."""
    useless = [name for name in OF_ADAPTERS if getattr(settings, name) not in (None, False)]
    if useless and not has_adapters(settings):
        raise Refusal(f"{flag_of(useless[0])}: there is no --lora-rank, so no adapter is trained; give one, for example --lora-rank 16", 2)
    if settings.merged and not has_adapters(settings):
        raise Refusal("--merged: it is for adapters, and none are trained; give --lora-rank 16 with it, or leave it out", 2)
    if settings.base is not None and not leaves_weights(settings):
        raise Refusal("--base: it is for a frozen model, and all weights are trained; give --lora-rank 16 or --freeze with it, or leave it out", 2)
    if settings.freeze == "":
        raise Refusal("--freeze '': it finds nothing; give a regular expression, or leave it out", 2)
    if settings.freeze is not None and has_adapters(settings):
        raise Refusal(f"--freeze {settings.freeze}: with adapters nothing else is trained anyway; leave it out", 2)
    alone = [name for name in OF_PREFERENCES if getattr(settings, name) not in (None, "auto")]
    if alone and settings.objective != "dpo":
        raise Refusal(f"{flag_of(alone[0])}: it says nothing without --objective dpo; give both, or none", 2)


def what_native_alone_does(settings: Settings) -> str | None:
    """A flag for training that PyTorch is not given; None where there is none."""
    flag = next((flag_of(name) for name in (*TRAINED, "freeze", "compute") if getattr(settings, name) is not None), None)
    return flag or ("--objective dpo" if settings.objective == "dpo" else None)


def flags(settings: Settings) -> list[str]:
    """Flags of `tandem train` and `tandem plan`."""
    names = (*TRAINED, *OF_ADAPTERS, "base", "freeze", *OF_PREFERENCES)
    given = ((flag_of(name), getattr(settings, name)) for name in names)
    words = [word for flag, value in given if value not in (None, False) for word in ((flag,) if value is True else (flag, str(value)))]
    return words + (["--objective", settings.objective] if settings.objective != "lm" else [])


def described(settings: Settings) -> str:
    """Words on what is trained, behind the number of the model's parameters."""
    if settings.freeze is not None:
        return f", without those that --freeze {settings.freeze} finds{f', which are kept in {settings.base}' if settings.base else ''}"
    if not has_adapters(settings):
        return ""
    which = f"adapters of rank {settings.lora_rank}" if settings.lora_rank else f"the adapter {settings.adapter}"
    return f", frozen{f' in {settings.base}' if settings.base else ''}, and {which}"


def results(settings: Settings) -> tuple[str, ...]:
    """Folders that the run ends with: stages of it, and names below OUT."""
    if not has_adapters(settings):
        return ("model",)
    return ("adapter", "model") if settings.merged else ("adapter",)


def folder_of(adapter: Path) -> Path:
    """The adapter in a folder: of a run of `tandem finetune` its best state, else the folder itself."""
    return adapter / "adapter" if (adapter / SETTINGS).is_file() and (adapter / "adapter").is_dir() else adapter


def files_of(adapter: Path) -> list[Path]:
    """Files of an adapter that a run depends on."""
    found = [adapter / name for name in (*ADAPTER_FILES, "manifest.json", "summary.json") if (adapter / name).is_file()]
    return found[:2]
