"""Makes `reference.json`: greedy output of plain transformers, the oracle for every path of the product.

Run as `python tests/engine/reference.py`. Float32, one sequence at a time, transformers' own attention and cache, no
code of ours but the loader. Each entry: `prompt_ids` (or `content`, one user message, with the length of the
rendered prompt), the 32 `output_ids` (an EOS does not end them), the gap of the two best logits at each, and the
index of the first EOS among them (null: none).
"""

import json
from pathlib import Path

import torch
from prose import PARAGRAPHS

from kvferry.engine.loader import load

LENGTHS = (
    1, 2, 5, 15, 16, 17, 24, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 400, 511, 512, 513,
    700, 1000, 1250, 1500,
)  # fmt: skip
CHAT_LENGTHS = (40, 47, 48, 49, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513, 1000, 1500)
TOKENS = 32


def prose_from(first: int) -> str:
    return "\n\n".join(PARAGRAPHS[first:] + PARAGRAPHS[:first])


@torch.inference_mode()
def greedy(model, prompt_ids):
    """`TOKENS` greedy tokens and their margins."""
    fed, cache, ids, margins = torch.tensor([prompt_ids]), None, [], []
    for _ in range(TOKENS):
        output = model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        best = output.logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        margins.append(float(f"{float(best.values[0] - best.values[1]):.5g}"))
        fed = torch.tensor([ids[-1:]])
    return ids, margins


def chat_content(tokenizer, length, first):
    """A message, cut so that the rendered conversation has exactly `length` tokens."""
    prose = tokenizer.encode(prose_from(first))
    for count in range(1, length):
        content = tokenizer.decode(prose[:count])
        ids = render(tokenizer, content)
        if len(ids) == length:
            return content, ids
    raise ValueError(f"no cut of the prose renders to {length} tokens")


def render(tokenizer, content):
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def entry(loaded, prompt_ids):
    ids, margins = greedy(loaded.model, prompt_ids)
    ends = [at for at, token in enumerate(ids) if token in loaded.eos_token_ids]
    print(f"{len(prompt_ids):5} tokens: {loaded.tokenizer.decode(ids)!r}", flush=True)
    return {"output_ids": ids, "margins": margins, "first_eos": ends[0] if ends else None}


def main() -> None:
    loaded = load("smollm2-135m")
    prompts, chats = [], []
    for index, length in enumerate(LENGTHS):
        prose = loaded.tokenizer.encode(prose_from(index % len(PARAGRAPHS)))
        assert len(prose) >= length, (len(prose), length)
        prompts.append({"length": length, "prompt_ids": prose[:length], **entry(loaded, prose[:length])})
    for index, length in enumerate(CHAT_LENGTHS):
        content, ids = chat_content(loaded.tokenizer, length, index % len(PARAGRAPHS))
        chats.append({"length": length, "content": content, **entry(loaded, ids)})
    lines = [f'"model": {json.dumps(loaded.name)}', f'"revision": {json.dumps(loaded.revision)}']
    lines += [f'"eos_token_ids": {json.dumps(list(loaded.eos_token_ids))}']
    for name, entries in (("prompts", prompts), ("chats", chats)):
        rows = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        lines.append(f'"{name}": [\n{rows}\n]')
    Path(__file__).with_name("reference.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
