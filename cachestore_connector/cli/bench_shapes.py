"""Which bytes a page of a model is: from a preset's name, or from the model's numbers."""

from __future__ import annotations

import dataclasses

import click

_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
}
LAYOUTS = ("page_first", "layer_first")
PAGE_SIZE = 64
_MOST_TENSORS = 320  # of a page, as the store has it
_MOST = 1 << 20  # of any of the numbers
_ALIGNMENT = 4096

# From the models' own configurations: num_hidden_layers, num_key_value_heads, head_dim; for MLA
# num_hidden_layers, kv_lora_rank, qk_rope_head_dim.
PRESETS = {
    "llama-3-8b": "32,8,128",
    "llama-3-70b": "80,8,128",
    "llama-3-405b": "126,8,128",
    "mistral-7b": "32,8,128",
    "qwen2.5-72b": "80,8,128",
    "qwen3-32b": "64,8,128",
    "deepseek-v2-lite": "mla:27,512,64",
    "deepseek-v3": "mla:61,512,64",
    "deepseek-r1": "mla:61,512,64",
    "kimi-k2": "mla:61,512,64",
}
FORMS = "layers,kv_heads,head_dim,dtype,page_size or mla:layers,rank,rope,dtype,page_size"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The KV pages of one rank. ``heads``: KV heads of that rank; 1 for MLA.

    ``dim``: elements of a row of a head, of K and of V alike; for MLA, of the one latent row.
    ``page_size``: tokens.
    """

    name: str
    is_mla: bool
    layers: int
    heads: int
    dim: int
    dtype: str
    page_size: int
    layout: str = "page_first"

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor of a page, as a host pool of that layout has them."""
        row = self.page_size * self.heads * self.dim * _BYTES[self.dtype]
        kinds = 1 if self.is_mla else 2
        if self.layout == "layer_first":
            return (row,) * (self.layers * kinds)
        return (row * self.layers,) * kinds

    @property
    def page_bytes(self) -> int:
        """All tensors of a page."""
        return sum(self.tensor_sizes)

    @property
    def stored_bytes(self) -> int:
        """A block file of a page, with its padding and its record."""
        return -(-self.page_bytes // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT


def parse(text: str, *, page_size: int | None, tp: int, layout: str) -> Shape:
    """The shape that ``--model-shape`` names. ``page_size``, ``tp``: as of the options.

    Raises click.BadParameter.
    """
    given = PRESETS.get(text.lower())
    whole = text if given is None else f"{given},bfloat16,{page_size or PAGE_SIZE}"
    is_mla = whole.startswith("mla:")
    words = [word.strip() for word in whole.removeprefix("mla:").split(",")]
    if len(words) != 5:
        raise click.BadParameter(f"{text!r} is neither {FORMS}, nor one of {', '.join(PRESETS)}")
    *numbers, dtype, page = words
    if dtype not in _BYTES:
        raise click.BadParameter(f"dtype {dtype!r} is none of {', '.join(_BYTES)}")
    try:
        layers, second, third, tokens = (int(word) for word in (*numbers, page))
    except ValueError:
        raise click.BadParameter(f"{text!r} must have whole numbers, as in {FORMS}") from None
    if not all(1 <= number <= _MOST for number in (layers, second, third, tokens)):
        raise click.BadParameter(f"{text!r} must have numbers from 1 to {_MOST}")
    heads, dim = (1, second + third) if is_mla else (_share(second, tp), third)
    shape = Shape(text, is_mla, layers, heads, dim, dtype, page_size or tokens, layout)
    if len(shape.tensor_sizes) > _MOST_TENSORS:
        raise click.BadParameter(
            f"pages of {len(shape.tensor_sizes)} tensors in layout {layout}; at most "
            f"{_MOST_TENSORS} can be stored"
        )
    return shape


def _share(heads: int, tp: int) -> int:
    """KV heads of a rank: a part of them, or where there are more ranks than heads, one."""
    if heads % tp and tp % heads:
        raise click.BadParameter(f"--tp {tp} doesn't divide {heads} KV heads")
    return max(1, heads // tp)
