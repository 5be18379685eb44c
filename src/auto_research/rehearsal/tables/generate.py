"""Generate the rule tables of the installed torch: ``python -m auto_research.rehearsal.tables.generate``.

Everything comes from files that the wheel ships: the operator registry (``native_functions.yaml``), the operator test
database (``op_db``), the autocast header, and the docstring of ``use_deterministic_algorithms``. Run it in a plain
process (no rehearsal active); it writes ``torch_<minor>.json`` beside this file.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from . import _HERE, minor_of

#: CPU-only kernels that stand for an operator which has its own CUDA path.
CPU_INTERNAL = re.compile(
    r"^(mkldnn_rnn_layer|mkldnn_|_mkldnn|_scaled_dot_product_flash_attention_for_cpu|slow_conv3d|narrow_copy|"
    r"_nested_|quantized_|_test_|_foobar|_make_dep_token|from_file|_functional_assert_async|_spdiags|"
    r"quantize_per_tensor|dequantize)"
)
#: op_db entries whose name is not the operator that reaches the dispatcher.
REACHES = {
    "nn.functional.conv1d": ["convolution"],
    "nn.functional.conv2d": ["convolution"],
    "nn.functional.conv3d": ["convolution"],
    "nn.functional.linear": ["addmm", "mm"],
    "nn.functional.max_pool2d": ["max_pool2d_with_indices"],
    "nn.functional.max_pool3d": ["max_pool3d_with_indices"],
    "nn.functional.upsample_bilinear": ["upsample_bilinear2d"],
    "nn.functional.interpolate:bicubic": ["upsample_bicubic2d"],
    "addmm": ["addmm", "_sparse_addmm"],
    "__rmatmul__": ["mm", "bmm", "mv", "dot"],
    "matmul": ["mm", "bmm", "mv", "dot"],
    "cumulative_trapezoid": [],
}


def _registry() -> tuple[list[str], list[str], list[str]]:
    """Pointwise, otherwise unchecked, and CPU-only overloads of the operator registry."""
    import torchgen.packaged  # type: ignore[import-untyped]
    import yaml

    path = Path(next(iter(torchgen.packaged.__path__))) / "ATen" / "native" / "native_functions.yaml"
    text = path.read_text()
    pointwise: list[str] = []
    unchecked: list[str] = []
    for block in text.split("\n- func: ")[1:]:
        name = block.split("(", 1)[0].strip()
        match = re.search(r"^\s+device_check:\s*NoCheck\s*(#.*)?$", block, re.MULTILINE)
        if match:
            (pointwise if "TensorIterator" in (match.group(1) or "") else unchecked).append(name)
    cpu_only = []
    for entry in yaml.safe_load(text):
        keys = {key.strip() for group in entry.get("dispatch") or {} for key in group.split(",")}
        name = entry["func"].split("(", 1)[0]
        has_cuda = any("CUDA" in key or "Composite" in key for key in keys)
        on_cpu = any("CPU" in key for key in keys)
        if on_cpu and not has_cuda and not entry.get("structured_delegate") and not CPU_INTERNAL.match(name):
            cpu_only.append(name)
    return sorted(pointwise), sorted(unchecked), sorted(cpu_only)


def operator_database() -> list[Any]:
    """torch's operator test database, with the dtypes of a CUDA build on an sm_80 card in `dtypesIfCUDA`.

    Importing it forbids the process to set `torch.backends` flags from then on; that is undone here.
    """
    real = (torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_capability)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    was, mutable = torch.version.cuda, not torch.backends.flags_frozen()
    torch.version.cuda = "12.8"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
    finally:
        torch.version.cuda = was
        torch.cuda.is_available, torch.cuda.device_count, torch.cuda.get_device_capability = real
        torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = mutable
    return list(op_db)


def _dtype_gaps() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Per dispatcher operator: dtypes only the CPU has, and dtypes only CUDA (sm_80) has, from the op database."""
    missing: dict[str, set[str]] = {}
    emulated: dict[str, set[str]] = {}
    cuda_has: dict[str, set[str]] = {}
    for op in operator_database():
        variant = REACHES.get(f"{op.name}:{op.variant_test_name}")
        names = variant or REACHES.get(op.name, [op.aten_name or op.name])
        if op.name in ("scatter_reduce", "index_reduce"):  # each reduction has dtypes of its own
            names = [f"{op.name}:{op.variant_test_name}"]
        cuda = {str(dtype).removeprefix("torch.") for dtype in op.dtypesIfCUDA}
        cpu = {str(dtype).removeprefix("torch.") for dtype in op.dtypes}
        for name in names:
            if not hasattr(torch.ops.aten, name.split(":")[0]):
                continue
            cuda_has.setdefault(name, set()).update(cuda)
            if cpu - cuda:
                missing.setdefault(name, set()).update(cpu - cuda)
            if cuda - cpu:
                emulated.setdefault(name, set()).update(cuda - cpu)
    gaps = {
        name: sorted(dtypes - cuda_has[name]) for name, dtypes in sorted(missing.items()) if dtypes - cuda_has[name]
    }
    return gaps, {name: sorted(dtypes) for name, dtypes in sorted(emulated.items())}


