"""How many of Megatron-LM's functional-test configurations `spare convert` converts, and why the others are refused.

    python benchmarks/convert_megatron.py FOLDER          # tests/functional_tests/test_cases/gpt of a checkout

Declared absent, and so made up: paths, the tokenizer (50257 tokens) and the devices (one node of 8, or as many as a
launch of several names). A checkpoint that a configuration begins from (`TEST_TYPE` frozen-start or
checkpoint-consistency) is in another folder than the one that it saves to; all others go on with their own, as their
first run begins without one (`run_ci_test.sh`). A configuration counts as converted if each of its launches has no
argument that is missing and a preset that passes `spare config check --elsewhere`.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.origin import origin
from spare_megatron.tools.convert.arguments import read_arguments
from spare_megatron.tools.convert.launch import Launch, read_launch
from spare_megatron.tools.convert.settings import convert_launch, problems_of

_PATHS = "DATA_PATH DATA_CACHE_PATH TENSORBOARD_PATH WANDB_EXPERIMENT WANDB_SAVE_PATH OUTPUT_PATH INFERENCE_OUTPUT_PATH"
_BEGIN_ELSEWHERE = ("frozen-start", "checkpoint-consistency")


def launches(file: Path) -> Iterator[tuple[Launch, str]]:
    """Each launch of a configuration, and its GPUs. Raises ValueError."""
    table = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    begins_elsewhere = table.get("TEST_TYPE") in _BEGIN_ELSEWHERE
    defined = {name: f"/{name.lower()}" for name in _PATHS.split()} | {"REPEAT": "1", "DATA_BLEND": "1 /a 2 /b"}
    defined |= {"CHECKPOINT_SAVE_PATH": "/saved", "CHECKPOINT_LOAD_PATH": "/loaded" if begins_elsewhere else "/saved"}
    for name in (name for name in table if re.fullmatch(r"MODEL_ARGS(_\d+)?", name)):
        one = yaml.dump({"ENV_VARS": table.get("ENV_VARS") or {}, "MODEL_ARGS": table[name]})
        with TemporaryDirectory() as folder:
            (copy := Path(folder) / "launch.yaml").write_text(one, encoding="utf-8")
            yield read_launch(copy, defined), table.get("MODEL_ENV_VARS", {}).get(name, {}).get("GPUS_PER_NODE", "8")


def outcome(file: Path) -> tuple[str, Counter[str]]:
    """Why the configuration is refused, empty if it is converted; and its given arguments by what became of them."""
    kinds: Counter[str] = Counter()
    try:
        for launch, num_gpus in launches(file):
            size = () if "--vocab-size" in launch.arguments else ("--vocab-size", "50257")
            _, preset, _ = convert_launch(launch, ["--nproc-per-node", num_gpus, "--nnodes", "1", *size], ())
            given = read_arguments(launch.arguments)
            kinds.update(found.kind for name, found in preset.classes.items() if name in given)
            if missing := sorted({name for name, found in preset.classes.items() if found.kind == "missing"}):
                return preset.classes[missing[0]].text, kinds
            if problems := problems_of(preset, "run"):
                return problems[0], kinds
    except ValueError as error:
        return str(error).partition("launch.yaml ")[2] or str(error), kinds
    return "", kinds


def measure(folder: Path) -> dict[str, Any]:
    """Raises ValueError if the folder has no configurations."""
    files = sorted(folder.glob("*/model_config.yaml"))
    if not files:
        raise ValueError(
            f"{folder} has no */model_config.yaml; name tests/functional_tests/test_cases/gpt of a checkout"
        )
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parent.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    outcomes = [outcome(file) for file in files]
    converted = [kinds for reason, kinds in outcomes if not reason]
    return {
        "configurations": len(files),
        "list_sha256": digest.hexdigest(),
        "converted": len(converted),
        "ratio": len(converted) / len(files),
        "least_share_of_arguments": min((1 - kinds["missing"] / kinds.total() for kinds in converted), default=None),
        "arguments": sum(converted, Counter()),
        "refusals": Counter(reason for reason, _ in outcomes if reason),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = measure(options.folder)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(found | origin()))
        return
    print(f"{found['configurations']} configurations, list sha256 {found['list_sha256']}")
    print(f"{found['converted']} converted ({found['ratio']:.1%})")
    if found["converted"]:
        print(f"least share of their arguments that are had here: {found['least_share_of_arguments']:.1%}")
    print(f"their arguments: {', '.join(f'{number} {kind}' for kind, number in found['arguments'].most_common())}")
    for reason, number in found["refusals"].most_common():
        print(f"| {number} | {reason} |")


if __name__ == "__main__":
    main()
