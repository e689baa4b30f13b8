"""What `launch/tour` does: prints each command as a user would type it, runs it, and compares two losses at the end."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spare_megatron.config.loader import load_run_config
from spare_megatron.formats.quantities import format_bytes
from spare_megatron.journal.files import read_journal
from spare_megatron.journal.records import FaultRecord

STEPS, LEAST_STEPS = 48, 8
PRESETS: dict[str, tuple[str, dict[str, object]]] = {
    "llama_10m_cpu": ("a Llama of 10M parameters", {}),
    "deepseek_cpu": (
        "a DeepSeek-V3 of 7M parameters, a mixture with latent attention,",
        {"layout.num_groups": 4, "layout.pipeline_parallel": 1, "spare.redundancy": 3, "spare.spares": 0},
    ),
}
"""What each is, and what it lacks for two losses in 4 groups of one rank."""
VOCAB_SIZE = 8192
NUM_WINDOWS = 24
"""Held-out sequences in the means of both losses."""
MOST_DIFFERENCE = 1e-4


class Failed(Exception):
    """The tour cannot go on. `code` is what it ends with."""

    def __init__(self, reason: str, code: int = 1) -> None:
        super().__init__(reason)
        self.code = code


def main() -> int:
    began_s = time.monotonic()
    options = parse_options()
    try:
        figures = tour(options.folder, options.steps, options.preset)
        figures["wall_s"] = round(time.monotonic() - began_s, 1)
        if options.json:
            options.json.write_text(json.dumps(figures) + "\n")
        judge(figures)
    except Failed as error:
        say(f"error: {error}; everything made so far is in {options.folder}")
        return error.code
    except KeyboardInterrupt:
        say(f"interrupted; everything made so far is in {options.folder}")
        return 130
    say(f"done in {figures['wall_s']:.0f} s; the weights are in {options.folder / 'weights'}")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch/tour", description="From JSON lines to a model in transformers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="folder for everything, new or empty [default: runs/tour-TIME]")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps before half as many more [default: {STEPS}]")
    first = next(iter(PRESETS))
    parser.add_argument("--preset", choices=PRESETS, default=first, help=f"the model [default: {first}]")
    options = parser.parse_args()
    options.folder = options.folder or Path("runs") / f"tour-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps {options.steps} is below {LEAST_STEPS}, too few for two losses")
    try:
        if options.json:
            options.json.touch()  # now rather than after minutes
        options.folder.mkdir(parents=True, exist_ok=True)
        if any(options.folder.iterdir()):
            parser.error(f"--folder {options.folder} is not empty; choose another")
    except OSError as error:
        parser.error(f"{error.filename} cannot be written: {error.strerror}")
    return options


def tour(folder: Path, steps: int, preset: str) -> dict[str, float | int | str]:
    """Everything but the verdict on the figures, which it returns."""
    say(f"`spare` is {shlex.join(spare_command())}; everything is made in {folder}, without a network")
    say("1 of 6: text of two kinds as JSON lines, from this Python: its modules, and its manual")
    library = Path(sysconfig.get_paths()["stdlib"])
    write_json_lines(folder / "code.jsonl", (file.read_text("utf-8") for file in sorted(library.glob("*.py"))))
    write_json_lines(folder / "prose.jsonl", manual())
    say("2 of 6: a new tokenizer, and the tokens of both corpora")
    tokenize(folder)
    model, _ = PRESETS[preset]
    say(f"3 of 6: {model} trains on a blend of both in 4 groups; two are killed; {steps} steps")
    first = folder / "first"
    kills = [(steps // 3, 3, "backward"), (2 * steps // 3, 1, "in_reduce")]
    train(folder, first, steps, kills, preset)
    say(f"4 of 6: the training is extended by half, to {steps + steps // 2} steps")
    longer = folder / "longer"
    more = {"checkpoint.load": first, "train.steps": steps + steps // 2, "faults.trace": "[]"}
    spare("train", first / "config.toml", "--run-dir", longer, *settings(more))
    say("5 of 6: what the journals of both runs prove")
    verdicts = [json.loads(spare("check", run, "--json", is_read=True))["verdict"] for run in (first, longer)]
    struck = [(record.step, record.group, record.phase) for record in read_journal(first).of(FaultRecord)]
    if sorted(struck) != sorted(kills):
        raise Failed(f"the faults that struck are {struck}, and {kills} were to")
    say("6 of 6: the weights go to Hugging Face's format, and transformers computes the loss of the text held out")
    export = ("--format", "hf", "--tokenizer", folder / "tokenizer", "--out", folder / "weights")
    spare("checkpoint", "export", longer, *export)
    return {
        "eval_loss": our_loss(longer),
        "transformers_loss": transformers_loss(longer, folder / "weights"),
        "groups_lost": sum(summary_of(run)["groups_lost"] for run in (first, longer)),
        "verdict": next((verdict for verdict in verdicts if verdict != "valid"), "valid"),
    }


def tokenize(folder: Path) -> None:
    text = [word for name in ("code", "prose") for word in ("--input", folder / f"{name}.jsonl")]
    reading = ("--json-key", "text", "--workers", 2)
    spare("tokenizer", "train", *text, *reading, "--vocab-size", VOCAB_SIZE, "--output", folder / "tokenizer")
    for name in ("code", "prose"):
        tokens = ("--tokenizer", f"hf:{folder / 'tokenizer'}", "--output-prefix", folder / name)
        spare("preprocess", "--input", folder / f"{name}.jsonl", *reading, *tokens)


def train(folder: Path, run_dir: Path, steps: int, kills: Iterable[tuple[int, int, str]], preset: str) -> None:
    """The run of so many steps, with a rank killed in each of these steps and groups, at a moment."""
    blend = [f'{{corpus="{folder / name}",weight={weight}}}' for name, weight in (("prose", 0.3), ("code", 0.7))]
    faults = [f'{{step={step},group={group},phase="{phase}"}}' for step, group, phase in kills]
    _, adapted = PRESETS[preset]
    values = {
        **adapted,
        "data.corpus": "",
        "data.blend": f"[{','.join(blend)}]",
        "data.split": "90,10",
        "eval.every_steps": steps // 2,
        "eval.sequences": NUM_WINDOWS,
        "train.steps": steps,
        "optimizer.decay_steps": steps + steps // 2,
        "checkpoint.interval_steps": steps,
        "faults.trace": f"[{','.join(faults)}]",
    }
    spare("train", preset, "--run-dir", run_dir, *settings(values))


def judge(figures: dict[str, float | int | str]) -> None:
    """Says the figures; raises Failed if one is not what it has to be."""
    ours, theirs = float(figures["eval_loss"]), float(figures["transformers_loss"])
    say(f"loss on {NUM_WINDOWS} windows held out: {ours:.6f} by spare_megatron, {theirs:.6f} by transformers")
    say(f"{figures['groups_lost']} groups were lost, and the journals are {figures['verdict']}")
    if not abs(ours - theirs) <= MOST_DIFFERENCE:
        raise Failed(f"the losses differ by {abs(ours - theirs):.2g}, more than {MOST_DIFFERENCE}")
    if int(figures["groups_lost"]) < 2 or figures["verdict"] != "valid":  # a slow machine may lose more
        raise Failed("two groups were to be lost, with valid journals")


# ----------------------------------------------------------------------------------------------------------- text


def manual() -> list[str]:
    """The pages of Python's reference manual that `help()` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise Failed(f"this Python comes without its manual: {error}; choose one that has it: PYTHON=...") from error
    return [topics[name] for name in sorted(topics)]


