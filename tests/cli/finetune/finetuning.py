"""Parts that the tests of `tandem finetune` share: a random Llama with a tokenizer, chats about small sums, and calls
of the command.

The scripts that use it run under a Python with the packages of ../prepare/requirements.txt; their arguments are the built program
and the folder of the package in the build tree."""
import json
import os
import pathlib
import subprocess
import sys

CLI = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CLI), str(CLI / "prepare")]
import peers  # noqa: E402

peers.run_under_one_with("numpy", "safetensors", "tokenizers", "jinja2")
PACKAGE = os.path.abspath(sys.argv.pop(2))
from program import ProgramTest, main, wait_for  # noqa: E402, F401

END = "<|end|>"
CHAT_TEMPLATE = ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
COLOURS = "red green blue black white grey brown pink".split()
THINGS = "car boat house tree door chair lamp stone ring coat shoe book bell drum fish bird hat cup box key flag bed pen kite sock rope".split()


def records(count=200):
    """Chats in ShareGPT's form, whose answer depends on the thing that is asked of."""
    pairs = [(thing, n) for n in range(8) for thing in THINGS]
    return [{"conversations": [{"from": "human", "value": f"Which colour has {thing} {n}?"},
                               {"from": "gpt", "value": f"It is {COLOURS[THINGS.index(thing) * 5 % 8]}."}]} for thing, n in pairs[:count]]


def write_tokenizer(folder, template=None, named_end=True):
    """Byte-level BPE of the records' text, whose end token is its only special one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = [turn["value"] for record in records() for turn in record["conversations"]]
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    made.add_special_tokens([END])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": END} if named_end else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return made.get_vocab_size()


def write_llama(folder, template=None, named_end=True, **config):
    """A Hugging Face folder of a small Llama with random weights."""
    width, inner = ({**SHAPE, **config}[name] for name in ("hidden_size", "intermediate_size"))
    mlp = {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    return _write_model(folder, template, named_end, {**SHAPE, **config}, mlp)


def write_mixtral(folder, template=None, experts=2):
    """A Hugging Face folder of a small mixture of experts with random weights."""
    shape = {**SHAPE, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "num_experts_per_tok": 1,
             "tie_word_embeddings": False}
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    mlp = {"block_sparse_moe.gate": (experts, width)}
    for i in range(experts):
        mlp.update({f"block_sparse_moe.experts.{i}.{name}": size for name, size in {"w1": (inner, width), "w2": (width, inner), "w3": (inner, width)}.items()})
    return _write_model(folder, template, True, shape, mlp)


def _write_model(folder, template, named_end, shape, mlp):
    """The folder of a model of this shape whose blocks have these matrices behind attention."""
    import numpy
    from safetensors.numpy import save_file
    folder.mkdir(parents=True)
    shape = {"vocab_size": write_tokenizer(folder, template, named_end), **shape}
    (folder / "config.json").write_text(json.dumps(shape))
    width, narrow = shape["hidden_size"], shape["hidden_size"] // 2
    shapes = {"model.embed_tokens.weight": (shape["vocab_size"], width), "model.norm.weight": (width,)}
    if not shape["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (shape["vocab_size"], width)
    for i in range(shape["num_hidden_layers"]):
        shapes.update({f"model.layers.{i}.{name}.weight": size for name, size in {
            "input_layernorm": (width,), "post_attention_layernorm": (width,), "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (narrow, width), "self_attn.v_proj": (narrow, width), "self_attn.o_proj": (width, width), **mlp}.items()})
    draw = numpy.random.default_rng(7)
    save_file({name: numpy.ones(size, numpy.float32) if "norm" in name else draw.normal(0, 0.05, size).astype(numpy.float32)
               for name, size in shapes.items()}, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def rounded_tensors(file):
    """Tensors of a file of fp32 or bf16, each as the bytes of its values in bf16."""
    import numpy
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, told in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        first, end = (begin + at for at in told["data_offsets"])
        bits = numpy.frombuffer(data[first:end], numpy.uint32 if told["dtype"] == "F32" else numpy.uint16)
        if told["dtype"] == "F32":  # to the nearest, ties to even
            bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)
        found[name] = bits.tobytes()
    return found


class FinetuneTest(ProgramTest):
    """`model` and `data` are a folder and a file that may be trained on."""

    def setUp(self):
        super().setUp()
        self.data = self.write_records(records())
        self.model, self.out = self.root / "model", self.root / "run"

    def write_records(self, found, name="chats.json"):
        return self.file(name, json.dumps(found))

    def environment(self):
        """The package of the build tree, and nothing of this machine's caches but what was measured once for these tests."""
        return {**super().environment(), "PYTHONPATH": PACKAGE, "TANDEM_PYTHON": sys.executable, "HF_HOME": str(self.root / "hub"),
                "HF_HUB_OFFLINE": "1", **({"XDG_CACHE_HOME": self.measured} if self.measured else {})}

    def cached(self, name):
        """Folder of a model in the hub's local cache, which is written where it is not there."""
        folder = self.root / "hub" / "hub" / f"models--{name.replace('/', '--')}"
        revision = "0123456789abcdef0123456789abcdef01234567"
        if not folder.exists():
            write_llama(folder / "snapshots" / revision, CHAT_TEMPLATE)
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text(revision)
        return folder / "snapshots" / revision

    measured = os.environ.get("TANDEM_TEST_FINETUNE_CACHE")

    def tandem(self, *arguments, text=None):
        return subprocess.run([sys.executable, "-m", "tandem.program", *map(str, arguments)], capture_output=True, text=True, input=text,
                              timeout=600, env=self.environment(), cwd=self.root)

    def command(self, *arguments, model=None, data=None):
        return ["finetune", model or self.model, data or self.data, "--out", self.out, "--device", "host", *arguments]

    def finetune(self, *arguments, **where):
        return self.tandem(*self.command(*arguments, **where))

    def tensors(self, out=None):
        return ((out or self.out) / "model" / "model.safetensors").read_bytes()