def _autocast() -> dict[str, str]:
    """CUDA autocast policy of every overload, from ``ATen/autocast_mode.h``, checked against the dispatcher."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    policy: dict[str, str] = {}
    macros = {
        "AT_FORALL_LOWER_PRECISION_FP": "lower",
        "AT_FORALL_FP32": "fp32",
        "AT_FORALL_FP32_SET_OPT_DTYPE": "fp32_set_dtype",
        "AT_FORALL_PROMOTE": "promote",
    }
    for macro, kind in macros.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.DOTALL)
        if body is None:
            raise RuntimeError(f"autocast_mode.h of torch {torch.__version__} has no {macro}")
        for name, overload in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1)):
            policy[f"{name}.{overload}" if overload else name] = kind
    for name in re.findall(r'"(norm\.\w+)"', header):
        policy[name] = "fp32_append_dtype"
    registered = {
        name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    for name in registered - policy.keys():
        policy[name] = "banned" if name == "binary_cross_entropy" else "lower"
    return {name: policy[name] for name in sorted(policy) if name in registered}


def _nondeterministic() -> dict[str, str]:
    """Operators that raise in deterministic mode, from the docstring: name in the docs -> its sentence."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    tail = re.split(r"will throw a\s+:class:`RuntimeError` when ``mode=True``:", text)[1].split("In addition", 1)[0]
    found: dict[str, str] = {}
    for item in re.split(r"\n\s+\* ", tail)[1:]:
        sentence = " ".join(item.split())
        match = re.match(r":\w+:`([\w.]+)`", sentence)
        if match:
            name = match.group(1).removeprefix("torch.")
            clean = re.sub(r":\w+:`([^`]+)`", r"\1", sentence)
            found[name] = f"{found[name]}; {clean}" if name in found else clean
    return found


def generate() -> dict[str, Any]:
    """All tables of the installed torch as one JSON-ready mapping."""
    pointwise, unchecked, cpu_only = _registry()
    missing, emulated = _dtype_gaps()
    return {
        "torch": minor_of(torch.__version__),
        "pointwise": pointwise,
        "unchecked": unchecked,
        "cpu_only": cpu_only,
        "missing_dtypes": missing,
        "emulated_dtypes": emulated,
        "autocast": _autocast(),
        "nondeterministic": _nondeterministic(),
    }


def main() -> None:
    """Write ``torch_<minor>.json`` beside this file."""
    data = generate()
    path = _HERE / f"torch_{data['torch'].replace('.', '_')}.json"
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{path}: " + ", ".join(f"{key} {len(value)}" for key, value in data.items()) + "\n")


if __name__ == "__main__":
    main()
