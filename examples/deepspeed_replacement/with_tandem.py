"""Fine-tunes a language model on a text by transformers' Trainer, with weights and the optimizer's state in host memory."""
import argparse

import tandem
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="folder or name of a model")
parser.add_argument("text", help="file to train on")
parser.add_argument("--out", default="run", help="folder of the results")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=512, help="tokens in a row")
options = parser.parse_args()

arguments = TrainingArguments(
    options.out, max_steps=options.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=2e-5,
    weight_decay=0.1, logging_steps=1, report_to=[], use_cpu=not torch.cuda.is_available(),
)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)

with open(options.text, encoding="utf-8") as file:
    tokens = tokenizer(file.read(), return_tensors="pt")["input_ids"][0]
rows = [{"input_ids": row, "labels": row} for row in tokens.split(options.length) if len(row) == options.length]

trainer = tandem.hf.trainer(Trainer)(tandem=tandem.hf.Config(stream=True, device_memory="8GiB"),
    model=model, args=arguments, train_dataset=rows,
)
trainer.train()
trainer.save_model(options.out)
