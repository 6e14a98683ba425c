"""A small language model with words of its own, and records for Trainers: what the tests of transformers' and TRL's Trainers share."""
import contextlib
import io
import os

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from sandbox import torch  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
datasets.utils.logging.set_verbosity_error()

WORDS = 60  # beside those for padding, the end and what is not known


def tokenizer():
    names = ["<pad>", "<end>", "<unknown>", *(f"w{i}" for i in range(WORDS))]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unknown>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>")


def model(dtype=torch.bfloat16, tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def texts(count, seed=1, least=6, most=14):
    random = torch.Generator().manual_seed(seed)

    def one():
        length = int(torch.randint(least, most + 1, (1,), generator=random))
        return " ".join(f"w{i}" for i in torch.randint(0, 16, (length,), generator=random).tolist())
    return [one() for _ in range(count)]


def records(count=50):
    """Texts to be learnt."""
    return datasets.Dataset.from_list([{"text": text} for text in texts(count)])


def preferences(count=50):
    """A prompt with an answer that is preferred, which has words that the other one has not."""
    rows = zip(texts(count, 2), texts(count, 3), texts(count, 4), strict=True)
    return datasets.Dataset.from_list([{"prompt": prompt, "chosen": " " + good.replace("w1", "w2"), "rejected": " " + bad}
                                       for prompt, good, bad in rows])


def quietly(call):
    with contextlib.redirect_stdout(io.StringIO()):
        return call()
