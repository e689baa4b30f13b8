"""`spare convert`: scripts are read as by bash, arguments as by Megatron's own parser, and none is dropped."""

import argparse
import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.commands import app
from spare_megatron.config.building import build_run_config
from spare_megatron.formats.codec import parsed_toml
from spare_megatron.tools.convert import settings as reading
from spare_megatron.tools.convert.arguments import TAKEN, Arguments, class_of, read_arguments
from spare_megatron.tools.convert.launch import read_launch
from spare_megatron.tools.convert.settings import preset_of, steps_of

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
LAUNCH = f"{MODEL} --vocab-size 1000 --micro-batch-size 2 --global-batch-size 64 --train-iters 100 --lr 1e-3 --bf16"
DATA = "--data-path corpus --split 99,1,0"
GPUS = "--nproc-per-node 8"

SCRIPTS = {
    "arrays": """#!/bin/bash
GPUS=8 # a comment
NODES=${NODES:-2}
ARGS=(
    --num-layers 24   # of the model
    '--hidden-size' "1024"
    # --fp16
    --data-path 0.5 "$ROOT/a b" 0.5 ${ROOT}/c
)
ARGS+=("--window-size" "(128,0)" --lr 1e-4)
torchrun --nproc_per_node $GPUS --nnodes=$NODES pretrain_gpt.py "${ARGS[@]}" ${ARGS[@]} 2>&1 | tee log
""",
    "strings": """
set -euo pipefail
BASE=/data; SAVE="${BASE}/save"
OPTIONS=" \\
    --num-layers 12 \\
    --save $SAVE \\
    --load ${SAVE}"
OPTIONS+=" --bf16"
OPTIONS="$OPTIONS --split 99,1,0"
if [ -d /nonexistent ]; then
    OTHER=1
fi
torchrun --nproc-per-node=4 /opt/megatron/pretrain_gpt.py ${OPTIONS} --seed 7 > log.txt
""",
    "positional": """
CKPT=$1
LOGS=${2:-"logs/x"}
torchrun pretrain_gpt.py --save "$CKPT" --tensorboard-dir $LOGS --data-path '$not' \\$not "a\\"b" x#y &
wait
""",
    "defaults": """
BASE=/data; EMPTY=
CKPT=${CKPT:-${BASE}/ckpt}
LOGS="${LOGS:-"${BASE:-x}/a b"}"
torchrun pretrain_gpt.py --save $CKPT --load ${A-${B:-${BASE}/c}} --tensorboard-dir "$LOGS" --lr ${EMPTY:-1e-4} \\
    --data-path "\\${BASE} $BASE" '${BASE}' ${EMPTY-x} ${BASE:-"$CKPT"} ${C:-"$BASE"/d}
""",
    "lists": """
set -e && true
TP=2 && echo $TP
ARGS=(--lr 1e-4)
false || { echo $TP; } && (true && true)
case $TP in 1) false && true;; 2) true;; esac
ARGS+=(--seed $TP)
if true && true; then echo; fi
PP=3
cd / && # there
    torchrun pretrain_gpt.py "${ARGS[@]}" --pipeline-model-parallel-size $PP
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_of_a_launch_are_those_that_bash_gives_it(name: str, tmp_path: Path) -> None:
    script, program = tmp_path / "launch.sh", tmp_path / "torchrun"
    script.write_text(SCRIPTS[name])
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$WORDS"\n')
    program.chmod(0o755)
    variables = {"ROOT": "/root/r", "1": "/ckpt"}
    subprocess.run(
        ["bash", script, variables["1"]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "ROOT": variables["ROOT"], "WORDS": str(tmp_path / "words")},
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    launch = read_launch(script, variables)
    script_name = next(
        word for word in (tmp_path / "words").read_text().split("\0") if word.endswith("pretrain_gpt.py")
    )
    words = [*launch.launcher[1:], script_name, *launch.arguments]
    assert words == (tmp_path / "words").read_text().split("\0")[:-1]


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("N=$(nproc)\n", "N"),
        ("if [ $# = 1 ]; then N=4; fi\n", "N"),
        ("for N in 1 2; do M=1; done; N=$M\n", "M"),
        ("N=$M\n", "M"),
        ("N=`cat file`\n", "N"),
        ('N="$(dirname "$0")/n"\n', "N"),
        ("N=run_$(date +%s)\n", "N"),
        ("N=${M%/}\n", "N"),
        ("N=${M:-{1}}\n", "N"),
        ("N=${N:-$(nproc)}\n", "N"),
        ('[ "$SIZE" = small ] && N=4\n', "N"),
        ("N=1; [[ -n $A && $B ]] || N+=4\n", "N"),
        ("N=(1); test $A && N+=(4)\n", "N"),
        ("N=1; true && export N=2 | cat\n", "N"),
        ("N=1; true &&\n  # the other\n  N=2\n", "N"),
        ("N=1; [ $A ] && {\n M=1\n N=2; }\n", "N"),
        ("N=1; [ $A ] && { case $A in a) M=1;; esac; N=2; }\n", "N"),
        ("N=1; [ $A ] && { M=1; } && N=2\n", "N"),
        ("N=1; read -r N\n", "N"),
        ('N=1; let "N = 4"\n', "N"),
        ("N=1; unset N\n", "N"),
        ("N=1; printf -v N %d 4\n", "N"),
        ("N=1; for N in 1 2; do true; done\n", "N"),
        ("N=1; declare -x N=$M\n", "M"),
        ("", "N"),
    ],
)
def test_a_value_that_only_running_shows_is_refused_by_its_variable(line: str, unknown: str, tmp_path: Path) -> None:
    (file := tmp_path / "launch.sh").write_text(f"{line}torchrun pretrain_gpt.py --num-layers $N\n")
    with pytest.raises(ValueError, match=f"the value of {unknown} is not known; give --define {unknown}=VALUE"):
        read_launch(file, {})
    assert read_launch(file, {unknown: "4"}).arguments == ("--num-layers", "4")


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("torchrun pretrain_gpt.py --lr 1 --save $(pwd)/c", "--save"),
        ("torchrun pretrain_gpt.py --save=${A%/}", "--save"),
        ("A=(--lr 1 --save `pwd`)\ntorchrun pretrain_gpt.py ${A[@]}", "--save"),
        ("A=' --lr 1'; A+=\" --save $(pwd)/c\"\ntorchrun pretrain_gpt.py $A", "--save"),
        ("torchrun --nproc-per-node $(nvidia-smi -L | wc -l) pretrain_gpt.py", "--nproc-per-node"),
        ("bash -c 'A=1; torchrun pretrain_gpt.py --save ${A}'", "--save"),
    ],
)
def test_an_expansion_that_only_bash_makes_is_refused_by_its_argument(text: str, argument: str, tmp_path: Path) -> None:
    (file := tmp_path / "launch.sh").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=f"shows the value of {argument}; give {argument} VALUE behind --$"):
        read_launch(file, {})
    read_launch(file, {}, [argument, "4"])  # which replaces it


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("torchrun pretrain_gpt.py --save x $(further)", "behind --save"),
        ("torchrun pretrain_gpt.py --save=x $(further)", "behind --save"),
        ("$(which torchrun) pretrain_gpt.py --save x", "of the launcher"),
    ],
)
def test_an_expansion_that_may_hold_other_arguments_is_refused(text: str, place: str, tmp_path: Path) -> None:
    (file := tmp_path / "launch.sh").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=f"only running it shows a word {place}; write that out in a copy"):
        read_launch(file, {}, ["--save", "y"])


def test_a_script_is_never_executed(tmp_path: Path) -> None:
    (file := tmp_path / "launch.sh").write_text(f"touch {tmp_path}/ran\ntorchrun pretrain_gpt.py --bf16 $(touch ran)\n")
    with pytest.raises(ValueError, match="only running it shows the value of --bf16"):
        read_launch(file, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch.sh"]


def test_yaml_is_read_as_texts_with_its_anchors(tmp_path: Path) -> None:
    (file := tmp_path / "model_config.yaml").write_text(
        "BASE: &base\n  --lr: 1e-4\nENV_VARS:\n  SIZE: 32\nMODEL_ARGS:\n  <<: *base\n  --num-layers: ${SIZE}\n"
        "  --bf16: true\n  --cp-comm-type: [a2a, p2p]\n  --window-size: (4, 0)\n  --data-path: ${BLEND}\n"
    )
    launch = read_launch(file, {"BLEND": "1 a 2 b"})
    given = read_arguments(launch.arguments)
    assert given == {
        "lr": ("1e-4",),
        "num_layers": ("32",),
        "bf16": (),
        "cp_comm_type": ("a2a", "p2p"),
        "window_size": ("(4, 0)",),
        "data_path": ("1", "a", "2", "b"),
    }
    assert launch.environment == {"SIZE": "32"}


def settings_of(text: str) -> dict[str, Any]:
    preset = preset_of(Arguments(given=read_arguments(text.split())))
    missing = {name: found.text for name, found in preset.classes.items() if found.kind == "missing"}
    assert missing == {}
    assert reading.problems_of(preset, "x") == []
    return preset.settings


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"layout.num_groups": 8, "train.global_batch_size": 64, "model.activation": "gelu_tanh"}),
        ("", {"model.hidden_dropout": 0.1, "optimizer.beta2": 0.999, "optimizer.decay_style": "linear"}),
        ("", {"model.vocab_size": 1024, "model.tie_embeddings": True, "optimizer.min_learning_rate": 0.0}),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", {"layout.num_groups": 2}),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", {"train.global_batch_size": 64}),
        ("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2", {"spare.redundancy": 1}),
        ("--optimizer adam --muon-nesterov", {"optimizer.kind": "adam", "optimizer.muon_nesterov": None}),
        (
            "--optimizer muon --muon-no-split-qkv --muon-tp-mode duplicated --use-distributed-optimizer",
            {
                "optimizer.kind": "muon",
                "optimizer.sharding": "replicated",
                "optimizer.muon_split_qkv": False,
                "optimizer.muon_tp_mode": "duplicated",
                "optimizer.muon_momentum": 0.9,
            },
        ),
        ("--nnodes 2 --use-distributed-optimizer", {"layout.num_groups": 16, "optimizer.sharding": "stacked"}),
        ("--swiglu --disable-bias-linear", {"model.activation": "swiglu", "model.ffn_hidden_size": 128}),
        (
            "--quick-geglu --glu-linear-offset 1.0",
            {"model.activation": "quick_geglu", "megatron.glu_linear_offset": 1.0},
        ),
        ("--no-bias-gelu-fusion", {"model.activation": "gelu"}),
        ("--disable-bias-linear", {"model.activation": "gelu"}),
        ("--group-query-attention --num-query-groups 2", {"model.num_query_groups": 2}),
        ("--position-embedding-type rope --rotary-base 500000", {"model.rope_base": 500000.0}),
        ("--lr-warmup-fraction 0.01 --lr-decay-iters 3000", {"optimizer.warmup_steps": 30}),
        (  # 64 samples a step from the first on: 10 and 60 whole batches of 64
            "--lr-warmup-iters 10 --lr-decay-iters 60 --rampup-batch-size 16 16 380",
            {"optimizer.warmup_steps": 12 + 4, "optimizer.decay_steps": 12 + 54},
        ),
        (
            "--lr-warmup-fraction 0.1 --lr-decay-iters 100 --rampup-batch-size 16 16 380",
            {"optimizer.warmup_steps": 12 + 4, "optimizer.decay_steps": 12 + 94},
        ),
        (
            "--swiglu --disable-bias-linear --activation-func-clamp-value 7.0 --no-bias-swiglu-fusion",
            {"megatron.activation_func_clamp_value": 7.0},
        ),
        (
            "--swiglu --disable-bias-linear --activation-func-clamp-value 7.0",
            {"megatron.activation_func_clamp_value": None},
        ),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 20", {"optimizer.wsd_decay_steps": 20}),
        ("--exit-interval 40", {"train.steps": 40, "optimizer.decay_steps": 100}),
        ("--eval-interval 10 --eval-iters 3", {"eval.every_steps": 10, "eval.sequences": 192}),
        ("--save c --load c --save-interval 5", {"checkpoint.folder": "c", "checkpoint.keep_every_steps": 5}),
        ("--load c --finetune --no-load-optim --save d", {"checkpoint.load_weights": "c", "checkpoint.folder": "d"}),
        ("--recompute-num-layers 1", {"megatron.recompute_num_layers": None}),
        ("--deterministic-mode", {"reduce.mode": "reproducible"}),
        ("--data-path 3 a 7 b", {"data.blend": [{"corpus": "a", "weight": 3.0}, {"corpus": "b", "weight": 7.0}]}),
        ("--init-method-std 0.01 --apply-layernorm-1p", {"megatron.init_method_std": 0.01}),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            {"layout.virtual_pipeline": 2},
        ),
        (
            "--num-experts 4 --disable-bias-linear --expert-model-parallel-size 2 --moe-router-topk 1",
            {"model.num_experts": 4, "layout.data_parallel": 2, "layout.num_groups": 4},
        ),
    ],
)
def test_arguments_become_the_settings_that_they_mean(more: str, expected: dict[str, Any]) -> None:
    settings = settings_of(f"{GPUS} {LAUNCH} {DATA} {more}")
    assert {key: settings.get(key) for key in expected} == expected


def test_samples_become_steps() -> None:
    launch = LAUNCH.replace("--train-iters 100", "--train-samples 6400 --lr-decay-samples 3200 --lr-warmup-samples 100")
    settings = settings_of(f"{GPUS} {launch} {DATA}")
    found = [settings[f"{key}_steps"] for key in ("optimizer.decay", "optimizer.warmup")]
    assert (settings["train.steps"], *found) == (100, 50, 2)


@pytest.mark.parametrize(("more", "microbatches"), [("", 4), ("--tensor-model-parallel-size 4", 16)])
def test_the_global_batch_has_as_many_microbatches_of_a_group_as_in_megatron(more: str, microbatches: int) -> None:
    config, _ = build_run_config(settings_of(f"{GPUS} {LAUNCH} {DATA} {more}"))
    assert config.spare.microbatches_per_shard == microbatches == 64 // 2 // config.layout.num_groups


def test_a_ramp_in_samples_is_one_in_steps_through_which_other_samples_become_steps() -> None:
    """4 steps of each size but the last read 4 x (16 + 32 + 48) = 384 samples, and further 64 a step."""
    launch = LAUNCH.replace("--train-iters 100", "--train-samples 6400 --lr-decay-samples 3200 --lr-warmup-samples 100")
    words = f"{launch} {DATA} {GPUS} --rampup-batch-size 16 16 380"
    settings = settings_of(words)
    assert settings["train.rampup_batch_size"] == [16, 16, 380]
    config, _ = build_run_config(settings)
    spare = config.spare
    assert (spare.ramp_start, spare.ramp_increment, spare.ramp_steps) == (1, 1, 12)
    found = (config.train.steps, config.optimizer.decay_steps, config.optimizer.warmup_steps)
    assert found == (12 + 6016 // 64, 12 + 2816 // 64, 4 + 2)  # 4 x 16 + 2 x 32 samples are 128, the first 5 read 96
    for samples in range(1, 1000, 7):
        args = Arguments(given=read_arguments(words.replace("6400", str(samples)).split()))
        left, whole = samples / 16, 0
        while left >= spare.ramp.at(whole):
            left -= spare.ramp.at(whole)
            whole += 1
        assert steps_of(args, samples) == pytest.approx(whole + left / spare.ramp.at(whole))
    report = invoke("--", *words.split()).stderr
    assert "train.rampup_batch_size = [16, 16, 380], in stages of equally many steps, 12 together; those of" in report
    assert "and take about 15 steps" in report  # 380 / 3 / 16 + 380 / 3 / 32 + 380 / 3 / 48 = 14.5


@pytest.mark.parametrize(
    ("more", "name", "reason"),
    [
        ("--fp16", "fp16", "model.precision is fp32 or bf16"),
        ("--rampup-batch-size 8 8 1000", "rampup_batch_size", "[8, 8, 1000] does not lead from 8 to the global batch"),
        ("--rampup-batch-size 16 x 1000", "rampup_batch_size", "'16 x 1000' is not three whole numbers"),
        ("--lr-decay-style inverse-square-root", "lr_decay_style", "and by steps here; give a warm-up"),
        ("--rampup-batch-size 16 16", "rampup_batch_size", "it takes three values, not 2"),
        ("--step-batch-size-schedule 0:16", "step_batch_size_schedule", "set train.rampup_batch_size"),
        ("--load other", "load", "spare checkpoint import"),
        ("--load other --no-load-optim --no-load-rng", "no_load_rng", "give --load and --finetune"),
        ("--finetune", "finetune", "give --load and --finetune"),
        ("--made-up 3", "made_up", "it is not known here"),
        ("--global-batch-size 7", "global_batch_size", "7 is no multiple of 16"),
        ("--nproc-per-node gpu", "nproc_per_node", "'gpu' is not a whole number"),
        ("--bf16 true", "bf16", "it takes no value"),
        ("--data-path a b", "data_path", "give each a weight"),
        ("--optimizer sgd", "optimizer", "sgd is not had here; choose adam or muon"),
        ("--muon-scalar-optimizer lion", "muon_scalar_optimizer", "Adam, and Muon beside Adam"),
        ("--multi-latent-attention", "multi_latent_attention", "set it in [megatron]"),
        ("--pipeline-model-parallel-size 3", "nproc_per_node", "8 GPUs are no multiple of 3"),
    ],
)
def test_what_is_not_had_here_is_named_with_what_to_do(more: str, name: str, reason: str) -> None:
    preset = preset_of(Arguments(given=read_arguments(f"{GPUS} {LAUNCH} {DATA} {more}".split())))
    assert preset.classes[name].kind == "missing"
    assert reason in preset.classes[name].text


def test_every_argument_has_one_class_and_every_taken_one_sets_something() -> None:
    preset = preset_of(Arguments(given=read_arguments(f"{GPUS} {LAUNCH} {DATA} --log-interval 1".split())))
    set_by = {name for names in preset.sources.values() for name in names}
    assert preset.classes.keys() == read_arguments(f"{GPUS} {LAUNCH} {DATA} --log-interval 1".split()).keys()
    assert {name for name, found in preset.classes.items() if found.kind == "taken"} <= set_by


# ---------------------------------------------------------------------------------------------- the command itself


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["convert", *words])


def test_the_command_writes_a_preset_and_reports_each_argument(tmp_path: Path) -> None:
    (file := tmp_path / "my launch.sh").write_text(f"export A=1\ntorchrun {GPUS} pretrain_gpt.py {LAUNCH} {DATA}\n")
    result = invoke(str(file), "-o", str(tmp_path / "mine.toml"), "--", "--log-interval", "5")
    assert (result.exit_code, result.stdout) == (0, "")
    table = parsed_toml((tmp_path / "mine.toml").read_text())
    assert (table["name"], table["model"]["num_layers"]) == ("my-launch", 4)
    for text in (
        "--num-layers 4: model.num_layers = 4",
        "--log-interval 5: `metrics.jsonl`",
        "optimizer.beta2 = 0.999",
    ):
        assert text in result.stderr
    assert "A=1: of the environment" in result.stderr


def test_the_report_names_what_is_rounded_to_whole_steps() -> None:
    result = invoke("--", *f"{LAUNCH} {DATA} {GPUS} --lr-decay-iters 43 --lr-warmup-fraction 0.1".split())
    assert "--lr-warmup-fraction 0.1: optimizer.warmup_steps = 5, rounded from 4.3 steps" in result.stderr
    exact = invoke("--", *f"{LAUNCH} {DATA} {GPUS} --lr-decay-iters 40 --lr-warmup-fraction 0.1".split())
    assert "--lr-warmup-fraction 0.1: optimizer.warmup_steps = 4\n" in exact.stderr


def test_an_argument_behind_the_dashes_replaces_the_output_of_a_command(tmp_path: Path) -> None:
    (file := tmp_path / "launch.sh").write_text(f"torchrun {GPUS} pretrain_gpt.py {LAUNCH} {DATA} --save $(pwd)/c\n")
    assert invoke(str(file)).exit_code == 2
    result = invoke(str(file), "--", "--save", "/c")
    assert (result.exit_code, parsed_toml(result.stdout)["checkpoint"]["folder"]) == (0, "/c")


@pytest.mark.parametrize("more", ["", "--calculate-per-token-loss"])
def test_the_report_names_another_divisor_of_the_loss(more: str) -> None:
    report = invoke("--", *f"{LAUNCH} {DATA} {GPUS} --eod-mask-loss {more}".split()).stderr
    setting = "--eod-mask-loss: data.eod_mask_loss = True"
    assert f"{setting}\n" in report if more else f"{setting}, and the loss is divided by the tokens that" in report


def test_the_report_names_what_megatron_does_not_do() -> None:
    words = "--reset-attention-mask --tokenizer-type NullTokenizer --swiglu --activation-func-clamp-value 7.0"
    report = invoke("--", *f"{LAUNCH} {DATA} {GPUS} {words} --disable-bias-linear".split()).stderr
    assert "data.reset_attention_mask = True, and attention stays within documents; Megatron's layers of" in report
    assert "--activation-func-clamp-value 7.0: fused swiglu ignores it" in report
    assert "up to 0.16 its NullTokenizer has one token more" in report


def test_the_command_refuses_what_is_not_had_here_unless_it_is_left_out() -> None:
    words = ["--", *GPUS.split(), *LAUNCH.split(), *DATA.split(), "--made-up", "3"]
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    reasons = ("it is not known here", "the installed Megatron has no such argument")
    assert any(f"--made-up 3: {reason}" in result.stderr for reason in reasons)
    assert invoke("--without", "--made-up", *words).exit_code == 0
    result = invoke("--without", "--other", *words)
    assert (result.exit_code, "the launch does not have it" in result.stderr) == (2, True)


def test_the_command_prints_why_a_preset_cannot_run() -> None:
    result = invoke(
        "--", *GPUS.split(), *LAUNCH.split(), *DATA.split(), "--num-attention-heads", "3", "--kv-channels", "16"
    )
    assert result.exit_code == 2
    assert "model.hidden_size=64 is not a multiple of model.num_attention_heads=3" in result.stderr


# ---------------------------------------------------------------------------------------------- Megatron's own parser


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("megatron.training comes with megatron-core 0.19 and later")

    class Absent(ModuleType):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(name, Absent(name))
    found, how = reading.own_parser()
    assert found is not None, how
    return found


def test_the_table_has_the_types_and_defaults_of_megatrons_parser(parser: argparse.ArgumentParser) -> None:
    actions = {reading.name_of(flag): action for action in parser._actions for flag in action.option_strings}
    for name, row in TAKEN.items():
        if name in reading.OF_LAUNCHER:
            continue
        action = actions[name]
        if row.kind == "flag":
            assert action.nargs == 0, name
        elif row.kind in ("words", "three whole numbers"):
            assert action.nargs == {"words": "*"}.get(row.kind, 3), name
        elif row.kind in ("a whole number", "a number"):
            assert (action.nargs, action.type) == (None, {"a whole number": int, "a number": float}[row.kind]), name
        if row.kind != "flag":
            assert Arguments(given={})[name] == Arguments(given={}, defaults={name: action.default})[name], name


def test_values_are_those_of_megatrons_parser(parser: argparse.ArgumentParser) -> None:
    actions = {reading.name_of(flag): (flag, action) for action in parser._actions for flag in action.option_strings}
    generator = random.Random(1)
    kinds = {"a whole number": lambda: str(generator.randint(1, 99)), "a number": lambda: f"{generator.random():.4g}"}
    names = [name for name, row in TAKEN.items() if name in actions and (row.kind in kinds or row.kind == "flag")]
    for _ in range(50):
        chosen = generator.sample(names, 20)
        given = {name: () if TAKEN[name].kind == "flag" else (kinds[TAKEN[name].kind](),) for name in chosen}
        args = Arguments(given=given)
        namespace = parser.parse_args([word for name in chosen for word in (actions[name][0], *given[name])])
        for name in chosen:
            value = getattr(namespace, actions[name][1].dest)
            assert args[name] == (value if actions[name][1].const is not False else not value), name


def test_an_argument_that_megatron_has_and_the_table_lacks_is_named(parser: argparse.ArgumentParser) -> None:
    flags = {reading.name_of(flag) for action in parser._actions for flag in action.option_strings}
    for name in sorted(flags - {"help"}):
        found = class_of(name, Arguments(given={name: ("7",)}))
        assert found.kind in ("taken", "implied", "without effect", "missing")
        assert found.text
