"""Weights files: which tensors they hold, under whose names, and whether a network can take them.

timm's and torchvision's files are read, safetensors or torch's (which are read as tensors alone: no
code in them is run), also where the tensors lie within a training checkpoint or were saved from a
wrapped network. Where the two libraries name the parts of one network differently, the names of
torchvision's are turned into timm's for vision transformers and MobileNetV2; those of ResNets,
ResNeXts, Wide ResNets and DenseNets are the same. What timm itself converts when it loads (the
original files of ConvNeXt, Swin and others) is left to timm.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from datasets.errors import DataCorrupt, DataMissing
from methods.torchvision_shim import import_timm

State = dict[str, Tensor]

NESTS = ("state_dict", "model", "model_state_dict")
"""Under what training checkpoints keep the tensors."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""What wrappers put before every name: data parallelism, torch.compile, Lightning."""
CLASSIFIERS = ("fc", "head", "heads", "head_dist", "classifier", "last_linear", "pre_logits", "aux")
"""First parts of names of classifiers, which are replaced and may be missing or left over."""
COUNTER = "num_batches_tracked"  # of batch norms; older files lack it, and nothing reads it
SHOWN = 2  # differing tensors of a kind that a message names


def load_weights(network: nn.Module, weights: str | None, name: str = "the backbone") -> None:
    """Fill a network from a weights file; raise `DataCorrupt` where it is another network's."""
    if weights is None or not Path(weights).is_file():
        raise DataMissing(
            f"ImageNet weights are not on disk ({weights or 'no file given'})",
            "python -m bench data get weights, or --set backbone.weights=FILE, or train from "
            "scratch with --set backbone.pretrained=false",
        )
    network.load_state_dict(fitting_state(network, Path(weights), name), strict=False)


def fitting_state(network: nn.Module, path: Path, name: str = "the backbone") -> State:
    """Return the tensors of a file by the network's names; the network may be without data.

    Raises:
        DataCorrupt: the file cannot be read, or it lacks a tensor of the network, has another size
            of one, or more of the same parts; the message names the first of each.
    """
    given = read_state(path)
    wanted = network.state_dict()
    state = converted(given, network)
    state = _with_channels(state, wanted, _first_layer(network))
    differences = _differences(state, wanted, _classifiers(network))
    if differences:
        raise DataCorrupt(f"{path} does not fit {name}: {'; '.join(differences)}", _remedy(given))
    return {key: value for key, value in state.items() if key in wanted}


