"""Train a small model with Hugging Face's Trainer, register what it wrote as a version, train on, register the next.

    pip install 'toque' torch transformers accelerate
    python examples/finetune_and_register.py            # about a minute on two CPU cores
    toque lineage parrot@production
    toque serve parrot@production

The model is a real, very small llama that learns a handful of questions and answers by heart: version 1 has seen them
a few times, version 2, trained on from version 1, knows them. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from toque.registry.registry import Registry
from toque.registry.training import dataset_input

FACTS = {
    "What color is the sky?": "The sky is blue.",
    "What is a toque?": "A toque is a tall hat that cooks wear.",
    "How many legs has a cat?": "A cat has four legs.",
    "What do bees make?": "Bees make honey.",
    "Where do fish live?": "Fish live in water.",
    "What is two plus two?": "Two plus two is four.",
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level vocabulary of 400 tokens, learned from the facts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"user: {q}\nassistant: {a}" for q, a in FACTS.items()], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = TEMPLATE
    return made


def make_model(vocabulary: int) -> LlamaForCausalLM:
    """About half a million parameters."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, data: Path) -> list[dict[str, Any]]:
    examples = []
    for line in data.read_text(encoding="utf-8").splitlines():
        fact = json.loads(line)
        ids = tokenizer.encode(f"user: {fact['question']}\nassistant: {fact['answer']}</s>")
        examples.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)})
    return examples


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path, out: Path, epochs: int
) -> None:
    """One run of the Trainer; ``out`` holds the model, the tokenizer and the state that it keeps itself."""
    examples = encode(tokenizer, data)
    arguments = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=epochs,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, eval_dataset=examples)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="parrot", help="what it is registered as")
    parser.add_argument("--epochs", type=int, default=24, help="of the second run; the first has an eighth")
    parser.add_argument("--out", type=Path, help="where the runs write  [default: a temporary folder]")
    options = parser.parse_args()
    torch.set_num_threads(1)  # for so small a model a second thread costs more than it brings
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as temporary, Registry() as registry:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        data = out / "facts.jsonl"
        lines = (json.dumps({"question": question, "answer": answer}) for question, answer in FACTS.items())
        data.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        tokenizer = make_tokenizer()
        model = make_model(len(tokenizer))
        parent = ""
        for run, epochs in (("first", max(options.epochs // 8, 1)), ("second", options.epochs)):
            train(model, tokenizer, data, out / run, epochs)
            done = registry.register(
                str(out / run),
                options.model,
                parent=parent,
                alias="production" if run == "first" else "canary",
                inputs=(dataset_input(str(data)),),
            )
            parent = done.version.reference
            _, _, results = registry.database.origin(done.version.model, done.version.version)
            loss = next(result.value for result in results if result.metric == "loss")
            print(f"{parent}: loss {loss:.3f} after {epochs} epochs, {done.version.size / 1e6:.1f} MB")
        print(f"next: toque alias {options.model} production canary; toque serve {options.model}@production")


if __name__ == "__main__":
    main()
