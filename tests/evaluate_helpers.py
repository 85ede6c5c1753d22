"""Tasks of lm-eval that need no network: their YAML and data are written where a test wants them."""

import json
import random
from pathlib import Path

from tests.train_helpers import WORDS

_HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
fewshot_split: test
metadata: {{version: 3.0}}
num_fewshot: 0
"""
_TASKS = {
    # Answers of one token each, so that all share an input.
    "letters": """output_type: multiple_choice
doc_to_text: "{{question}} "
doc_to_choice: "{{letters}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "endings": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{endings}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{endings[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(folder: Path, items: int = 60, longest: int = 24) -> Path:
    """Write the YAML and the data of the tasks; questions have up to `longest` words, texts five times as many."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "items.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for index in range(items):
            words = lambda most: " ".join(draw.choices(WORDS, k=draw.randint(1, most)))  # noqa: E731
            file.write(json.dumps({
                "question": f"{index} {words(longest)}", "answer": draw.randrange(4), "letters": list("abcd"),
                "endings": [f" {words(3)}" for _ in range(4)], "text": words(5 * longest),
            }) + "\n")  # fmt: skip
    for name, rest in _TASKS.items():
        (folder / f"{name}.yaml").write_text(_HEAD.format(name=name, data=data) + rest, encoding="utf-8")
    return folder