def write_json_lines(path: Path, texts: Iterable[str]) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    path.write_text("".join(lines))
    say(f"{path}: {len(lines)} documents, {format_bytes(path.stat().st_size)}")


# --------------------------------------------------------------------------------------------------------- losses


def summary_of(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "summary.json").read_text()))


def our_loss(run_dir: Path) -> float:
    """Mean cross entropy per token that the run found in its last evaluation."""
    return float(summary_of(run_dir)["eval"]["validation"]["loss"])


def transformers_loss(run_dir: Path, weights: Path) -> float:
    """Mean cross entropy per token over the windows that the run evaluated, by the exported model."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from spare_megatron.mcore.model.training_samples import ValidationWindows

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, local_files_only=True).eval()
    windows = ValidationWindows(load_run_config(run_dir / "config.toml").config)
    losses = []
    with torch.no_grad():
        for number in range(NUM_WINDOWS):
            tokens = windows[number]
            losses.append(torch.nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:]).item())
    return sum(losses) / NUM_WINDOWS


# ------------------------------------------------------------------------------------------------------- commands


def spare_command() -> list[str]:
    return [sys.executable, "-m", "spare_megatron"]


def spare(*words: object, is_read: bool = False) -> str:
    """Prints and runs a command; its output, if that is read, is printed afterwards. Raises Failed if it fails.

    Ctrl-C reaches the command as well, which then ends what it has started: it is waited for.
    """
    command = shlex.join(["spare", *map(str, words)])
    say(f"$ {command}")
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        output = subprocess.PIPE if is_read else None  # a terminal shows progress as it goes
        done = subprocess.run([*spare_command(), *map(str, words)], stdout=output, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    print(done.stdout or "", end="", flush=True)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise Failed(f"this command ended with {done.returncode}: {command}", done.returncode)
    return done.stdout or ""


def settings(values: dict[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def say(text: str) -> None:
    print(f"[tour] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