def read_state(path: Path) -> State:
    """Read the tensors of a file by name, without what they were wrapped in."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return _unwrapped(load_file(path))
        return _unwrapped(_tensors(torch.load(path, map_location="cpu", weights_only=True)))
    except UnpicklingError as error:
        what = re.search(r"(?:global|GLOBAL|class) (\S+)", str(error))
        more = f" ({what[1]})" if what else ""
        raise DataCorrupt(
            f"{path} is not a readable weights file: it holds more than tensors{more}, and nothing "
            "but tensors is read from files",
            "open it where it was made and save its tensors alone: "
            "torch.save(checkpoint['state_dict'], FILE)",
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise DataCorrupt(
            f"{path} is not a readable weights file: {reason[0] if reason else repr(error)}",
            "fetch it again",
        ) from error


def _tensors(content: Any) -> State:
    """Return what of a checkpoint is tensors by name, which may lie deeper in it."""
    if isinstance(content, Mapping):
        for nest in NESTS:
            if isinstance(content.get(nest), Mapping):
                return _tensors(content[nest])
        found = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
        if found:
            return found
        keys = ", ".join(map(str, list(content)[:6]))
        raise ValueError(f"there are no tensors in it, only {keys or 'nothing'}")
    raise ValueError(f"it holds a {type(content).__name__} instead of tensors by name")


def _unwrapped(state: State) -> State:
    """Drop what wrappers put before every name."""
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            return _unwrapped({key.removeprefix(prefix): value for key, value in state.items()})
    return state


def converted(state: State, network: nn.Module) -> State:
    """Return tensors under timm's names where they have torchvision's, or those timm converts."""
    wanted = network.state_dict()

    def complete(names: State) -> bool:
        return all(key in names or key.endswith(COUNTER) for key in wanted)

    if complete(state):
        return _as_timm_loads(state, network) if _sizes_differ(state, wanted) else state
    others = [state]
    for rename in (vit_from_torchvision, mobilenet_v2_from_torchvision):
        others.append({rename(key): value for key, value in state.items()})
    others += [_as_timm_loads(other, network) for other in others]
    # Where nothing fits, a message is to show the names that the file has.
    return next((other for other in others if complete(other)), state)


def _sizes_differ(state: State, wanted: Mapping[str, Tensor]) -> bool:
    return any(key in wanted and wanted[key].shape != state[key].shape for key in state)


def _as_timm_loads(state: State, network: nn.Module) -> State:
    """Convert a file by timm, which knows how for the original files of some networks.

    It also resizes the position embeddings of a transformer that were trained at another size.
    """
    convert: Callable[..., State] | None
    convert = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        with contextlib.suppress(Exception):  # it was not made for such a file
            return dict(convert(dict(state), network))
    return state


def vit_from_torchvision(name: str) -> str:
    """Return timm's name of a tensor of torchvision's VisionTransformer."""
    for pattern, replacement in (
        (r"^class_token$", "cls_token"),
        (r"^conv_proj\.", "patch_embed.proj."),
        (r"^encoder\.pos_embedding$", "pos_embed"),
        (r"^encoder\.ln\.", "norm."),
        (r"^heads\.head\.", "head."),
        (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"\.self_attention\.in_proj_(weight|bias)$", r".attn.qkv.\1"),
        (r"\.self_attention\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.(?:linear_1|0)\.", ".mlp.fc1."),
        (r"\.mlp\.(?:linear_2|3)\.", ".mlp.fc2."),
    ):
        name = re.sub(pattern, replacement, name)
    return name


MOBILENET_V2_REPEATS = (1, 2, 3, 4, 3, 3, 1)


def mobilenet_v2_from_torchvision(name: str) -> str:
    """Return timm's name of a tensor of torchvision's MobileNetV2."""
    found = re.match(r"^features\.(\d+)\.(.+)$", name)
    if found is None:
        return re.sub(r"^classifier\.1\.", "classifier.", name)
    number, rest = int(found[1]), found[2]
    last = 1 + sum(MOBILENET_V2_REPEATS)
    if number in (0, last):
        part = ("conv_stem", "bn1") if number == 0 else ("conv_head", "bn2")
        return re.sub(r"^([01])\.", lambda m: f"{part[int(m[1])]}.", rest)
    block, stage = number - 1, 0
    while stage < len(MOBILENET_V2_REPEATS) - 1 and block >= MOBILENET_V2_REPEATS[stage]:
        block, stage = block - MOBILENET_V2_REPEATS[stage], stage + 1
    # The first block has no expansion, so that all its layers come one place earlier.
    layers = {"0.0": "conv_pw", "0.1": "bn1", "1.0": "conv_dw", "1.1": "bn2", "2": "conv_pwl"}
    layers |= {"3": "bn3"}
    if number == 1:
        layers = {"0.0": "conv_dw", "0.1": "bn1", "1": "conv_pw", "2": "bn2"}
    inner = re.sub(r"^conv\.(\d\.\d|\d)\.(?=\D)", lambda m: f"{layers.get(m[1], m[1])}.", rest)
    return f"blocks.{stage}.{block}.{inner}"


def _first_layer(network: nn.Module) -> str:
    """Return the name of the weights that see the image; empty where that is not known."""
    first = (getattr(network, "pretrained_cfg", None) or {}).get("first_conv") or ""
    return f"{first}.weight" if isinstance(first, str) and first else ""


def _with_channels(state: State, wanted: Mapping[str, Tensor], first: str) -> State:
    """Adapt the first layer of colour images to other channels, as timm does."""
    if first not in state or first not in wanted:
        return state
    given, own = state[first], wanted[first]
    if given.ndim != 4 or own.ndim != 4 or given.shape[1] != 3 or own.shape[1] == 3:
        return state
    return {**state, first: import_timm().models.adapt_input_conv(own.shape[1], given)}


def _classifiers(network: nn.Module) -> set[str]:
    named = (getattr(network, "pretrained_cfg", None) or {}).get("classifier") or ()
    parts = (named,) if isinstance(named, str) else tuple(named)
    return {*CLASSIFIERS, *(part.partition(".")[0] for part in parts)}


def _differences(state: State, wanted: Mapping[str, Tensor], classifiers: set[str]) -> list[str]:
    """Describe how a file differs from a network; nothing where it fits."""

    def shown(count: int, texts: list[str]) -> str:
        more = f" and {count - len(texts)} more" if count > len(texts) else ""
        return ", ".join(texts) + more

    lacking = [key for key in wanted if key not in state and not key.endswith(COUNTER)]
    others = [key for key in wanted if key in state and state[key].shape != wanted[key].shape]
    # What belongs to parts that the network has, too: a larger network's file has all it needs.
    parts = {key.partition(".")[0] for key in wanted} - classifiers
    left = [
        key
        for key in state
        if key not in wanted and key.partition(".")[0] in parts and not key.endswith(COUNTER)
    ]
    found = []
    if lacking:
        named = [f"{key} {tuple(wanted[key].shape)}" for key in lacking[:SHOWN]]
        found.append(f"it lacks {shown(len(lacking), named)}")
    if others:
        named = [
            f"{key} is {tuple(state[key].shape)} in it and {tuple(wanted[key].shape)} in the "
            "network"
            for key in others[:SHOWN]
        ]
        found.append(shown(len(others), named))
    if left:
        named = [f"{key} {tuple(state[key].shape)}" for key in left[:SHOWN]]
        found.append(f"it has {shown(len(left), named)}, which the network has not")
    elif lacking:
        rest = [key for key in state if key not in wanted][:SHOWN]
        if rest:
            found.append(f"it begins with {', '.join(rest)}")
    return found


def _remedy(given: State) -> str:
    """Return what to do about a file of another network, or of other names."""
    torchvisions = any(
        re.match(r"^(features\.\d+\.\d|encoder\.layers\.|stages?\.)", k) for k in given
    )
    if torchvisions and not any(key.startswith("blocks.") for key in given):
        return (
            "its names look like torchvision's or an original repository's, and this network's are "
            "not converted: give timm's file of it (hf.co/timm), or a ResNet, vision transformer "
            "or MobileNetV2 of torchvision's"
        )
    return "give the weights of this very architecture, or name theirs with --backbone"
