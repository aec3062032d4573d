"""What `config.json` says about quantised weights: `quantization_config` and `expert_dtype`.

How each tensor is stored is told by the files; this is what they must agree with. Used by `config.model` and `weights`.
"""

from dataclasses import dataclass

from deepspan.config.fields import Fields
from deepspan.errors import ConfigError

FP8_METHOD = "fp8"
ASCEND_METHOD = "ascend"
EXPERT_DTYPES = ("fp4", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationConfig:
    """method: `fp8`, `ascend`, or None without a quantization_config. expert_dtype: of routed experts, or None."""

    method: str | None
    expert_dtype: str | None


def quantisation_config(fields: Fields) -> QuantisationConfig:
    """Raises ConfigError naming the field if the method or a parameter of it is not served."""
    expert_dtype = fields.optional("expert_dtype")
    if expert_dtype is not None and expert_dtype not in EXPERT_DTYPES:
        raise ConfigError(f"expert_dtype must be one of {', '.join(EXPERT_DTYPES)}, found {expert_dtype!r}")
    method = None
    if fields.optional("quantization_config") is not None:
        method = _method(fields.sub("quantization_config"))
    return QuantisationConfig(method=method, expert_dtype=expert_dtype)


def _method(fields: Fields) -> str:
    method = fields.choice_of(("quant_method",), (FP8_METHOD, ASCEND_METHOD))
    if method == FP8_METHOD:
        fields.equal_if_present("activation_scheme", "dynamic")
        fields.equal_if_present("fmt", "e4m3")
        fields.equal_if_present("weight_block_size", [128, 128])
        fields.optional("scale_fmt")  # the dtype of each stored scale says it
    return method
