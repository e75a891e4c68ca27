"""What DSPARK_ADAPTIVE refuses before any weight is loaded, one sentence each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sglang_adaptive import ALGORITHM
from sglang_adaptive.errors import AdaptiveError
from sglang_adaptive.family import DSPARK, Family, separate_draft

# (host field, value that is fine, what to say)
_UNSUPPORTED = (
    ("enable_two_batch_overlap", (None, False), "two-batch overlap: drop --enable-two-batch-overlap"),
    ("speculative_adaptive", (None, False), "SGLang's own adaptive steps: drop --speculative-adaptive"),
    (
        "speculative_dspark_sps_table_path",
        (None, ""),
        "an offline cost table, since it profiles the server itself: drop --speculative-dspark-sps-table-path",
    ),
    (
        "speculative_dspark_align_verify_tokens_to_graph_tier",
        (None, False),
        "budget alignment, which its own cost model does: drop --speculative-dspark-align-verify-tokens-to-graph-tier",
    ),
    (
        "rl_on_policy_target",
        (None,),
        "sampling on a trainer's policy, whose logprobs verification does not compute: drop --rl-on-policy-target",
    ),
    (
        "speculative_use_block_verification",
        (None, False),
        "block verification, which looks at drafts that a trim leaves out: drop --speculative-use-block-verification",
    ),
    ("disable_cuda_graph_padding", (None, False), "unpadded CUDA graphs: drop --disable-cuda-graph-padding"),
    ("enable_multi_layer_eagle", (None, False), "a draft model per position: serve with --speculative-algorithm EAGLE"),
)

# The host has no upper limit of its own, except for DeepSeek-V4, where its pools hold 130 tokens in flight at most. No
# published draft has more than 16, and a token so deep in a block is all but never accepted.
_LARGEST_BLOCK = 128

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def _refuse(reason: str) -> None:
    raise AdaptiveError(f"{ALGORITHM} does not work with {reason}.")


def before(server_args: Any, family: Family) -> None:
    """Refuse flags that cannot work, and a missing or foreign draft. Raises AdaptiveError."""
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    for field, fine, reason in _UNSUPPORTED:
        if getattr(cfg, field, None) not in fine:
            _refuse(reason)
    if cfg.pp_size != 1:
        _refuse("pipeline parallelism: drop --pipeline-parallel-size")
    if cfg.attn_dp_size > 1:
        _refuse("data-parallel attention: drop --enable-dp-attention, or serve with --speculative-algorithm DSPARK")
    if cfg.disaggregation_mode != "null":
        _refuse("prefill/decode disaggregation: drop --disaggregation-mode, or select --speculative-algorithm DSPARK")
    if family is not DSPARK:
        path = separate_draft(server_args)
        if path is not None:
            _check_target(path, _draft_config(path, cfg), server_args)
        return
    path = _draft_path(server_args, cfg)
    if path is None:
        from sglang.srt.arg_groups.overrides import model_config_of

        _check_block(cfg.model_path, model_config_of(server_args).hf_config, cfg)
    else:
        draft = _draft_config(path, cfg)
        _check_block(path, draft, cfg)
        _check_family(path, draft)
        _check_confidence_head(path, draft)
        _check_match(path, draft, server_args)


def after(server_args: Any) -> None:
    """Refuse verify lengths that the resolved block cannot have. Raises AdaptiveError."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_adaptive.options import Options, variable

    width = int(resolving_view(server_args).speculative_num_draft_tokens)
    options = Options.from_env(os.environ)
    for name in ("min_verify_len", "max_verify_len"):
        value = getattr(options, name)
        if value is not None and value > width:
            raise AdaptiveError(
                f"Option {name} ({variable(name)}) is {value}, but a request of this draft verifies at most {width} "
                "tokens in a step (its block plus the anchor)."
            )


def _draft_path(server_args: Any, cfg: Any) -> str | None:
    """Path or hub name of the draft; None when the target's checkpoint carries it."""
    from sglang.srt.arg_groups import speculative_hook

    if cfg.speculative_draft_model_path is not None:
        return str(cfg.speculative_draft_model_path)
    if speculative_hook._target_checkpoint_bundles_dspark_draft(server_args):
        return None
    found = speculative_hook._target_checkpoint_dspark_subfolder(cfg.model_path, cfg.revision, cfg.download_dir)
    if found is None:
        raise AdaptiveError(
            f"{ALGORITHM} needs a draft model, and {cfg.model_path} carries none (neither DSpark nor MTP): "
            "name one with --speculative-draft-model-path."
        )
    return str(found)


