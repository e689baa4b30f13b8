"""docs/from_megatron.md is made of the converter's table: `python -m tests.unit.test_from_megatron` writes it."""

from collections.abc import Iterator
from pathlib import Path

from spare_megatron.tools.convert.arguments import IMPLIED, MISSING, TAKEN, WITHOUT_EFFECT

PAGE = Path(__file__).parents[2] / "docs/from_megatron.md"

HEAD = """# From Megatron-LM

`spare convert` makes a preset of a launch of Megatron-LM's `pretrain_gpt.py`: a shell script, which is read and never
executed, a YAML of arguments as Megatron-LM's functional tests have, or a file of arguments.

```
spare convert launch.sh --define DATA=/data -o mine.toml -- --vocab-size 50257
spare config check PRESET --elsewhere
```

The report on stderr names what became of every given argument, and what is set because Megatron's default differs from
the one here. Arguments that are not had here stop it, unless `--without` leaves them out. Variables that only running
the script would show, those that it sets behind `&&` or `||` among them, are given by `--define`, `$1` as `--define
1=VALUE`; behind `--` GPUs and the size of the vocabulary, where the launch does not have them, and arguments whose
values are the output of a command.

- A group is a data-parallel replica: GPUs / (TP x PP x CP), divided by the lanes that share experts. A shard has
  `train.global_batch_size` / (groups x micro batch) microbatches.
- The vocabulary is padded as in Megatron, whose softmax has the padding, too.
- Arguments in samples become steps; what does not fill a step counts as one.
- With `--eod-mask-loss` the loss is divided by the tokens that count in the whole step, as Megatron does with
  `--calculate-per-token-loss`; without that it divides each microbatch by its own: the report names the difference.
- Warm-up and decay keep their samples: Megatron's schedule counts each iteration as a whole batch, also while a ramp
  reads smaller ones, so that with a ramp they take more steps here than `--lr-warmup-iters` and `--lr-decay-iters` say.
- `--rampup-batch-size` becomes a ramp that reads as many samples in stages of equally many steps, where Megatron's have
  equally many samples: the report names the steps of both ([a batch that grows](models.md#a-batch-that-grows)).
- Of a checkpoint that is loaded with `--finetune` only weights count: `spare checkpoint import` it, and set
  `checkpoint.load_weights` to what that wrote.
- Defaults that choose kernels, overlaps or files alone are those of spare.

The tables are made of `spare_megatron/tools/convert/arguments.toml`. Other arguments that are fields of megatron-core's
TransformerConfig are fields of `[megatron]` ([which](models.md#fields-of-megatron)).
"""


def _flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def page() -> str:
    return "\n".join([HEAD, *_rows()]) + "\n"


def _rows() -> Iterator[str]:
    yield from ("## Taken over", "", "| argument | Megatron's default | setting |", "| --- | --- | --- |")
    for name, row in TAKEN.items():
        default = "off" if row.default is False else "none" if row.default is None else row.default
        yield f"| {_flag(name)} | {default} | `{row.setting.replace(' or ', '` or `')}` |"
    yield from ("", "## What always holds here", "", "| argument | reason |", "| --- | --- |")
    yield from (f"| {_flag(name)} | {reason} |" for name, reason in IMPLIED.items())
    for title, patterns in (("Without effect on what is trained", WITHOUT_EFFECT), ("Not had here", MISSING)):
        yield from ("", f"## {title}", "", "| arguments, as patterns | reason, or what to do |", "| --- | --- |")
        for pattern, reason in patterns:
            names = ", ".join(f"`{one}`" for one in _alternatives(pattern.pattern))
            yield f"| {names} | {reason} |"


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a pattern, outside its parentheses; a bar would end a cell of the table."""
    depth, start = 0, 0
    for index, sign in enumerate(f"{pattern}|"):
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and not depth:
            yield pattern[start:index].replace("|", "\\|")
            start = index + 1


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
