"""Chips: peak arithmetic rate and memory, each with its source; what a speed is compared with.

Rates are dense bfloat16 with float32 accumulation, without sparsity. Nothing is assumed about a chip that is not here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One accelerator as its maker states it."""

    name: str
    kinds: tuple[str, ...]
    """Beginnings of JAX's `Device.device_kind` for this chip."""
    bf16_flops_per_s: float
    hbm_bytes: float
    source: str


CHIPS = (
    Chip(
        "H200 NVL",
        ("NVIDIA H200 NVL",),
        835.5e12,
        141e9,
        "NVIDIA H200 datasheet, H200 NVL (1,671 TFLOPS with sparsity)",
    ),
    Chip(
        "H200",
        ("NVIDIA H200",),
        989.4e12,
        141e9,
        "NVIDIA H200 Tensor Core GPU datasheet, H200 SXM (1,979 TFLOPS with sparsity)",
    ),
    Chip("H100 PCIe", ("NVIDIA H100 PCIe",), 756e12, 80e9, "NVIDIA H100 Tensor Core GPU datasheet 2022, PCIe"),
    Chip("H100 NVL", ("NVIDIA H100 NVL",), 835.5e12, 94e9, "NVIDIA H100 Tensor Core GPU datasheet, NVL"),
    Chip(
        "H100 SXM",
        ("NVIDIA H100",),
        989.4e12,
        80e9,
        "NVIDIA H100 Tensor Core GPU architecture white paper, table 2, SXM5",
    ),
    Chip("A100 40 GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 312e12, 40e9, "NVIDIA A100 datasheet"),
    Chip("A100 80 GB", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB"), 312e12, 80e9, "NVIDIA A100 80GB datasheet"),
    Chip("TPU v4", ("TPU v4",), 275e12, 32 * 2**30, "Google Cloud documentation, TPU v4"),
    Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * 2**30, "Google Cloud documentation, TPU v5e"),
    Chip("TPU v5p", ("TPU v5",), 459e12, 95 * 2**30, "Google Cloud documentation, TPU v5p"),
    Chip("TPU v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * 2**30, "Google Cloud documentation, TPU v6e"),
)
"""The known chips; of two whose kinds share a beginning, the longer stands first."""


def chip(device_kind: str) -> Chip | None:
    """The chip of JAX's `device_kind`, or None where it is not known (a CPU, or a chip without an entry)."""
    return next((c for c in CHIPS if device_kind.startswith(c.kinds)), None)


def mfu(flops_per_step: float, step_s: float, device_kind: str, device_count: int) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), a share; None for an unknown chip.

    `flops_per_step` counts the model's own arithmetic of one step over all devices, without rematerialisation.
    """
    known = chip(device_kind)
    return None if known is None or step_s <= 0 else flops_per_step / (step_s * device_count * known.bf16_flops_per_s)
