"""Tiny seeded checkpoints whose output depends on their KV.

SGLang's ``--load-format dummy`` fills weights, norms included, with +-1e-3: the output then doesn't
depend on the KV at all and every comparison of tokens is empty. These are drawn from a normal
distribution with standard deviation 0.1, norms at 1, and saved by transformers' own classes, so
names and shapes are the model's. The same arguments give the same bytes.
"""

import contextlib
import hashlib
import json
import tempfile
from pathlib import Path

#: Requests draw token ids below this.
VOCABULARY = 2048
POSITIONS = 4096
#: Tokens that Mellum's sliding-window layers see: two of the rig's pages.
WINDOW = 128

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_llama(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a tiny Llama (GQA: 4 heads, 2 KV heads, 4 layers) and return ``directory``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_COMMON, num_key_value_heads=2, head_dim=32)
    return _write(LlamaForCausalLM, config, directory, seed, dtype)


def write_deepseek(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a tiny DeepSeek-V2 (MLA: latent 64 + rope 16, 4 dense layers), return ``directory``."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **_COMMON,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=4,  # all layers dense: what is tested is their KV
    )
    # SGLang reads this older spelling, and its CPU path insists on yarn.
    yarn = {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": POSITIONS,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    # SGLang asks for moe_layer_freq, which transformers 5 no longer writes.
    extra = {"rope_scaling": yarn, "moe_layer_freq": 1}
    return _write(DeepseekV2ForCausalLM, config, directory, seed, dtype, **extra)


def write_mellum(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a tiny Mellum (GQA; all layers but one see ``WINDOW`` tokens), return ``directory``.

    Three layers in one pool and one in the other: their pages differ in size.
    """
    from transformers import MellumConfig, MellumForCausalLM

    config = MellumConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")],
        mlp_layer_types=["dense"] * 4,  # what is tested is their KV
        num_experts=4,  # of no layer, but SGLang reads these
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return _write(MellumForCausalLM, config, directory, seed, dtype)


_WRITERS = {"llama": write_llama, "deepseek": write_deepseek, "mellum": write_mellum}


def checkpoint(name: str, root: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """The ``llama``, ``deepseek`` or ``mellum`` checkpoint, written below ``root`` if need be.

    Writing imports torch and transformers, which takes longer than the rest of a test. The folder's
    name holds a digest of this file, so a changed recipe isn't mistaken for the old one.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    directory = Path(root) / f"{name}-{dtype}-{seed}-{recipe}"
    if not directory.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
            _WRITERS[name](Path(scratch) / "new", seed=seed, dtype=dtype)
            # Whoever is second finds it there and keeps the first one's, which is the same.
            with contextlib.suppress(OSError):
                (Path(scratch) / "new").rename(directory)
    return directory


def _write(model_class, config, directory: Path, seed: int, dtype: str, **overrides) -> Path:
    """``dtype`` is what ``config.json`` says; the weights are float32 whatever it is."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name:
                weight.fill_(3.0)  # attention is so sharp that the output depends on single tokens
            elif "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(directory)

    path = Path(directory) / "config.json"
    described = json.loads(path.read_text())
    described.update(overrides)
    described.pop("dtype", None)
    described["torch_dtype"] = dtype
    path.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    return Path(directory)
