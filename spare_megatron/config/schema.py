"""The schema of a run's configuration. A field's type has its limit; the string below it is its help for users."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spare_megatron.config.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, ShareBelowOne
from spare_megatron.core.fault_points import FaultPoint
from spare_megatron.stacking.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The GPT model; `[megatron]` sets everything else that Megatron lets one choose."""

    num_layers: PositiveInt = 4
    """Transformer layers, over all pipeline stages."""
    hidden_size: PositiveInt = 64
    """Width of the residual stream."""
    num_attention_heads: PositiveInt = 4
    """Attention heads, over all tensor-parallel ranks."""
    ffn_hidden_size: PositiveInt | None = None
    """Width of the feed-forward layers; 4 x hidden_size when absent."""
    seq_length: PositiveInt = 64
    """Tokens in a sequence."""
    vocab_size: PositiveInt = 256
    """Size of the vocabulary, as the tokenizer of the corpus has it."""
    position_embedding: Literal["learned_absolute", "rope"] = "learned_absolute"
    """How positions are encoded."""
    tie_embeddings: bool = True
    """Whether the output layer shares the word embeddings."""
    hidden_dropout: ShareBelowOne = 0.0
    """Probability of dropping an element of the residual stream."""
    attention_dropout: ShareBelowOne = 0.0
    """Probability of dropping an attention weight."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Format of parameters and activations; gradients are summed and the optimizer works in fp32."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers to build from; auto takes transformer-engine on a GPU where it is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """How the ranks are divided into groups and, inside a group, by tensor, context and pipeline parallelism."""

    num_groups: PositiveInt = 4
    """Data-parallel groups, each a whole model."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer."""
    context_parallel: PositiveInt = 1
    """Ranks that share each sequence."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline stages."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per stage; above 1 the interleaved schedule is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareConfig:
    """The redundancy that masks lost groups."""

    redundancy: PositiveInt = 3
    """Shards in a group's stack: hosts of each shard (r)."""
    microbatches_per_shard: PositiveInt = 4
    """Microbatches a shard consists of (m)."""
    placement: Literal["golomb", "consecutive"] = "golomb"
    """Which groups host a shard: golomb makes any two shards share at most one host where that is possible."""
    groups_per_domain: PositiveInt = 1
    """Groups of consecutive ids in a rack or power domain; no two hosts of a shard share one where that is possible."""
    rejoins: NonNegativeInt = 3
    """Times that each lost group is started again, to be taken in by the others at the end of a step."""
    spares: NonNegativeInt = 0
    """Groups whose processes each node holds ready, to take the place of those of a group that is lost."""
    granularity: Literal["microbatch", "stack"] = "microbatch"
    """Unit of reordering: stack moves whole shards, as in the SPARe paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The training text."""

    corpus: str = ""
    """Path prefix of the indexed dataset that `spare preprocess` wrote (PREFIX.bin and PREFIX.idx)."""
    identity: str = ""
    """What `data.corpus` must be: digest, tokens, tokenizer, as `config.toml` of a run has it; any if empty."""
    cache: str = ""
    """Folder for the sample indices; `cache` beside the corpus when empty."""
    access: Literal["stacked", "shared"] = "stacked"
    """What a group can read: the shards of its stack, or all, so that any group computes a shard without a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Adam with weight decay, and its schedule."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    min_learning_rate: NonNegativeFloat = 1e-5
    """Learning rate at the end of the decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay, which ends with the last step of the run."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    beta1: ShareBelowOne = 0.9
    """Adam's decay of the first moment."""
    beta2: ShareBelowOne = 0.95
    """Adam's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""
    sharding: Literal["replicated", "stacked"] = "replicated"
    """Where the optimizer's state is: replicated in every group, or stacked in slices on a few groups each."""
    redundancy: PositiveInt = 2
    """Stacked: groups that host each slice of the optimizer's state (r_o)."""
    repair_mib_per_s: PositiveFloat = 256.0
    """Stacked: how fast each rank fetches copies of slices in the background, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceConfig:
    """The cross-group reduction."""

    mode: Literal["fast", "reproducible"] = "fast"
    """reproducible sums exact integers, so that the result does not depend on who computed what or in which order."""
    overlap: bool = False
    """Whether a bucket is reduced as soon as the backward pass has finished it, while others are computed."""
    bucket_mib: float = 32.0
    """Gradients that are reduced as one, in MiB; three times this much memory is needed beside the gradients."""
    timeout_s: float = 120.0
    """Longest wait for one bucket of a cross-group reduction, or for building its communicator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Agreement between groups, the control store, and timeouts inside a group."""

    store: Literal["embedded", "etcd"] = "embedded"
    """Where the groups agree: in a server process of the run, or in an etcd cluster, which outlives its members."""
    listen_address: str = "127.0.0.1"
    """IP address of this machine that the embedded store serves on, to whoever reaches it: it has no authentication."""
    endpoints: tuple[str, ...] = ()
    """Client URLs of the etcd members."""
    ca_file: str = ""
    """Certificates that may vouch for etcd; the system's when empty."""
    cert_file: str = ""
    """Client certificate to show to etcd."""
    key_file: str = ""
    """Key of the client certificate."""
    credentials_file: str = ""
    """File with user:password for etcd, its owner's alone; SPARE_ETCD_USER and SPARE_ETCD_PASSWORD when empty."""
    vote_fan_in: PositiveInt = 32
    """Groups whose votes one of them casts for all; runs of no more groups vote directly."""
    startup_timeout_s: float = 300.0
    """Longest wait for all ranks to be up with their model built."""
    decision_timeout_s: float = 600.0
    """Longest wait for the next entry of the decision log."""
    group_timeout_s: float = 120.0
    """Longest wait for a collective or a pipeline transfer inside a group."""
    heartbeat_interval_s: float = 1.0
    """A rank or a node that shows no life is found within two of these."""
    store_timeout_s: float = 60.0
    """How long training pauses for a control store that does not answer before the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are taken, which one the run starts from, and restarts after a wipe-out."""

    cadence: Literal["fixed", "optimal"] = "fixed"
    """optimal takes checkpoints by what the run has measured: stalls of saves, restarts, losses, who is left."""
    group_life_s: PositiveFloat = 1e6
    """Mean seconds until a given group is lost, as expected before any is; for the cadence optimal."""
    interval_steps: PositiveInt | None = None
    """Steps from one checkpoint to the next; without this and `interval_s` none are taken."""
    interval_s: PositiveFloat | None = None
    """Seconds from one checkpoint to the next."""
    asynchronous: bool = True
    """Trains on while a checkpoint is written; otherwise all groups wait until it is on the disk."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept, beside those that later steps have yet to confirm."""
    keep_every_steps: PositiveInt | None = None
    """One checkpoint out of so many steps is kept for good."""
    folder: str = ""
    """Folder of the checkpoints, on storage that all nodes share; `checkpoints` in the run's directory when empty."""
    load: str = ""
    """What the run begins with: a checkpoint, or the newest valid one of a folder of checkpoints or of a run."""
    allow_other_corpus: bool = False
    """Whether a run may go on from a checkpoint of another corpus than `data.corpus`; its record then names both."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time to write a checkpoint, which is given up then while training goes on, and to read one."""
    max_restarts: NonNegativeInt = 3
    """Restarts after a wipe-out within restart_window_s; the next one ends the run. 0: any wipe-out does."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds of training within which max_restarts counts."""
    restart_wait_s: PositiveFloat = 60.0
    """Longest wait at a restart for groups that stay away or get no further; the others then start if they can."""

    @property
    def is_wanted(self) -> bool:
        return self.cadence == "optimal" or self.interval_steps is not None or self.interval_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """Copies of the training state in the nodes' memory, for restarts after a wipe-out."""

    every_steps: int = 0
    """Steps from one snapshot of the state in host memory to the next, at least 2; 0 takes none."""
    redundancy: NonNegativeInt = 1
    """Nodes that may be lost with a snapshot left whole: one more keep each rank's state."""


