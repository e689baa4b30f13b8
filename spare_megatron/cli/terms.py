"""The terms that commands print: a line for each, in the help of commands that use it and in docs/how_it_works.md."""

from collections.abc import Mapping

TERMS: Mapping[str, str] = {
    "group": "a data-parallel replica of the model: TP x CP x PP ranks, or several lanes; lost and started as one",
    "shard": "a part of the global batch: m microbatches. There are as many as groups at the start",
    "microbatch": "the unit of compute, train.micro_batch_size sequences; it moves to another group when one is lost",
    "host": "of a shard: a group that can read its data and may compute it; each shard has spare.redundancy hosts",
    "stack": "the shards that a group hosts",
    "owner": "of a microbatch: the one host that computes it in this step",
    "load": "the microbatches that one group is dealt in a step; step lines have the largest, which a step waits for",
    "pace": "a group's time for a microbatch; slow groups get a smaller load",
    "lane": "one of the replicas that a wide group consists of (layout.data_parallel); they share work and state",
    "step": "numbered from 0: step 19 (20/60) is the step with which 20 of 60 are committed; after 20 steps: 20 are",
    "attempt": "one try to sum the gradients of a step over the groups and to commit it; counted from 0 over the run",
    "commit": "the decision that a step counts; only then do parameters change",
    "patch": "the microbatches that a lost group still owed in the step, computed by its survivors",
    "epoch": "of communicators: the number of the set of groups that take part; grows with each loss and return",
    "log": "the list of decisions in the control store that all groups follow",
    "fence": "the entry of the log that declares a group lost; nothing that it still does counts",
    "incarnation": "how often a group was started again: 0 for its first processes",
    "rejoin": "a group that was lost takes part again, with the state copied from another one",
    "drain": "a group leaves at the end of a step, as asked, and nothing is computed again",
    "re-form": "to make whole groups out of the machines of broken ones",
    "place": "the ranks that stand together on a machine; a machine may take another place",
    "quarantine": "a machine that computed wrongly, or slowly, gets no place before an examination passes",
    "audit": "a microbatch that two groups compute, whose bits are compared before the commit",
    "state partition": "a part of the optimizer's state that a few groups hold (optimizer.sharding=stacked)",
    "pause": "a shard has no host left, and the other groups wait for one",
    "wipe-out": "no group, or no host of a state partition, is left: only a checkpoint or snapshot helps",
    "goodput": "the share of the time that steps would have taken without incidents",
    "quiet step": "the median step with all groups and no fault",
    "scatter": "lost time without a known cause: what steps took beyond a quiet one",
}


def explained(*terms: str) -> str:
    """The end of the help of a command that uses these terms."""
    lines = "\n".join(f"- {term}: {TERMS[term]}" for term in terms)
    return f"Terms; docs/how_it_works.md has all:\n\n{lines}" if terms else ""
