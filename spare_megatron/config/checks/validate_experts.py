"""Problems of mixture-of-experts settings in `[model]`, and of what they need."""

from collections.abc import Iterator

from spare_megatron.config.model_fields import as_written, model_fields
from spare_megatron.config.schema import ModelConfig, RunConfig


def expert_problems(config: RunConfig) -> Iterator[str]:
    """Why a mixture of experts cannot be trained as the settings say, or that they describe none."""
    model = config.model
    if model.num_experts is None:
        yield from _without_experts(config)
        return
    yield from _shape(model)
    if model_fields(config)["add_bias_linear"]:
        yield (
            f"{as_written(config, 'add_bias_linear')} with model.num_experts={model.num_experts}: experts have no "
            f"biases here; set model.linear_bias=false"
        )
    tensor = config.layout.tensor_parallel
    width = model.expert_ffn_hidden_size or model.ffn_hidden_size or 4 * model.hidden_size
    for key, value in (
        ("expert_ffn_hidden_size", width),
        ("shared_expert_ffn_hidden_size", model.shared_expert_ffn_hidden_size or tensor),
    ):
        if value % tensor:
            yield f"model.{key}={value} is not a multiple of layout.tensor_parallel={tensor}; change one of them"
    if tensor > 1 and not config.megatron.get("sequence_parallel"):
        yield (
            f"layout.tensor_parallel={tensor} with model.num_experts={model.num_experts} needs "
            f"megatron.sequence_parallel=true, which works on GPUs alone: without it every tensor-parallel rank would "
            f"route all tokens; set it, or layout.tensor_parallel=1"
        )


def _without_experts(config: RunConfig) -> Iterator[str]:
    neutral = ModelConfig()
    names = ("experts_per_token", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size", "num_dense_layers")
    given = [f"model.{name}={getattr(config.model, name)}" for name in names if _differs(config.model, neutral, name)]
    if (size := config.layout.expert_parallel) is not None:
        given.append(f"layout.expert_parallel={size}")
    for text in given:
        yield f"{text} has no effect without experts; remove it, or set model.num_experts"


def _differs(model: ModelConfig, neutral: ModelConfig, name: str) -> bool:
    return bool(getattr(model, name) != getattr(neutral, name))


def _shape(model: ModelConfig) -> Iterator[str]:
    assert model.num_experts is not None
    if model.experts_per_token > model.num_experts:
        yield (
            f"model.experts_per_token={model.experts_per_token} exceeds model.num_experts={model.num_experts}; "
            f"lower the first or raise the second"
        )
    if model.num_dense_layers >= model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} leaves none of model.num_layers={model.num_layers} for "
            f"model.num_experts={model.num_experts}; lower the first, or remove the last"
        )