FaultKind = Literal[
    "kill",
    "raise",
    "hang",
    "stop",
    "slow",
    "disk_full",
    "clock_jump",
    "cut",
    "stop_node",
    "kill_supervisor",
    "stop_store",
    "kill_store",
    "nan",
    "bit_flip",
    "param_flip",
    "moment_flip",
]
"""What a fault does; `docs/campaigns.md` describes the effect of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """One fault to inject. `faults.seed` determines the fields left unset."""

    phase: FaultPoint
    """Moment of the step at which the rank is hit."""
    step: int | None = None
    """Step at which it is hit."""
    group: int | None = None
    """Group that is hit."""
    rank: int | None = None
    """Rank inside that group."""
    kind: FaultKind = "kill"
    """What happens to the rank, to its node or to the control store."""
    seconds: float | None = None
    """How long it lasts, or how far the clock jumps; for good when absent."""
    bit: int | None = None
    """Bit that a flip inverts, from 0, the lowest; the second highest, of a float's exponent the top, when absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """Faults to inject into the run."""

    seed: NonNegativeInt = 0
    """Seed of everything the trace leaves open."""
    trace: tuple[FaultConfig, ...] = ()
    """The faults, each in a table of its own."""
    mean_steps: float | None = None
    """Mean number of steps from one random fault to the next, instead of a trace; draws none when absent."""
    distribution: Literal["exponential", "weibull"] = "exponential"
    """How the steps between random faults are distributed."""
    shape: float = 0.78
    """Shape of the Weibull distribution; below 1 faults come in bursts."""
    kinds: tuple[FaultKind, ...] = ()
    """Kinds to draw from, one named twice twice as often; all that a run like this can survive when empty."""
    mix: Literal["listed", "llama3"] = "listed"
    """llama3 draws kinds as often as their causes interrupted the training of Llama 3."""
    max_seconds: float = 0.4
    """Longest of the random faults that pass by themselves."""
    domain_share: float = 0.0
    """Share of random lasting faults of single groups that hit all groups of a domain at once."""
    recovery_steps: int = 50
    """Steps after a random fault in which its groups are not hit again, and count as lost if they may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Length and seeds of the run."""

    steps: PositiveInt = 20
    """Optimizer steps to commit."""
    max_minutes: PositiveFloat | None = None
    """Minutes from the start of a run to its end with the step under way, if that comes before `steps`."""
    micro_batch_size: PositiveInt = 2
    """Sequences in a microbatch."""
    seed: NonNegativeInt = 1234
    """Seed of the parameters, the order of the data and the dropout."""
    params_check_every_steps: NonNegativeInt = 10
    """Steps between comparisons of the parameters of all groups. 0 compares only after recoveries, for checkpoints, and
    at the end."""
    gradient_outlier_factor: float = 1000.0
    """A group is lost whose gradient exceeds this many times the median of its own last steps; 0 judges no sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The machines of the run."""

    num_nodes: PositiveInt = 1
    """Nodes, with a supervisor each; ranks are dealt out to them in equal consecutive blocks."""
    isolate_nodes: bool = False
    """Gives each node of a run on one machine a network of its own, which faults can cut off; needs root."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where ranks compute; auto takes GPUs when there are any."""
    threads_per_rank: PositiveInt = 1
    """Threads of a rank's CPU operations."""
    launcher: Literal["local", "srun", "hand"] = "local"
    """Who starts supervisors: all here; steps of a Slurm job; or the first here, the others `spare supervise`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """The job that `spare submit` submits to Slurm."""

    partition: str = ""
    """Partition; the cluster's default when empty."""
    account: str = ""
    """Account that pays for the job; the user's default when empty."""
    time_limit_minutes: int | None = None
    """Minutes until Slurm ends the job; the partition's limit when absent."""
    end_before_limit_s: int = 300
    """Seconds before the time limit at which the run ends with the step under way, saves and queues again."""
    max_requeues: int = 10
    """Times that the job goes back into the queue, after a wipe-out or at its time limit."""
    gpus_per_node: int = 8
    """GPUs of a node; its ranks take all of them. Without effect on CPUs."""
    num_spare_nodes: int = 0
    """Nodes of the job that wait to take the place of lost ones."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as --qos=high or --constraint=h100."""
    setup: tuple[str, ...] = ()
    """Shell lines that come first: modules, a virtual environment, exports that all nodes are to have."""
    step_options: tuple[str, ...] = ()
    """Further options of srun for the steps of the nodes, such as --container-image=IMAGE of Pyxis."""
    container: tuple[str, ...] = ()
    """Words before Python in the steps of the nodes, which run it in a container: apptainer, exec, --nv, IMAGE."""
    python: str = ""
    """Python in the steps of the nodes, where a container has it elsewhere; that of `spare submit` when empty."""
    doctor: bool = False
    """Whether the job looks at all its nodes first, as `spare doctor` does, and ends where one has a problem."""
    etcd_port: int = 2379
    """First of the 6 ports of the etcd that the job brings up on its nodes where control.endpoints is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where metrics go while the run trains, besides `metrics.jsonl`."""

    tensorboard: bool = False
    """Writes event files for TensorBoard into the run's directory."""
    wandb_project: str = ""
    """Project at Weights & Biases; not told there when empty."""
    run_id: str = ""
    """Id of the training there, the same for all runs that continue it; that of the loaded checkpoint when empty."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one rank's device in 10^12 operations a second, for `perf/mfu`; none is told when absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    name: str = "run"
    """Name of the run, and of its directory under `runs` unless another is given."""
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    spare: SpareConfig = field(default_factory=SpareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, in Megatron's own spelling."""

    @property
    def parallel(self) -> Layout:
        """Sizes and rank order, as every other package uses them."""
        return Layout(
            num_groups=self.layout.num_groups,
            tensor_parallel=self.layout.tensor_parallel,
            context_parallel=self.layout.context_parallel,
            pipeline_parallel=self.layout.pipeline_parallel,
            num_nodes=self.cluster.num_nodes,
        )