def _draft_config(path: str, cfg: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_config

    if os.path.isabs(path) and not os.path.exists(path):
        raise AdaptiveError(
            f"The draft model {path} does not exist: name the folder or hub name of a DSpark checkpoint."
        )
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise AdaptiveError(f"The draft model {path} has no config.json: name the folder of a DSpark checkpoint.")
        if cfg.load_format != "dummy" and not any(name.endswith(_WEIGHTS) for name in os.listdir(path)):
            raise AdaptiveError(f"The draft model {path} has no weights: name the folder of a whole DSpark checkpoint.")
    try:
        return get_config(
            path,
            trust_remote_code=cfg.trust_remote_code,
            revision=cfg.speculative_draft_model_revision,
            model_override_args=json.loads(cfg.json_model_override_args),
        )
    except Exception as error:
        raise AdaptiveError(
            f"The draft model {path} cannot be read ({type(error).__name__}: {str(error).splitlines()[0][:200]}): name "
            "a DSpark checkpoint with --speculative-draft-model-path."
        ) from error


def _check_block(path: str, draft: Any, cfg: Any) -> None:
    """Whether K, the drafts per step, is possible. The host takes it from its flag, else from the first of these fields
    that the draft has, cut to a whole number, else it assumes 7; a field that it cannot read it passes over."""
    section = getattr(draft, "dflash_config", None)
    fields = (
        getattr(draft, "dspark_block_size", None),
        section.get("block_size") if isinstance(section, dict) else None,
        getattr(draft, "block_size", None),
    )
    in_draft = next((value for value in fields if value is not None), None)
    if not _is_block(in_draft):
        raise AdaptiveError(
            f"The draft model {path} has the block size {in_draft!r} in its config.json, which must be a whole number "
            f"from 1 to {_LARGEST_BLOCK}: download it again, or use another draft."
        )
    flag = getattr(cfg, "speculative_dspark_block_size", None)
    if not _is_block(flag):
        raise AdaptiveError(
            f"--speculative-dspark-block-size is {flag}, but must be a whole number from 1 to {_LARGEST_BLOCK}: drop "
            "it, and the draft's own is taken."
        )


def _is_block(value: Any) -> bool:
    """None, which leaves the choice to the host, is fine."""
    if value is None:
        return True
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_BLOCK


def _check_family(path: str, draft: Any) -> None:
    from sglang.srt.speculative.dspark_components.dspark_config import parse_dspark_draft_config

    names = [str(name) for name in getattr(draft, "architectures", None) or []]
    try:
        is_dspark = parse_dspark_draft_config(draft_hf_config=draft).require_markov()
    except Exception:
        is_dspark = False
    if is_dspark:
        return
    shown = ", ".join(names) or "an unknown architecture"
    raise AdaptiveError(
        f"The draft model {path} is {shown}, which is neither a DSpark draft (it has no Markov head) nor an EAGLE, "
        "EAGLE3 or MTP draft: name such a checkpoint with --speculative-draft-model-path."
    )


def _nested(config: Any, key: str, default: Any = None) -> Any:
    """A field of the draft's configuration, which exporters put at the top or under dspark_config or dflash_config."""
    value = getattr(config, key, None)
    for section in ("dspark_config", "dflash_config"):
        fields = getattr(config, section, None)
        if value is None and isinstance(fields, dict):
            value = fields.get(key)
    return default if value is None else value


def _check_confidence_head(path: str, draft: Any) -> None:
    missing = not _nested(draft, "enable_confidence_head", True)
    if not missing and os.path.isdir(path):
        try:
            names = _weight_names(Path(path))
        except Exception as error:
            raise AdaptiveError(
                f"The weights of the draft model {path} cannot be read ({type(error).__name__}): download it again."
            ) from error
        missing = bool(names) and not any(name.startswith("confidence_head.") for name in names)
    if missing:
        raise AdaptiveError(
            f"The draft model {path} has no confidence head, which {ALGORITHM} sizes its verification by: use a DSpark "
            "checkpoint trained with one, or serve this one with --speculative-algorithm DSPARK."
        )


def _weight_names(folder: Path) -> set[str]:
    """Names of the tensors in a local safetensors checkpoint, read from the headers only; none for another format."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text())["weight_map"])
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as weights:
            names.update(weights.keys())
    return names


def _check_match(path: str, draft: Any, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    target = model.hf_text_config
    if getattr(draft, "model_type", "") == getattr(target, "model_type", "").replace("_text", "") == "deepseek_v4":
        return
    pairs = (
        ("vocabulary size", getattr(draft, "vocab_size", None), model.vocab_size),
        ("hidden size", getattr(draft, "hidden_size", None), model.hidden_size),
        ("number of target layers", _nested(draft, "num_target_layers"), model.num_hidden_layers),
    )
    layers = _nested(draft, "target_layer_ids") or []
    if any(not 0 <= int(layer) <= model.num_hidden_layers for layer in layers):
        raise AdaptiveError(
            f"The draft model {path} reads target layers {list(layers)}, but {server_args.model_path} has "
            f"{model.num_hidden_layers}: use the draft that belongs to it."
        )
    _refuse_foreign(path, pairs, server_args)


def _check_target(path: str, draft: Any, server_args: Any) -> None:
    """Whether an EAGLE, EAGLE3 or MTP draft reads the target's hidden states and shares its vocabulary."""
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    text = getattr(draft, "text_config", draft)
    read = getattr(draft, "target_hidden_size", None) or getattr(text, "hidden_size", None)
    pairs = (
        ("vocabulary size", getattr(text, "vocab_size", None), model.vocab_size),
        ("hidden size", read, model.hidden_size),
    )
    _refuse_foreign(path, pairs, server_args)


def _refuse_foreign(path: str, pairs: Any, server_args: Any) -> None:
    for what, of_draft, of_target in pairs:
        if of_draft is not None and of_target is not None and int(of_draft) != int(of_target):
            raise AdaptiveError(
                f"The draft model {path} was trained for another target: its {what} is {of_draft}, the target's "
                f"{of_target}; use the draft that belongs to {server_args.model_path}."
            )
