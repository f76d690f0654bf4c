"""The alphabet: letters for array dimensions and the six mesh axes.

An array's name ends in its letters (``x_BTD``), einsums are written in the same letters, and a layout
maps letters to axes. Letters are logical dimensions, never shards.
"""

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""The mesh axes, slowest link first. All always exist; an unused one has degree 1."""

LETTERS = {
    "B": "batch",
    "T": "query tokens",
    "S": "key tokens",
    "D": "model",
    "F": "feed-forward",
    "V": "vocabulary",
    "N": "query heads",
    "K": "key/value heads",
    "G": "query heads per key/value head (N/K)",
    "H": "head size",
    "E": "experts",
    "C": "capacity",
    "L": "layers",
    "M": "microbatches",
    "P": "positions of a learned position table",
}

BATCH_AXES = ("data", "fsdp", "expert")
"""The axes that split the batch."""

TOKEN_AXES = (*BATCH_AXES, "context")
"""The axes over which different devices see different tokens: a loss is a sum over all of them."""

ZERO_AXES = ("fsdp", "expert", "context")
"""The axes that may hold shards of the model dimension of a weight (ZeRO)."""
