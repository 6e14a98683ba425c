"""Parts that the tests of training by PyTorch share: small random models with a tokenizer of bytes, prepared chats, and
runs over them. As a program: trains in a process that is killed at random moments, until a run ends: finetune_runs.py
PACKAGE FOLDER KILLS."""
import contextlib
import io
import json
import os
import pathlib
import random
import signal
import sys
import time
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from tandem.finetuning.with_torch import TorchRun, train  # noqa: E402

torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

COMMON = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {"vocab_size": 257, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0}
#: Kinds that keep documents apart in three ways: rotary and learnt positions, and none that a caller may give.
KINDS = {"neox": lambda: transformers.GPTNeoXConfig(**COMMON),
         "dropout": lambda: transformers.GPTNeoXConfig(**COMMON, hidden_dropout=0.1, attention_dropout=0.1),
         "gpt2": lambda: transformers.GPT2Config(**GPT2),
         "bert": lambda: transformers.BertConfig(**COMMON),
         "bloom": lambda: transformers.BloomConfig(vocab_size=257, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                                                   hidden_dropout=0.0, attention_dropout=0.0),
         "jamba": lambda: transformers.JambaConfig(**COMMON, num_key_value_heads=2, num_experts=2, pad_token_id=0, attn_layer_period=2,
                                                   attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1)}


def make_tokenizer(folder, template=None):
    """A tokenizer whose tokens are bytes, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, **({"chat_template": template} if template else {})}))


def make_model(folder, kind="neox", template=None, seed=0, spread=0.3):
    """A random model whose weights are as large as those of a trained one, so that what stands before a token matters."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv" not in name and "A_log" not in name:
                parameter.normal_(0, spread)
    make_tokenizer(folder, template)
    model.save_pretrained(folder)
    return folder


def chats(count):
    """Questions and answers whose lengths differ."""
    return [{"messages": [{"role": "user", "content": f"{'Well, ' * (i % 4)}what is {i}?"},
                          {"role": "assistant", "content": f"It is {i}{', as I said' * (i * i % 7)}."}]} for i in range(count)]


def prepare(folder, model, records, name="chat", layout="packed", row_length=129, validation=0.0):
    """Token files of records, as tools/prepare_data.py writes them; returns the path of NAME.bin."""
    from preparation.run import Settings
    from preparation.run import prepare as run
    from preparation.signals import Signals
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(Settings([str(source)], str(model), folder / f"{name}.bin", layout=layout, row_length=row_length, validation=validation, show=0,
                     workers=1), Signals())
    for number, handler in before.items():
        signal.signal(number, handler)
    return folder / f"{name}.bin"


def settings(**changed):
    return types.SimpleNamespace(**{"device": "host", "device_memory": "16MiB", "host_memory": None, "state": "split", "state_folder": None,
                                    "policy": "auto", "warmup": 0.1, "schedule": "cosine", "weight_decay": 0.1, "betas": (0.9, 0.95), "clip": 1.0,
                                    "seed": 42, "patience": 0, **changed})


def run_of(folder, out="run", steps=8, micro_batch=2, accumulation=2, lr=5e-3, evaluate_every=3, checkpoint_every=2, **changed):
    """A run over folder/model, folder/chat.bin and, where it is there, folder/chat-validation.bin."""
    held_out = folder / "chat-validation.bin"
    return TorchRun(folder / "model", folder / "chat.bin", held_out if held_out.exists() else None, folder / out, settings(**changed), steps,
                    micro_batch, accumulation, lr, evaluate_every, checkpoint_every)


def run_to_kill(folder, out, kills):
    """A run long enough to be killed so often."""
    return run_of(folder, out, steps=6 + 4 * kills)


def wait_for_steps(child, file, more):
    """Waits until a run has told of so many more steps, and a random moment longer, or has ended."""
    def told():
        return file.read_text().count("\n") if file.exists() else 0

    until = told() + more
    while told() < until and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.05))


def main(folder, kills):
    """Trains folder/killed in processes that are killed after a random number of steps, `kills` of them; prints the status of the last
    one, and the newest checkpoint at each kill."""
    moments, reached = random.Random(7), []
    transformers.AutoModelForCausalLM.from_config(KINDS["dropout"]())  # its modules are imported once, not in each process
    for done in range(kills + 1):
        child = os.fork()
        if child == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                train(run_to_kill(folder, "killed", kills), print)
            os._exit(0)
        if done < kills:
            wait_for_steps(child, folder / "killed" / "metrics.jsonl", moments.randint(2, 6))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if status == 0 or done == kills:
            return print(json.dumps({"status": status, "reached": reached}))
        reached.append(max((path.name for path in (folder / "killed" / "checkpoints").glob("step-*")), default=""))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
