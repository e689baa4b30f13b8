"""`spare plan`: its figures, its files, and what it says about bad input."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spare_megatron.cli.config import fitting_machine
from spare_megatron.cli.preset import load_without_problems
from spare_megatron.commands import app
from spare_megatron.config.loader import load_run_config
from spare_megatron.tools.plan.partition_redundancy import update_share

EXAMPLE = ["--groups", "600", "--mtbf", "300s", "--restart", "60m", "--save", "60s"]


def spare_plan(*options: str) -> Any:
    return CliRunner().invoke(app, ["plan", *options])


def figures(*options: str) -> dict[str, Any]:
    result = spare_plan(*EXAMPLE, "--json", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout, parse_constant=pytest.fail)  # Infinity and NaN are no JSON
    assert isinstance(found, dict)
    return found


def test_the_example_has_a_plan_near_the_published_simulation() -> None:
    found = figures()
    assert found["policy"] == "stack"
    assert found["redundancy"] in (8, 9, 10)
    assert found["time_to_train_ratio"] == pytest.approx(2.49, rel=0.03)
    assert found["availability"] == pytest.approx(0.939, abs=0.03)
    assert found["endured_losses"] == pytest.approx(255, rel=0.02)
    assert found["cadence_s"] == pytest.approx(3057, rel=0.02)
    assert found["closed_form_redundancy"] == 10


def test_the_table_reads_like_times_of_day(tmp_path: Path) -> None:
    result = spare_plan(*EXAMPLE, "--shard-size", "64MiB", "--memory", "2GB", "--read-rate", "1GB/s")
    assert result.exit_code == 0, result.output
    for text in ("1 h, 1 min", "537 MB of 2 GB per group", "1 min 4 s (assumed)", "stack", "microbatch"):
        assert text in result.output
    assert re.search(r"save every +50 min \d+ s", result.output)


def test_state_partitions_get_more_hosts_where_copies_take_longer() -> None:
    quick, slow = figures("--slice-copy", "10s")["slices"], figures("--slice-copy", "2h")["slices"]
    assert quick["copy_s"] == 10.0
    assert 1 < quick["redundancy"] < slow["redundancy"]
    assert quick["time_to_wipe_out_s"] > quick["time_to_wipe_out_without_copies_s"]
    assert figures("--groups", "2", "--redundancy", "2", "--mtbf", "10d")["slices"]["redundancy"] <= 2
    table = spare_plan(*EXAMPLE).output
    assert re.search(r"redundancy +\d hosts per partition", table)
    assert "if a copy of a partition takes 1 min (assumed)" in table


def test_facts_choose_the_policy() -> None:
    assert figures("--microbatches", "16")["policy"] == "microbatch"
    assert figures("--repair", "10m")["policy"] == "rejoin"
    assert figures("--repair", "10m", "--policy", "stack")["policy"] == "stack"
    assert set(figures("--repair", "10m")["alternatives"]) == {"stack", "microbatch", "rejoin"}


def test_re_forming_is_planned_and_set_beside_what_training_takes_without() -> None:
    flags = ("--reform", "60s", "--machines-per-group", "125", "--microbatches", "64", "--join", "1s", "--save", "1.5s")
    found = figures(*flags)
    assert (found["policy"], set(found["alternatives"])) == ("reform", {"stack", "microbatch", "reform"})
    assert found["time_to_train_ratio"] < 1.05 < 1.25 < found["alternatives"]["microbatch"]["time_to_train_ratio"]
    assert found["facts"]["reform"]["run_s"] == 10_000 * (64.0 + 6.0)
    assert "steps" in found["assumed"]
    ratios = [
        figures(*flags, "--redundancy", "8", *more)["time_to_train_ratio"]
        for more in ([], ["--steps", "1000"], ["--repair", "10m"])
    ]
    assert ratios[0] > ratios[1], "fewer machines are lost in a shorter run"
    assert ratios[0] > ratios[2]
    table = spare_plan(*EXAMPLE, *flags).output
    assert re.search(r"re-forming is worth +0\.\d\d of it: 1\.\d\d x without", table)


def test_smaller_groups_are_set_beside_whole_ones_and_a_spare_machine(tmp_path: Path) -> None:
    """A spare machine is 1 of 33 more with 8 groups of 4, and 1 of 513 with 64 of 8."""
    times = ("--restart", "20m", "--save", "5s", "--reform", "60s", "--join", "1s", "--step", "10s", "--reduce", "1s")
    failures = ("--node-mtbf", "1y", "--gpus-per-node", "8", "--repair", "24h", "--redundancy", "3")
    small = ("--groups", "8", "--gpus-per-group", "32", "--machines-per-group", "4", "--least-machines", "3")
    large = ("--groups", "64", "--gpus-per-group", "64", "--machines-per-group", "8", "--least-machines", "7")
    found = json.loads(spare_plan("--json", *times, *failures, *small).stdout)
    whole, spared = (one["time_to_train_ratio"] for one in found["without_smaller_groups"])
    assert 1.0 < spared < found["time_to_train_ratio"] < whole - 0.002
    output = spare_plan(*times, *failures, *small).output
    assert re.search(r"machines per group +4, at least 3", output)
    assert "One more spare machine is not the better answer here: 1.031 x in machine hours." in output
    output = spare_plan(*times, *failures, *large).output
    assert "One more spare machine is the better answer here: 1.009 x in machine hours." in output
    assert "without_smaller_groups" not in spare_plan("--json", *times, *failures, *small[:-1], "4").stdout
    preset = tmp_path / "run.toml"
    preset.write_text("[layout]\nnum_groups = 8\npipeline_parallel = 8\nleast_pipeline_parallel = 5\n")
    given = ("--preset", str(preset), *times, "--mtbf", "30h", "--machines-per-group", "4")
    assert json.loads(spare_plan("--json", *given).stdout)["facts"]["reform"]["least_machines"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--redundancy", "1"), r"audits +none: they need 2 hosts per shard, or data that all groups read"),
        (("--redundancy", "2"), r"audits every +7 steps: 0\.9% of a step more.*a mismatch +may halt the run"),
        (("--redundancy", "3"), r"they find +lasting faults of a group within 7 steps, 0\.9% of those in one micro"),
    ],
)
def test_audits_are_planned_where_another_group_can_compute(options: tuple[str, str], message: str) -> None:
    options = ("--microbatches", "16", *options)
    table = spare_plan(*EXAMPLE, *options).output
    assert re.search(message, table, re.DOTALL), table
    audits = figures(*options)["audits"]
    assert audits is None if options[-1] == "1" else audits["every_steps"] == 7
    assert ("may halt" in table) == (options[-1] == "2")


def test_every_policy_has_its_figures_in_one_place() -> None:
    """Both `stack` as in the paper and what `spare train` does are shown, whichever is asked for."""
    contract = {"redundancy", "cadence_s", "endured_losses", "time_to_train_ratio", "availability"}
    for options in ([], ["--microbatches", "16"], ["--repair", "10m"]):
        found = figures(*options)
        for name in ("stack", "microbatch"):
            assert contract <= set(found["alternatives"][name])
        own = found["alternatives"][found["policy"]]
        assert {key: own[key] for key in contract} == {key: found[key] for key in contract}
        assert found["alternatives"]["stack"]["redundancy"] == figures()["redundancy"]


def test_fewer_hosts_are_named_where_training_hardly_takes_longer() -> None:
    found = figures("--repair", "10m", "--microbatches", "16")
    assert found["frugal"]["redundancy"] < found["redundancy"]
    assert 1 < found["frugal"]["time_to_train_ratio"] / found["time_to_train_ratio"] <= 1.02


def test_pauses_spares_domains_and_a_last_resort_change_the_plan() -> None:
    repair = ("--repair", "10m", "--redundancy", "8")
    ratios = [
        figures(*repair, *options)["time_to_train_ratio"]
        for options in (
            [],
            ["--join", "30s"],
            ["--join", "30s", "--transfer", "10m"],
            ["--join", "30s", "--transfer", "10m", "--spares", "6"],
        )
    ]
    assert ratios[0] < ratios[1] < ratios[2] > ratios[3]
    assert ratios[1] == pytest.approx(1.156, abs=0.005)
    racks = ("--groups-per-domain", "4", "--domain-mtbf", "1h", "--groups", "100")
    with_racks, without = figures(*racks, "--redundancy", "8"), figures("--groups", "100", "--redundancy", "8")
    assert with_racks["time_to_wipe_out_s"] < without["time_to_wipe_out_s"]
    assert with_racks["time_to_train_ratio"] > without["time_to_train_ratio"]
    found = figures("--last-resort", "--fetch", "1s", "--repair", "10m")
    assert (found["policy"], set(found["alternatives"])) == ("rejoin", {"microbatch", "rejoin"})
    assert figures("--groups", "1", "--last-resort")["audits"] is None, "there is no other group"
    assert found["facts"]["last_resort"]


def test_slow_groups_are_set_beside_what_they_cost_with_work_dealt_by_pace() -> None:
    options = ("--groups", "200", "--microbatches", "16", "--slow-every", "111h", "--slow-for", "2h")
    found = figures(*options)
    assert found["slow"]["even_ratio"] == pytest.approx(1.92, abs=0.01)
    assert found["slow"]["dealt_ratio"] == pytest.approx(1.16, abs=0.01)
    assert figures(*options, "--slow-factor", "1")["slow"]["even_ratio"] == 1.0
    assert "1.92 x that without, and 1.16 x with work dealt by pace" in spare_plan(*EXAMPLE, *options).stdout
    assert "slow" not in figures()
    replaced = (*options, "--groups", "40", "--repair", "10m", "--join", "1s", "--spares", "1")
    assert 1.0 < figures(*replaced)["slow"]["replaced_ratio"] < figures(*replaced)["slow"]["dealt_ratio"]
    assert "x, one at a time" in spare_plan(*EXAMPLE, *replaced).stdout
    assert figures(*replaced, "--slow-factor", "1")["slow"]["replaced_ratio"] is None
    reformed = (*options, "--groups", "40", "--reform", "60s", "--machines-per-group", "2", "--join", "1s")
    alike = figures(*reformed, "--spares", "1")["slow"]["replaced_ratio"]
    assert alike == figures(*replaced)["slow"]["replaced_ratio"]


def test_the_table_shows_the_assumptions_of_a_plan() -> None:
    options = ["--repair", "10m", "--join", "30s", "--groups", "100", "--redundancy", "5"]
    result = spare_plan(*EXAMPLE, *options, "--groups-per-domain", "4", "--domain-mtbf", "7d")
    assert result.exit_code == 0, result.output
    for text in (
        "lost hardware is repaired after",
        "0 ms, 30 s",
        "groups in a domain",
        "a domain is lost every",
        "7 d",
    ):
        assert text in result.output
    assert "(assumed)" in next(line for line in result.output.splitlines() if "compute of one shard" in line)
    result = spare_plan(*EXAMPLE, "--repair", "10m", "--last-resort", "--fetch", "2s")
    assert "any group, data there after 2 s" in result.output


def test_a_rate_per_node_and_day_says_the_same_as_a_time_between_losses() -> None:
    # 600 groups of 2 nodes, 288 losses per day.
    options = ["--groups", "600", "--restart", "60m", "--save", "60s", "--json", "--gpus-per-group", "16"]
    result = spare_plan(*options, "--gpus-per-node", "8", "--failures-per-node-day", "0.24")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == figures()


@pytest.mark.parametrize(
    ("words", "absence_s"),
    [
        (["--repair", "10m", "--transfer", "5s"], 605.0),
        (["--repair", "10m", "--reform", "1m", "--machines-per-group", "4", "--transfer", "5s"], 65.0),
    ],
)
def test_a_plan_with_returns_says_when_groups_are_expected_back(words: list[str], absence_s: float) -> None:
    times = ("--groups", "8", "--mtbf", "1h", "--restart", "20m", "--save", "30s", "--microbatches", "16")
    result = spare_plan(*times, *words, "--redundancy", "3", "--json")
    assert result.exit_code == 0, result.output
    settings = json.loads(result.output)["settings"]
    assert settings["checkpoint.group_absence_s"] == pytest.approx(absence_s)


def test_a_preset_says_what_a_group_is_and_the_plan_what_to_set() -> None:
    """Groups of 32 GPUs: 4 nodes of 8, one of which fails every half year."""
    times = ("--restart", "20m", "--save", "30s", "--node-mtbf", "2y", "--json")
    result = spare_plan("--preset", "llama3_70b_h100", "--nodes", "513", *times)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["facts"]["num_groups"] == 128
    assert found["facts"]["last_resort"]
    assert found["facts"]["times"]["loss_interval_s"] == pytest.approx(2 * 365.25 * 86400 / 512)
    assert found["settings"] == {
        "layout.num_groups": 128,
        "spare.redundancy": found["redundancy"],
        "spare.microbatches_per_shard": 64,
        "checkpoint.cadence": "optimal",
        "checkpoint.group_life_s": round(2 * 365.25 * 86400 / 4),
        "cluster.num_nodes": 512,
    }
    alike = spare_plan(
        "--groups", "128", "--gpus-per-node", "8", "--gpus-per-group", "32", "--microbatches", "64", *times
    )
    assert json.loads(alike.output)["settings"].keys() == found["settings"].keys() - {"cluster.num_nodes"}
    small = spare_plan("--preset", "llama3_70b_h100", "--nodes", "3", *times)
    assert small.exit_code == 2
    assert "--nodes 3: 8 GPUs of each do not make a group of 32" in small.stderr
    own = json.loads(spare_plan("--preset", "llama3_70b_h100", *times).output)
    assert own["facts"]["num_groups"] == 8
    shown = spare_plan(*EXAMPLE, "--microbatches", "16").output
    assert "spare train PRESET --set layout.num_groups=600 --set spare.redundancy=" in shown
    assert "--set data.access=shared" in spare_plan(*EXAMPLE, "--last-resort").output
    assert "--set spare.granularity=stack" in spare_plan(*EXAMPLE).output
    assert "--set spare.granularity=stack" not in shown


def test_the_lanes_of_a_wide_group_compute_side_by_side() -> None:
    times = ("--restart", "20m", "--save", "30s", "--mtbf", "1h", "--preset", "llama3_70b_wide_h100")
    assert json.loads(spare_plan(*times, "--json").output)["facts"]["num_microbatches"] == 16
    assert re.search(r"microbatches per shard +16 for each of 4 lanes", spare_plan(*times).output)


DOMAINS = "--groups-per-domain 2 --domain-mtbf 10d"


@pytest.mark.parametrize(
    ("preset", "options", "expected"),
    [
        ("llama3_70b_h100", "--nodes 512 --node-mtbf 2y", {"cluster.num_nodes": 512}),
        ("llama3_70b_h100", "--groups 16 --mtbf 1h", {"cluster.num_nodes": 64}),
        ("llama3_70b_h100", "--groups 1 --mtbf 1h", {"optimizer.redundancy": 1}),
        ("llama3_70b_h100", "--mtbf 1h --policy stack", {"spare.granularity": "stack", "data.access": "stacked"}),
        ("gpt_1p3b_node", "--mtbf 1h --last-resort", {"data.access": "shared", "cluster.num_nodes": None}),
        ("tp4.toml", "--node-mtbf 2y --gpus-per-node 4", {"slurm.gpus_per_node": 4, "cluster.num_nodes": 64}),
        (
            "gpt_1p3b_node",
            f"--mtbf 1h {DOMAINS}",
            {"spare.groups_per_domain": 2, "checkpoint.group_life_s": round(8 / (1 / 3600 + 2 / 864_000))},
        ),
        ("campaign_nodes_cpu", "--mtbf 1h --groups 16", {"cluster.num_nodes": 8}),
        ("llama3_70b_wide_h100", "--mtbf 1h", {"spare.microbatches_per_shard": 64}),
        ("llama3_70b_wide_h100", "--mtbf 1h --microbatches 96", {"spare.microbatches_per_shard": 96}),
    ],
)
def test_the_settings_of_a_plan_run_and_are_the_plan(
    preset: str, options: str, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tp4.toml").write_text('include = ["llama3_70b_h100"]\n[layout]\ntensor_parallel = 4\npipeline_parallel = 8\n')
    times = ("--restart", "20m", "--save", "30s", "--json")
    result = spare_plan("--preset", preset, *options.split(), *times)
    assert result.exit_code == 0, result.output
    settings = json.loads(result.output)["settings"]
    assert {name: settings.get(name) for name in expected} == expected
    overrides = [f"{name}={value}" for name, value in settings.items()]
    load_without_problems(Path(preset), [*overrides, "data.corpus=any"], fitting_machine)


def test_what_adam_costs_in_every_group_is_said_where_partitions_or_lanes_would_pay() -> None:
    """1.3B parameters move 39 GB, in 10 ms at 4 TB/s; a step of 8 microbatches takes 661 ms on an H200."""
    times = ("--restart", "20m", "--save", "30s", "--mtbf", "1h", "--preset", "gpt_1p3b_node", "--groups", "8")
    step = ("--step", "0.65s", "--reduce", "0.011s")
    shown = " ".join(spare_plan(*times, *step).output.split())
    assert "Adam takes an estimated 1.5% of a step in every group: optimizer.sharding=stacked saves 0.9%" in shown
    assert json.loads(spare_plan(*times, *step, "--json").output)["update_share"] == pytest.approx(0.0149, abs=3e-4)
    for others in (("--step", "2s"), ()):
        assert "Adam" not in spare_plan(*times, *others).output
    config = load_run_config(Path("gpt_1p3b_node")).config
    for changed in (
        replace(config, optimizer=replace(config.optimizer, sharding="stacked")),
        replace(config, layout=replace(config.layout, data_parallel=2)),
        replace(config, cluster=replace(config.cluster, device="cpu")),
    ):
        assert update_share(changed, 1.0) is None


def test_limits_and_a_fixed_redundancy_are_kept() -> None:
    assert figures("--redundancy", "3")["redundancy"] == 3
    found = figures("--shard-size", "100MB", "--memory", "450MB")
    assert (found["redundancy"], found["stack_bytes"]) == (4, 400_000_000)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    result = spare_plan(*EXAMPLE, "--repair", "10m", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plan_is_printed_even_if_the_plot_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "full.png"
    path.symlink_to("/dev/full")
    result = spare_plan(*EXAMPLE, "--plot", str(path))
    assert result.exit_code == 2
    assert "redundancy" in result.stdout
    assert "spare plan: [Errno 28] No space left on device" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mtbf -3s", "--mtbf -3s: a duration here has to be above 0"),
        ("--mtbf 0s", "--mtbf 0s: a duration here has to be above 0"),
        ("--mtbf 300", "--mtbf 300: no unit; known units are ms, s, m, min, h, d"),
        ("--mtbf 3weeks", "--mtbf 3weeks: unknown unit 'weeks'; known units are"),
        ("--mtbf soon", "--mtbf soon: not a duration"),
        ("--mtbf 1h-5m", "--mtbf 1h-5m: not a duration"),
        ("--mtbf 300s --restart -1s", "--restart -1s: a duration here has to be 0 or more"),
        ("--mtbf 300s --save 0s", "--save 0s: a duration here has to be above 0"),
        ("", "give --mtbf, as in 300s, --node-mtbf or --failures-per-node-day"),
        ("--mtbf 300s --failures-per-node-day 1", "both say how often groups are lost; give one"),
        (
            "--mtbf 300s --gpus-per-node 8",
            "--gpus-per-node 8 belongs to --failures-per-node-day or --node-mtbf, not",
        ),
        ("--failures-per-node-day 0", "--failures-per-node-day 0.0 has to be above 0"),
        ("--failures-per-node-day 1", "--gpus-per-node is missing; --failures-per-node-day needs it"),
        ("--node-mtbf 2y", "--gpus-per-node is missing; --node-mtbf needs it to count the nodes of a group"),
        ("--node-mtbf 2y --mtbf 1h", "--mtbf 1h and --node-mtbf 2y both say how often groups are lost"),
        ("--nodes 4 --mtbf 1h", "--nodes 4 needs --preset"),
        ("--nodes 4 --mtbf 1h --preset llama3_70b_h100", "--groups 600 and --nodes 4 both say how many groups"),
        ("--mtbf 1h --preset llama3_70", "no preset is named llama3_70"),
        ("--mtbf 1h --preset llama3_70b_h100 --microbatches 0", "--microbatches 0 is below 1"),
        ("--node-mtbf 2y --preset llama3_70b_h100 --gpus-per-node 0", "--gpus-per-node 0 is below 1"),
        ("--failures-per-node-day 1 --gpus-per-node 8 --gpus-per-group 0", "--gpus-per-group 0 is below 1"),
        ("--mtbf 300s --redundancy 601", "--redundancy 601 has to be from 1 to 600 (--groups)"),
        ("--mtbf 300s --slice-copy 0s", "--slice-copy 0s: a duration here has to be above 0"),
        ("--mtbf 300s --slow-for 2h", "--slow-for and --slow-factor need --slow-every"),
        ("--mtbf 300s --slow-every 3d --slow-factor 0.5", "--slow-factor 0.5 has to be 1 or more"),
        ("--mtbf 300s --redundancy 0", "--redundancy 0 has to be from 1 to 600 (--groups)"),
        ("--mtbf 300s --groups 0", "--groups 0 is below 1"),
        ("--mtbf 300s --groups 10000001", "--groups 10000001: at most 10000000 groups are planned for"),
        (
            "--mtbf 300s --groups 75000 --groups-per-domain 8 --domain-mtbf 30d",
            "--groups 75000 in 9375 domains (--groups-per-domain 8): groups x domains may be 8000000 at most",
        ),
        ("--mtbf 300s --microbatches 0", "--microbatches 0 is below 1"),
        ("--mtbf 300s --policy other", "--policy other is unknown; known: stack, microbatch, rejoin, reform"),
        ("--mtbf 300s --policy reform", "--policy reform needs --reform"),
        ("--mtbf 300s --reform 60s", "--reform 60s needs --machines-per-group"),
        ("--mtbf 300s --machines-per-group 4", "--machines-per-group 4 needs --reform"),
        ("--mtbf 300s --steps 4", "--steps 4 needs --reform"),
        ("--mtbf 300s --least-machines 4", "--least-machines 4 needs --reform"),
        ("--mtbf 300s --reform 60s --machines-per-group 4 --least-machines 5", "least_machines=5 from 1 to that"),
        ("--mtbf 1h --reform 60s --machines-per-group 4 --least-machines 0 --preset demo_cpu", "least_machines=0 from"),
        ("--mtbf 300s --reform 60s --machines-per-group 0", "--machines-per-group 0 is below 1"),
        ("--mtbf 300s --reform 60s --machines-per-group 4 --spares -1", "--spares -1 is below 0"),
        (
            "--mtbf 300s --reform 60s --machines-per-group 4 --groups-per-domain 4 --domain-mtbf 30d",
            "re-forming is planned with domains of 4 groups where all groups can read all data",
        ),
        ("--mtbf 300s --policy rejoin", "--policy rejoin needs --repair"),
        ("--mtbf 300s --join 30s", "--join 30s needs --repair"),
        ("--mtbf 300s --spares 2", "--spares 2 needs --repair"),
        ("--mtbf 300s --repair 10m --spares -1", "--spares -1 is below 0"),
        ("--mtbf 300s --repair 10m --join -3s", "--join -3s: a duration here has to be 0 or more"),
        ("--mtbf 300s --repair -10m", "--repair -10m: a duration here has to be above 0"),
        ("--mtbf 300s --groups-per-domain 4", "give --domain-mtbf, as in 30d"),
        ("--mtbf 300s --domain-mtbf 30d", "give --groups-per-domain, as in 4"),
        ("--mtbf 300s --groups-per-domain 601 --domain-mtbf 30d", "--groups-per-domain 601 has to be from 1 to 600"),
        ("--mtbf 300s --groups-per-domain 4 --domain-mtbf 0d", "--domain-mtbf 0d: a duration here has to be above 0"),
        (
            "--mtbf 300s --repair 10m --spares 2 --groups-per-domain 4 --domain-mtbf 30d",
            "--spares 2 plans for groups that are lost one by one",
        ),
        ("--mtbf 300s --fetch 1s", "--fetch 1s needs --last-resort"),
        ("--mtbf 300s --last-resort --policy stack", "--policy stack moves whole shards"),
        ("--mtbf nans", "--mtbf nans: not a duration"),
        ("--mtbf 1e400s", "--mtbf 1e400s: a duration here has to be above 0"),
        ("--mtbf 300s --save 1parsec", "--save 1parsec: unknown unit 'parsec'"),
        ("--mtbf 300s --memory 1GB", "--memory 1GB limits nothing without --shard-size"),
        ("--mtbf 300s --shard-size 5lb", "--shard-size 5lb: unknown unit 'lb'"),
        ("--mtbf 300s --shard-size 0GB", "--shard-size 0GB: a size has to be 1B or more"),
        ("--mtbf 300s --shard-size 2GB --memory 1GB", "shards of 2GB allow at most 0 with --memory 1GB"),
        ("--mtbf 300s --shard-size 1GB --memory 4GB --redundancy 5", "--redundancy 5: shards of 1GB allow at most 4"),
        ("--mtbf 1ms", "a step of 1 min 10 s and a save of 1 min rarely complete"),
        ("--mtbf 300s --save 30d", "a save of 30 d rarely complete"),
        ("--mtbf 300s --plot plan.pdf", "--plot plan.pdf: the name has to end with .png"),
        ("--mtbf 300s --plot missing/plan.png", "missing/plan.png"),
    ],
)
def test_bad_input_gets_one_line(options: str, message: str) -> None:
    base = ["--groups", "600", "--restart", "60m", "--save", "60s"]
    result = spare_plan(*base, *options.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'megatron'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from spare_megatron.commands import app\n"
        f"app({['plan', *EXAMPLE, '--plot', str(tmp_path / 'a.png'), '--json']!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["redundancy"] == 8


def test_outer_steps_cost_what_their_numbers_take_on_the_link() -> None:
    """Two sites of 7 billion parameters and 10 Gbit/s: the 22 s, 5.6 s and 2.8 s of a simple division."""
    options = ("--preset", "gpt_7b_h100", "--mtbf", "5h", "--restart", "20m", "--save", "30s", "--step", "10s")
    result = spare_plan(*options, "--sites", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["sites"]
    seconds = {int(bits): one["seconds"] for bits, one in found["exchange"].items()}
    scale = found["num_parameters"] / 7e9
    assert seconds == pytest.approx({32: 22.4 * scale, 8: 5.6 * scale * 65 / 64, 4: 2.8 * scale * 33 / 32})
    assert found["lost_s"] == pytest.approx(100 * found["step_s"] / 4)
    text = spare_plan(*options, "--sites", "3", "--site-link", "100").output
    assert "every 100 steps between 3 sites" in text
    for wrong in (("--sites", "1"), ("--sites", "2", "--site-link", "0"), ("--site-link", "5")):
        assert spare_plan(*options, *wrong).exit_code == 2
    assert spare_plan(*EXAMPLE, "--sites", "2").exit_code == 2
