"""Makes `reference_sampling.json`: what plain transformers says where `reference.py` only tells the greedy tokens.

Run as `python tests/engine/reference_sampling.py`. Float32, one sequence at a time, no code of ours but the loader.
Each of `prompts` has 5 greedy tokens and, for each, its logprob and the 5 most likely (torch.log_softmax of the
logits). Each of `processed` has 24 greedy tokens chosen from logits that transformers' own processors changed, and the
gap of the two best of them.
"""

import json
from pathlib import Path

import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from kvferry.engine.loader import load

BY_LENGTH = {
    entry["length"]: entry["prompt_ids"]
    for entry in json.loads(Path(__file__).with_name("reference.json").read_text())["prompts"]
}
LOGPROBS, TOKENS, TOP = 5, 24, 5
PENALTY, MIN_TOKENS = 1.3, 20


@torch.inference_mode()
def generate(model, prompt_ids, count, processors):
    """For each of `count` tokens: its id, the raw logits, and the gap of the two best processed ones."""
    ids, fed, cache = list(prompt_ids), torch.tensor([prompt_ids]), None
    for _ in range(count):
        output = model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
        cache, raw = output.cache, output.logits[:, -1]
        best = LogitsProcessorList(processors)(torch.tensor([ids]), raw.clone())[0].topk(2)
        ids.append(int(best.indices[0]))
        fed = torch.tensor([ids[-1:]])
        yield ids[-1], raw[0], float(best.values[0] - best.values[1])


def rounded(value):
    return float(f"{float(value):.7g}")


def logprobs(model, length):
    entries = []
    for token, raw, _ in generate(model, BY_LENGTH[length], LOGPROBS, []):
        values = torch.log_softmax(raw, dim=-1)
        top = [[int(i), rounded(v)] for v, i in zip(*values.topk(TOP), strict=True)]
        entries.append({"token": token, "logprob": rounded(values[token]), "top": top})
    return {"length": length, "tokens": entries}


def processed(model, length, penalty, min_tokens, stop_token_ids, eos):
    processors = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    if min_tokens:
        ends = [*eos, *stop_token_ids]
        processors.append(MinNewTokensLengthLogitsProcessor(length, min_tokens, ends))
    made = list(generate(model, BY_LENGTH[length], TOKENS, processors))
    return {
        "length": length, "repetition_penalty": penalty, "min_tokens": min_tokens, "stop_token_ids": stop_token_ids,
        "output_ids": [token for token, _, _ in made], "margins": [rounded(margin) for _, _, margin in made],
    }  # fmt: skip


def main() -> None:
    loaded = load("smollm2-135m")
    model, eos = loaded.model, loaded.eos_token_ids
    plain = processed(model, 17, 1.0, 0, [], eos)
    comma = max(set(plain["output_ids"]), key=plain["output_ids"].count)  # an end token that would come soon
    prompts = [logprobs(model, length) for length in (1, 33, 200)]
    entries = [processed(model, length, PENALTY, 0, [], eos) for length in (17, 65)]
    entries += [processed(model, 17, 1.0, MIN_TOKENS, [comma], eos), processed(model, 64, PENALTY, MIN_TOKENS, [], eos)]
    for entry in entries:
        print(entry["length"], loaded.tokenizer.decode(entry["output_ids"]))
    parts = {"model": loaded.name, "revision": loaded.revision}
    lines = [f'"{name}": {json.dumps(value)}' for name, value in parts.items()]
    for name, rows in (("prompts", prompts), ("processed", entries)):
        lines.append(f'"{name}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]")
    Path(__file__).with_name("reference_sampling.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
