"""The schema of a run's configuration. A field's type has its limit; the string below it is its help for users."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from spare_megatron.config.limits import (
    FloatFromOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    ShareBelowOne,
)
from spare_megatron.config.schema_sections import CheckpointConfig, DataConfig, EvalConfig, SnapshotConfig
from spare_megatron.config.schema_sites import SitesConfig
from spare_megatron.faults.points import KILL, FaultKind, FaultPoint
from spare_megatron.stacking.batch_ramp import BatchRamp
from spare_megatron.stacking.layout import Layout, Slabs
from spare_megatron.stacking.paces import PipelineTimes, Rounds
from spare_megatron.stacking.placement import Placement, make_placement


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The GPT model; `[megatron]` sets everything else that Megatron lets one choose (see `model_fields`)."""

    num_layers: PositiveInt = 4
    """Number of transformer layers, over all pipeline stages."""
    hidden_size: PositiveInt = 64
    """Width of the residual stream."""
    num_attention_heads: PositiveInt = 4
    """Attention heads, over all tensor-parallel ranks."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads, each shared by equally many attention heads; as many as attention heads if absent."""
    ffn_hidden_size: PositiveInt | None = None
    """Width of the feed-forward layers; 4 x hidden_size if absent."""
    num_experts: PositiveInt | None = None
    """Experts in each mixture layer, which takes the place of a feed-forward layer; no mixtures if absent."""
    experts_per_token: PositiveInt = 2
    """Experts that the router of a mixture layer chooses for each token."""
    expert_ffn_hidden_size: PositiveInt | None = None
    """Width of an expert; ffn_hidden_size if absent."""
    shared_expert_ffn_hidden_size: PositiveInt | None = None
    """Width of the expert that computes every token, or of several together; none if absent."""
    num_dense_layers: NonNegativeInt = 0
    """First layers that have no experts."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "quick_geglu", "squared_relu"] = "gelu"
    """Activation function of the feed-forward layers; swiglu, geglu and quick_geglu are gated (a third matrix)."""
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of all normalization layers."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of all normalization layers."""
    linear_bias: bool = True
    """Biases of all linear layers."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections where linear_bias is false."""
    qk_norm: bool = False
    """Normalizes each head's queries and keys before their product."""
    seq_length: PositiveInt = 64
    """Tokens per sequence."""
    vocab_size: PositiveInt = 256
    """Size of the vocabulary; at least that of the corpus's tokenizer."""
    position_embedding: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Position encoding: learned vectors, or rotary (rope)."""
    rope_base: FloatFromOne = 10000.0
    """Base of the wavelengths of rotary position encoding (theta)."""
    rope_scaling_factor: FloatFromOne = 1.0
    """Factor that stretches long wavelengths, as in Llama 3.1, whose other constants are fixed; 1 stretches none."""
    sliding_window: PositiveInt | None = None
    """Last tokens that a token attends to, itself included; all if absent."""
    tie_embeddings: bool = True
    """The output layer shares the word embedding table."""
    hidden_dropout: ShareBelowOne = 0.0
    """Probability of dropping an element of the residual stream."""
    attention_dropout: ShareBelowOne = 0.0
    """Probability of dropping an attention weight."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Format of parameters and activations. Gradients are accumulated, and optimizer state kept, in fp32."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layer implementation; auto uses transformer-engine on a GPU where it is installed, else local."""

    @property
    def ffn_width(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        return self.expert_ffn_hidden_size or self.ffn_width


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """How the ranks are divided into groups and, inside a group, by tensor, context and pipeline parallelism."""

    num_groups: PositiveInt = 4
    """Data-parallel groups; each holds one whole model."""
    max_groups: int | None = None
    """Most groups that may take part at a time, which needs `data.access`=shared: `spare grow` admits those beyond
    `num_groups`, which host no shard, so that neither batch nor results depend on them. `num_groups` if absent."""
    tensor_parallel: PositiveInt = 1
    """Ranks that split each layer."""
    data_parallel: PositiveInt = 1
    """Lanes: model replicas inside a group, which share its microbatches, optimizer state and experts."""
    expert_parallel: PositiveInt | None = None
    """Lanes that divide the experts of mixture layers, and compute a unit of work together; all lanes if absent."""
    context_parallel: PositiveInt = 1
    """Ranks that split each sequence."""
    pipeline_parallel: PositiveInt = 1
    """Number of pipeline stages."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks per stage; above 1 selects the interleaved schedule."""
    least_pipeline_parallel: PositiveInt | None = None
    """Fewest pipeline stages with which a group goes on whose machines are lost, on those that are left, until others
    make it whole again; if absent it waits for these. Each rank then holds more of the model: see `spare config show`.
    """

    @property
    def most_groups(self) -> int:
        """Groups that there is room for."""
        return self.num_groups if self.max_groups is None else self.max_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareConfig:
    """The redundancy that masks lost groups."""

    redundancy: PositiveInt = 3
    """Hosts of each shard, which is also the number of shards in a group's stack (r)."""
    microbatches_per_shard: PositiveInt = 4
    """Microbatches per shard (m); with a ramp those at its end."""
    ramp_start: PositiveInt | None = None
    """Microbatches per shard of the first step, from which they grow; constant if absent."""
    ramp_increment: PositiveInt = 1
    """Microbatches per shard that each increase of the ramp adds."""
    ramp_steps: PositiveInt | None = None
    """Step from which on a shard has `microbatches_per_shard`; the increases before it are equally far apart."""
    groups_per_domain: PositiveInt = 1
    """Groups of consecutive ids per rack or power domain; hosts of a shard stand in different ones where possible."""
    rejoins: NonNegativeInt = 3
    """Times that a machine starts each of its groups again after short lives that it has ended itself, counted anew
    after a long one; the others admit the group at the end of a step."""
    reform_after_s: NonNegativeFloat | None = None
    """Seconds for which a group waits for a replacement of a lost machine, before machines of several broken groups
    make whole ones; if absent 60 in a job with `slurm.num_spare_nodes`, else 0."""
    spares: NonNegativeInt = 0
    """Groups per node for which processes are kept ready to replace those of a lost group; 0 starts new processes."""
    granularity: Literal["microbatch", "stack"] = "microbatch"
    """Unit of work that moves after a loss: a microbatch, or a whole shard (stack) as in the SPARe paper."""
    deal_by_pace: bool = True
    """Gives groups that compute slower than the others less work, as soon as it is certain that they do."""
    replace_slow: bool = True
    """Drains a machine that holds the run back, where that gains more than it costs, and keeps it out until an
    examination of it passes."""

    @property
    def ramp(self) -> BatchRamp:
        """Microbatches per shard as a function of the step."""
        if self.ramp_start is None or self.ramp_steps is None:
            return BatchRamp.constant(self.microbatches_per_shard)
        return BatchRamp(
            largest=self.microbatches_per_shard,
            start=self.ramp_start,
            increment=self.ramp_increment,
            steps=self.ramp_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """Rates of the parameters whose names match a pattern."""

    pattern: str
    """Shell pattern of parameter names, as in `*.bias` or `decoder.layers.0.*`."""
    learning_rate_factor: float = 1.0
    """Factor on the learning rate; 0 leaves the parameters as they are."""
    min_learning_rate_factor: float | None = None
    """Factor on the learning rate at the end of the decay; learning_rate_factor if absent."""
    weight_decay_factor: float | None = None
    """Factor on the weight decay; if absent 0 for biases and other vectors and 1 for the rest, as without a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramConfig:
    """A custom program: a Python file that defines the model, its forward pass or the data."""

    file: str = ""
    """Python file with `model_provider`, `forward_step` or `datasets_provider`, on storage that all nodes share; the
    GPT and the corpus of these settings if empty."""
    sha256: str = ""
    """Required SHA-256 of the file, as in a run's `config.toml`; empty accepts any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Adam or Muon with weight decay, and its schedule."""

    kind: Literal["adam", "muon"] = "adam"
    """Optimizer; muon orthogonalizes the updates of matrices, and leaves vectors and tables of words to Adam."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    min_learning_rate: NonNegativeFloat = 1e-5
    """Learning rate at the end of the decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    decay_style: Literal["cosine", "linear", "constant", "inverse_square_root", "wsd"] = "cosine"
    """Shape of the decay; wsd (warm-up, stable, decay) stays at the peak until its last `wsd_decay_steps`."""
    decay_steps: PositiveInt | None = None
    """Step at which the decay ends; the last one of the run if absent. Set it for a run that may be extended."""
    wsd_decay_steps: PositiveInt | None = None
    """Steps of the decay at the end of a wsd schedule."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay at the end of a wsd schedule; minus_sqrt is 1 minus the square root of its elapsed share."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; biases and other vectors have none unless a rule gives them some."""
    rules: tuple[ParameterRule, ...] = ()
    """Rates by parameter, one table each: `pattern`, a shell pattern of names, `learning_rate_factor`,
    `min_learning_rate_factor` and `weight_decay_factor`; the first that matches counts."""
    beta1: ShareBelowOne = 0.9
    """Decay rate of Adam's first moment."""
    beta2: ShareBelowOne = 0.95
    """Decay rate of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    muon_momentum: ShareBelowOne = 0.95
    """Decay rate of Muon's momentum."""
    muon_nesterov: bool = False
    """Adds the gradient to Muon's momentum once more, as Nesterov's."""
    muon_split_qkv: bool = True
    """Orthogonalizes queries, keys and values each for itself, where one matrix holds them."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of an update by the shape of its matrix: the root of the larger side, of rows by columns, or of these if
    above 1."""
    muon_extra_scale_factor: PositiveFloat = 1.0
    """A further factor of Muon's updates."""
    muon_num_ns_steps: PositiveInt = 5
    """Newton-Schulz iterations of Muon."""
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of these iterations."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium"
    """Precision of their products, as torch names it; medium computes them in bf16."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """What ranks that split a matrix orthogonalize: each its part, each the whole, or together the whole."""
    sharding: Literal["replicated", "stacked"] = "replicated"
    """Where optimizer state is kept: whole in every group (replicated), or in partitions on a few groups each
    (stacked)."""
    redundancy: PositiveInt = 2
    """Groups that host each partition of the optimizer state (r_o); for sharding = stacked."""
    repair_mib_per_s: PositiveFloat = 256.0
    """Largest rate at which each rank copies partitions in the background, in MiB/s; for sharding = stacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceConfig:
    """The cross-group reduction."""

    mode: Literal["fast", "fast_bf16", "reproducible"] = "fast"
    """Gradient sums over groups: fast adds fp32 numbers; fast_bf16 rounds them to bf16, which halves the traffic;
    reproducible adds integers exactly, so results do not depend on who computed what."""
    overlap: bool = False
    """Reduces each bucket as soon as the backward pass has finished it, while other buckets are computed."""
    bucket_mib: float | None = None
    """Size of a gradient bucket in MiB; each rank needs three times this memory beside the gradients. 128 on GPUs and
    32 on CPUs if absent."""
    timeout_s: float = 120.0
    """Longest wait for one bucket of a cross-group reduction, or for building the communicator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Microbatches that a second group computes, too, which shows wrong gradients before they are committed."""

    every_steps: NonNegativeInt | None = None
    """Steps between audits, in each of which every group computes one microbatch of another group on each lane; 0
    disables them. If absent as few as cost at most 1% of a step after a ramp, and none where equal gradients may differ
    in bits."""
    products: Share = 0.0
    """Share of the passes, each a microbatch forward and backward, whose products and other operations a group checks
    while it computes them; tokens are checked in all passes, unless it is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """Agreement between groups, the control store, and timeouts inside a group."""

    store: Literal["embedded", "etcd"] = "embedded"
    """Control store: a server process of the run (embedded), or an etcd cluster, which survives losing a member."""
    listen_address: str = "127.0.0.1"
    """IP address of this machine on which the embedded store listens. It has no authentication."""
    endpoints: tuple[str, ...] = ()
    """Client URLs of the etcd members."""
    ca_file: str = ""
    """CA certificates that verify etcd; the system's if empty."""
    cert_file: str = ""
    """Client certificate presented to etcd."""
    key_file: str = ""
    """Private key of the client certificate."""
    credentials_file: str = ""
    """File with user:password for etcd, private to its owner; SPARE_ETCD_USER and SPARE_ETCD_PASSWORD if empty."""
    vote_fan_in: PositiveInt = 32
    """Groups whose votes one group relays; with this many groups or fewer, each votes directly."""
    startup_timeout_s: float = 300.0
    """Longest wait until all ranks have started and built the model."""
    decision_timeout_s: float = 600.0
    """Longest wait for the next entry of the decision log."""
    group_timeout_s: float = 120.0
    """Longest wait for a collective or a pipeline transfer inside a group."""
    heartbeat_interval_s: float = 1.0
    """Seconds between heartbeats; a rank or node that shows no sign of life is fenced within two intervals."""
    store_timeout_s: float = 60.0
    """Longest pause while the control store does not answer; then the run ends."""
    end_grace_s: PositiveFloat = 25.0
    """Seconds from SIGTERM or a like signal, which ends the run with the step under way and a checkpoint, until all
    processes end at once; below the KillWait of Slurm, 30 s, and what other schedulers leave until SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """One fault to inject. `faults.seed` determines the fields left unset."""

    phase: FaultPoint
    """Moment of the step at which the fault strikes."""
    step: int | None = None
    """Step at which it strikes."""
    group: int | None = None
    """Group that it strikes."""
    rank: int | None = None
    """Rank inside that group."""
    kind: FaultKind = KILL
    """Effect on the rank, its node or the control store."""
    seconds: float | None = None
    """Duration in seconds, or the offset of a clock jump; absent lasts for good."""
    factor: float | None = None
    """How many times slower a slow rank, host or link is; above 1."""
    bit: int | None = None
    """Bit that a flip inverts or that is stuck, counted from the lowest, 0; if absent the second highest, a float's top
    exponent bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """Faults to inject into the run."""

    seed: NonNegativeInt = 0
    """Seed of random faults and of the unset fields of the trace."""
    trace: tuple[FaultConfig, ...] = ()
    """Faults to inject, one table each."""
    mean_steps: float | None = None
    """Mean steps between random faults, as an alternative to a trace; absent draws none."""
    distribution: Literal["exponential", "weibull"] = "exponential"
    """Distribution of the steps between random faults."""
    shape: float = 0.78
    """Shape of the Weibull distribution; below 1 faults come in bursts."""
    kinds: tuple[FaultKind, ...] = ()
    """Kinds to draw from; one listed twice is drawn twice as often. Empty draws all kinds that the run can survive and
    that every machine can inject."""
    mix: Literal["listed", "llama3"] = "listed"
    """Frequency of kinds: as listed in `kinds`, or as their causes interrupted the training of Llama 3."""
    max_seconds: float = 0.4
    """Longest duration of a random fault that ends by itself, in seconds."""
    domain_share: float = 0.0
    """Share of random permanent faults of single groups that hit all groups of a domain at once."""
    recovery_steps: int = 50
    """Steps after a random fault in which its groups are not hit again; those that may be lost count as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Length and seeds of the run."""

    steps: PositiveInt = 20
    """Optimizer steps to commit."""
    max_minutes: PositiveFloat | None = None
    """Minutes after which the run ends with its current step, if it has not committed `steps` before."""
    micro_batch_size: PositiveInt = 2
    """Sequences per microbatch."""
    global_batch_size: int | None = None
    """Sequences per step of all groups together, after a ramp; sets `spare.microbatches_per_shard`, the setting that a
    run keeps."""
    rampup_batch_size: tuple[int, ...] | None = None
    """Megatron's ramp: sequences of the first step, those that each increase adds, and those of all steps before the
    last increase. Sets `spare.ramp_start`, `ramp_increment` and `ramp_steps`, with stages of equally many steps."""
    seed: NonNegativeInt = 1234
    """Seed of parameters, data order and dropout."""
    params_check_every_steps: NonNegativeInt = 10
    """Steps between comparisons of the groups' parameters and moments; 0 compares only after recoveries, for
    checkpoints, and at the end."""
    gradient_outlier_factor: float = 1000.0
    """Fences a group whose gradient norm exceeds this many times the median of its last steps; 0 disables that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The machines of the run."""

    num_nodes: PositiveInt = 1
    """Nodes, each with one supervisor; ranks are assigned to nodes in equal consecutive blocks."""
    isolate_nodes: bool = False
    """Gives each node of a run on one machine its own network, which faults can cut; needs root."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device that ranks compute on; auto uses GPUs if there are any."""
    ranks_per_gpu: PositiveInt = 1
    """Ranks that share a GPU, for tests on one machine: the GPU serves them in turn."""
    threads_per_rank: PositiveInt = 1
    """Threads per rank for CPU operations."""
    launcher: Literal["local", "srun", "hand"] = "local"
    """How supervisors start: all on this machine (local), as steps of a Slurm job (srun), or by `spare supervise` on
    the other nodes (hand)."""
    notice_file: str = ""
    """File on each machine, or with {node} of each node: once it exists, the groups of the node leave, because the
    machine is about to go. None if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """The job that `spare submit` submits to Slurm."""

    partition: str = ""
    """Partition; the cluster's default if empty."""
    account: str = ""
    """Account that is charged for the job; the user's default if empty."""
    time_limit_minutes: PositiveInt | None = None
    """Minutes until Slurm ends the job; the partition's limit if absent."""
    end_before_limit_s: PositiveInt = 300
    """Seconds before the time limit at which the run finishes its step, saves, and requeues the job."""
    max_requeues: NonNegativeInt = 10
    """Times that the job is requeued: after a wipe-out, a preemption, or at its time limit."""
    gpus_per_node: PositiveInt = 8
    """GPUs per node; its ranks use all of them. Ignored on CPUs."""
    num_spare_nodes: NonNegativeInt = 0
    """Nodes of the job kept idle to replace lost ones."""
    options: tuple[str, ...] = ()
    """Additional options of sbatch, such as --qos=high or --constraint=h100."""
    setup: tuple[str, ...] = ()
    """Shell lines that run first on every node: modules, a virtual environment, exports."""
    step_options: tuple[str, ...] = ()
    """Additional options of srun for the steps of the nodes, such as --container-image=IMAGE of Pyxis."""
    container: tuple[str, ...] = ()
    """Command before Python in the steps of the nodes, which runs it in a container: apptainer, exec, --nv, IMAGE."""
    python: str = ""
    """Path of Python inside the steps, where a container has it elsewhere; that of `spare submit` if empty."""
    doctor: bool = False
    """Examines all nodes of the job first, as `spare doctor` does, and ends the job if one has a problem."""
    etcd_port: PositiveInt = 2379
    """First of 6 ports for the etcd that the job starts on its nodes if control.endpoints is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where metrics go while the run trains, besides `metrics.jsonl`."""

    tensorboard: bool = False
    """Writes event files for TensorBoard into the run's directory."""
    wandb_project: str = ""
    """Project at Weights & Biases; empty sends nothing there."""
    run_id: str = ""
    """Id of the run at Weights & Biases, the same for all that continue it; if empty, of the loaded checkpoint."""
    peak_tflops: PositiveFloat | None = None
    """Peak rate of one rank's device in 10^12 operations per second, for `perf/mfu`; absent leaves that metric out."""
    model_every_steps: NonNegativeInt = 10
    """Steps between figures of the model: gradient norm by layer, norm of the parameters, load of experts; 0 takes
    none."""
    prometheus_port: int | None = None
    """Port of the driver's machine at which Prometheus reads the metrics; absent serves none."""
    prometheus_address: str = "127.0.0.1"
    """Address of the driver's machine for that port; reading the metrics needs no password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """What happens when something happens to the run."""

    on_event: tuple[str, ...] = ()
    """Command and arguments to run on the driver's machine for each event, which it gets as JSON on standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Traces of torch's profiler, in `profile` in the run directory: a file for each step and rank."""

    steps: tuple[int, ...] = ()
    """Steps to trace; empty traces none."""
    groups: tuple[int, ...] = (0,)
    """Groups whose ranks are traced."""
    ranks: tuple[int, ...] = (0,)
    """Ranks inside those groups that are traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    name: str = "run"
    """Name of the run; also of its directory under `runs` unless --run-dir names another."""
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    spare: SpareConfig = field(default_factory=SpareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    sites: SitesConfig = field(default_factory=SitesConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, in Megatron's own spelling."""

    @property
    def parallel(self) -> Layout:
        """Sizes and rank order, as every other package uses them."""
        return Layout(
            num_groups=self.layout.most_groups,
            data_parallel=self.layout.data_parallel,
            expert_parallel=self.row_size,
            tensor_parallel=self.layout.tensor_parallel,
            context_parallel=self.layout.context_parallel,
            pipeline_parallel=self.layout.pipeline_parallel,
            num_nodes=self.cluster.num_nodes,
            num_further=self.layout.most_groups - self.layout.num_groups,
            least_pipeline_parallel=self.layout.least_pipeline_parallel,
        )

    @property
    def slabs(self) -> Slabs | None:
        """What stages are made of; None if all pipelines have as many."""
        lengths = self.parallel.lengths
        return Slabs(self.model.num_layers, lengths) if len(lengths) > 1 else None

    def with_stages(self, stages: int) -> "RunConfig":
        """The configuration of a group with so many stages, as its own ranks see it."""
        return replace(self, layout=replace(self.layout, pipeline_parallel=stages))

    @property
    def placement(self) -> Placement:
        """The hosts of all shards; ValueError if there are fewer groups than hosts."""
        num_groups, spare = self.layout.num_groups, self.spare
        return make_placement("golomb", num_groups, spare.redundancy, spare.groups_per_domain)

    @property
    def row_size(self) -> int:
        """Microbatches in a unit of work, which lanes that divide experts compute together; 1 for a dense model."""
        if self.model.num_experts is None:
            return 1
        return self.layout.expert_parallel or self.layout.data_parallel

    @property
    def may_use_transformer_engine(self) -> bool:
        """Whether layers are those of transformer-engine where it is installed."""
        return self.cluster.device != "cpu" and self.model.transformer_impl != "local"

    @property
    def unit_ramp(self) -> BatchRamp:
        """`spare.ramp` in units of work."""
        return self.spare.ramp.in_units_of(self.row_size)

    @property
    def units_at_once(self) -> int:
        """Units of work that a group computes side by side, each on lanes of its own."""
        return self.layout.data_parallel // self.row_size

    @property
    def rounds(self) -> Rounds:
        """What the pipeline schedule makes of a group's units of work."""
        stages, chunks = self.layout.pipeline_parallel, self.layout.virtual_pipeline
        multiple = (self.megatron.get("microbatch_group_size_per_vp_stage") or stages) if chunks > 1 else 1
        return Rounds(lanes=self.units_at_once, multiple=multiple, fill=-(-(stages - 1) // max(chunks, 1)))

    @property
    def pipeline_times(self) -> PipelineTimes:
        """What the time of a step follows from if groups have pipelines of different lengths."""
        return PipelineTimes(
            num_layers=self.model.num_layers,
            num_shards=self.layout.num_groups,
            num_microbatches=self.unit_ramp.largest,
            lanes=self.units_at_once,
            moves_shards=self.spare.granularity == "stack",
            is_dealt=self.spare.deal_by_pace,
        )

    @property
    def bucket_mib(self) -> float:
        """`reduce.bucket_mib`, or the default of the device; that of CPUs while `cluster.device` is `auto`."""
        if self.reduce.bucket_mib is not None:
            return self.reduce.bucket_mib
        return 128.0 if self.cluster.device == "gpu" else 32.0
