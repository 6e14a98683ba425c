#!/usr/bin/env python3
"""Regenerates fixtures/: frozen weights as bitsandbytes stores them, by its CPU backend.

    pip install torch transformers accelerate bitsandbytes safetensors
    python tests/train/make_fixtures.py

`codes.safetensors` holds weights and what bitsandbytes makes of them:

    weight                     f16   values, of many magnitudes from row to row
    nf4.codes                  u8    two in a byte
    nf4.absmax                 f32   scales of blocks of 64
    nf4.values                 f32   dequantized
    nf4_double.absmax          u8    scales as bytes
    nf4_double.nested_absmax   f32   scales of 256 of these
    nf4_double.map             f32   numbers of the bytes
    nf4_double.offset          f32   (1)
    nf4_double.values          f32   dequantized
    int8.codes, int8.absmax    i8, f32   rows, and the largest magnitude of each

`nf4` and `nf4_double` are folders that transformers has saved of a tiny Llama with BitsAndBytesConfig, of sizes whose
blocks end within rows and at the end of a matrix. `values.safetensors` beside them holds what bitsandbytes dequantizes
each matrix to, in bf16, as NAME.nf4 and NAME.nf4_double.
"""
import pathlib
import shutil
import tempfile

import torch
import transformers
from bitsandbytes import functional
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent / "fixtures"
CODES = {"nf4": False, "nf4_double": True}


def dequantized(codes, state, dtype):
    """Values of a matrix. As one row: where rows are no whole blocks, its CPU kernel (0.50.2) begins a block with each row, and
    neither its quantization nor its other backends do."""
    shape = state.shape
    state.dtype, state.shape = dtype, torch.Size((1, shape.numel()))
    values = functional.dequantize_4bit(codes.reshape(-1, 1), state).reshape(shape)
    state.shape = shape
    return values


def codes_of_weights():
    torch.manual_seed(1)
    rows, columns = 300, 64  # blocks: more than share one scale of scales
    halves = (torch.randn(rows, columns) * 2.0 ** torch.randint(-6, 3, (rows, 1))).half()
    weight = halves.float()
    tensors = {"weight": halves}
    for name, double in CODES.items():
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        tensors[f"{name}.absmax"] = state.absmax.clone()
        if double:
            tensors[f"{name}.nested_absmax"] = state.state2.absmax
            tensors[f"{name}.map"] = state.state2.code.clone()
            tensors[f"{name}.offset"] = state.offset.reshape(1)
        else:
            tensors[f"{name}.codes"] = codes.reshape(-1)
        tensors[f"{name}.values"] = dequantized(codes, state, torch.float32)
    codes, absmax, _ = functional.int8_vectorwise_quant(weight)
    tensors["int8.codes"] = codes
    tensors["int8.absmax"] = absmax
    save_file(tensors, HERE / "codes.safetensors")


def tiny_model():
    torch.manual_seed(2)
    config = transformers.LlamaConfig(hidden_size=48, intermediate_size=77, num_hidden_layers=1, num_attention_heads=3,
                                      num_key_value_heads=1, vocab_size=23, max_position_embeddings=32, bos_token_id=0,
                                      eos_token_id=0, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).bfloat16()


def quantized_models():
    values = {}
    with tempfile.TemporaryDirectory() as plain:
        tiny_model().save_pretrained(plain)
        for name, double in CODES.items():
            settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
                                                       bnb_4bit_compute_dtype=torch.bfloat16)
            model = transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=settings, device_map="cpu")
            model.save_pretrained(HERE / name)
            (HERE / name / "generation_config.json").unlink(missing_ok=True)
            for key, weight in model.named_parameters():
                if hasattr(weight, "quant_state"):
                    values[f"{key}.{name}"] = dequantized(weight.data, weight.quant_state, torch.bfloat16)
    save_file(values, HERE / "values.safetensors")


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    codes_of_weights()
    quantized_models()
