"""The keys of a config, in five groups, each with its type, default, range, unit and meaning.

Names are the JSON keys. `config.load_config` fills these from a file and checks what involves several keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh_transformer import storage
from mesh_transformer.config_fields import BOOL, FLOAT, INT, MAPPING, REQUIRED, STRING, STRINGS, key
from mesh_transformer.errors import ConfigError

NORMS = (
    "layernorm",
    "layernorm-nobias",
    "layernorm-desync",
    "rmsnorm",
    "rmsnorm-bias",
    "scalenorm",
    "scalenorm-bias",
)
POSITIONS = ("rotary", "t5", "fixed")
DTYPES = ("float32", "bfloat16", "float16")


def period(meaning: str, default: int | None = 0, **rules: Any) -> Any:
    """A number of steps between two runs of something; 0 and null turn it off."""
    return key(INT, default, meaning + "; 0 or null: never", low=0, unit="steps", null=0, **rules)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. Sizes are of the whole model, never of a shard."""

    version: int = key(INT, 1, "network: 1 Megatron-style (GPT-J), 2 ZeRO-style", low=1, high=2, null=1, agrees=True)
    layers: int = key(INT, REQUIRED, "residual layers", low=1, agrees=True)
    d_model: int = key(INT, REQUIRED, "width of the residual stream", low=1, agrees=True)
    n_heads: int = key(INT, REQUIRED, "attention heads", low=1, agrees=True)
    n_vocab: int = key(
        INT, REQUIRED, "rows of the embedding; at least the tokenizer's size", low=2, unit="tokens", agrees=True
    )
    seq: int = key(INT, REQUIRED, "context length", low=1, unit="tokens", agrees=True)
    head_size: int | None = key(
        INT,
        None,
        "size of a head; another one than d_model / n_heads only in version 2",
        name="d_head",
        derived="d_model / n_heads",
        low=1,
        agrees=True,
    )
    norm: str = key(
        STRING, "layernorm", "kind of normalisation; version 2 has layernorm alone", choices=NORMS, agrees=True
    )
    pe: str = key(
        STRING, "rotary", "kind of position encoding; version 2 has rotary alone", choices=POSITIONS, agrees=True
    )
    pe_rotary_dims: int = key(
        INT,
        None,
        "leading dimensions of each head that rotary turns; even, at most the head size",
        derived="the head size",
        low=2,
        agrees=True,
    )
    compute_dtype: str | None = key(
        STRING,
        None,
        "type of activations and matmul inputs",
        derived="float32 on CPU, else bfloat16",
        choices=DTYPES,
        agrees=True,
    )
    remat: str = key(
        STRING,
        "auto",
        "what the backward pass recomputes; auto decides by memory",
        choices=("auto", "none", "dots", "full"),
        null="auto",
    )
    logit_chunk: int = key(INT, 512, "positions whose logits exist at once", low=1, unit="tokens")
    z_loss: str = key(
        STRING,
        "reference",
        "the 1e-4 z-loss of training; reference takes it after the maximum is subtracted, log_z before",
        choices=("reference", "log_z", "off"),
        agrees=True,
    )
    early_cast: bool = key(BOOL, False, "keep parameters in 16 bits; only where there is no optimizer")
    v2_merged_heads: int | None = key(
        INT,
        None,
        "version 2: shards that a reference checkpoint was trained with, to reproduce its merged heads",
        derived="real heads, n_heads of d_head",
        low=1,
        agrees=True,
    )

    def __post_init__(self) -> None:
        if self.pe_rotary_dims is None:
            object.__setattr__(self, "pe_rotary_dims", self.d_head)
        # Guards dataclasses.replace, which knows nothing of what was derived from what.
        if self.pe == "rotary" and self.pe_rotary_dims > self.d_head:
            raise ConfigError(f"pe_rotary_dims ({self.pe_rotary_dims}) must be at most the head size ({self.d_head})")

    @property
    def d_head(self) -> int:
        return self.head_size or self.d_model // self.n_heads

    @property
    def d_attention(self) -> int:
        """Width of all heads together; another one than d_model only in version 2."""
        return self.n_heads * self.d_head

    @property
    def attention_heads(self) -> int:
        """Heads that attention works with: n_heads, or the merged ones of a reference checkpoint of version 2."""
        return self.v2_merged_heads or self.n_heads

    @property
    def attention_width(self) -> int:
        """Size of one of the `attention_heads`."""
        return self.d_attention // self.attention_heads

    @property
    def d_ff(self) -> int:
        return 4 * self.d_model


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the model and the batch are split over devices."""

    cores_per_replica: int = key(INT, 1, "model-parallel parts of one replica", low=1, unit="devices")
    per_replica_batch: int = key(INT, 1, "sequences of one replica in one microbatch", low=1, unit="sequences")
    gradient_accumulation_steps: int = key(INT, 1, "microbatches per update", low=1, unit="microbatches")
    tpu_size: int | None = key(
        INT,
        None,
        "devices the config was made for; decides nothing, a run says so where it differs",
        low=1,
        unit="devices",
    )
    zero_stage: int = key(
        INT,
        None,
        "what is sharded over dp too: 0 nothing, 1 Adam's moments, 3 weights and gradients as well",
        derived="0; in version 2 3",
        choices=(0, 1, 3),
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Adam and its learning-rate schedule: linear warm-up, cosine from lr to end_lr, then constant."""

    lr: float = key(FLOAT, 1e-4, "peak learning rate", above=0, agrees=True)
    end_lr: float = key(FLOAT, None, "learning rate after annealing; at most lr", derived="lr / 10", low=0, agrees=True)
    warmup_steps: int = key(
        INT, None, "steps from 0 to lr", derived="5 % of total_steps", low=0, unit="steps", agrees=True
    )
    anneal_steps: int = key(
        INT, None, "steps from lr to end_lr", derived="total_steps - warmup_steps", low=0, unit="steps", agrees=True
    )
    weight_decay: float = key(FLOAT, 0.1, "decay of matrices; biases and norms are exempt", low=0, agrees=True)
    b1: float = key(FLOAT, 0.9, "Adam's decay of the first moment", low=0, below=1, agrees=True)
    b2: float = key(FLOAT, 0.999, "Adam's decay of the second moment", low=0, below=1, agrees=True)
    eps: float = key(FLOAT, 1e-8, "added to the root of Adam's second moment", above=0, agrees=True)
    max_grad_norm: float = key(FLOAT, 1.0, "gradients are clipped to this global norm", above=0, agrees=True)
    bf16_optimizer: bool = key(
        BOOL, False, "version 2: keep Adam's moments in 16 bits; refused in training", agrees=True
    )
    v2_decay_vectors: bool = key(
        BOOL, False, "version 2: decay stacked norms and biases too, as the reference did", agrees=True
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read. Relative train_set and val_set entries lie under data_dir; URLs and absolute paths stand alone."""

    train_set: str = key(STRING, REQUIRED, "index file of the training records", example="text.train.index")
    val_set: Mapping[str, str] = key(
        MAPPING, {}, "index files of the validation records, by name", null={}, example='{"text": "text.val.index"}'
    )
    data_dir: str = key(STRING, "data", "folder of relative train_set and val_set entries")
    val_batches: int = key(INT, 100, "batches of one validation; 0 or null: none", low=0, null=0, unit="batches")
    val_batch_multiplier: int = key(INT, 1, "size of a validation batch relative to per_replica_batch * dp", low=1)
    shuffle: bool = key(BOOL, False, "reorder the records in each epoch, by seed", agrees=True)
    epochs: float | None = key(FLOAT, None, "passes over train_set, instead of total_steps", above=0, unit="epochs")
    tokenizer: str = key(STRING, "gpt2", "a tokenizer file, a folder with one, or a hub name")

    @property
    def train_path(self) -> str:
        """The training index, with data_dir in front where train_set is relative."""
        return storage.join(self.data_dir, self.train_set)

    @property
    def val_paths(self) -> dict[str, str]:
        """The validation indexes by name, with data_dir in front of relative ones."""
        return {name: storage.join(self.data_dir, entry) for name, entry in self.val_set.items()}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length of the run, where it lives, and what happens how often."""

    total_steps: int = key(
        INT, None, "updates of the run", derived="epochs, when the records are counted", low=1, unit="steps"
    )
    seed: int = key(INT, 42, "initialisation and data order", low=0, high=2**32 - 1, agrees=True)
    name: str = key(STRING, None, "name of the run, for trackers", derived="the config file's name")
    model_dir: str = key(STRING, None, "where checkpoints and metrics go", derived="runs/ and name")
    bucket: str | None = key(
        STRING, None, "Google Cloud Storage bucket that holds model_dir", blank=True, example='"my-bucket"'
    )
    comment: str | None = key(STRING, None, "free text; nothing reads it", blank=True)
    val_every: int = period("steps between validations")
    ckpt_every: int = period("steps between checkpoints; the last step is always saved")
    keep_every: int = period("checkpoints at multiples of this are kept for ever")
    eval_every: int = period("steps between runs of eval_harness_tasks", None, derived="val_every")
    log_every: int = period("steps between lines of metrics", 1)
    keep_n: int = key(INT, 3, "newest checkpoints to keep", low=1, unit="checkpoints")
    keep_best: str | None = key(
        STRING, None, "val_set name whose lowest loss keeps its checkpoint", derived="the first val_set name"
    )
    ckpt_format: str = key(
        STRING,
        None,
        "layout of checkpoints: shards, the published one, or orbax",
        derived="shards; in version 2 orbax",
        choices=("shards", "orbax"),
    )
    trackers: tuple[str, ...] = key(
        STRINGS, ("jsonl",), "where metrics go; jsonl always", choices=("jsonl", "tensorboard", "wandb")
    )
    wandb_project: str | None = key(STRING, None, "W&B project", blank=True)
    wandb_entity: str | None = key(STRING, None, "W&B user or team; null: the account's own", blank=True)
    wandb_mode: str = key(
        STRING,
        "offline",
        "W&B needs an account and a network only when online",
        choices=("offline", "online", "disabled"),
        null="offline",
    )
    max_skipped: int = key(INT, 10, "non-finite batches in a row before the run stops", low=1, unit="batches")
    noise_scale_alpha: float = key(FLOAT, 0.01, "weight of a new step in the noise scale's averages", above=0, high=1)
    eval_harness_tasks: tuple[str, ...] = key(
        STRINGS, (), "evaluation harness tasks, or their YAML files, to run in training", null=()
    )
    eval_only: bool = key(BOOL, False, "load without optimizer; refused in training")
    early_collect: bool = key(
        BOOL, True, "version 2 with zero_stage 3: gather all layers' weights over dp at once, not layer by layer"
    )
    sampler: str = key(STRING, "nucleus", "how tokens are drawn", choices=("nucleus",), null="nucleus")
    gen_length: int | None = key(INT, None, "tokens to generate", derived="the script's own", low=1, unit="tokens")

    @property
    def directory(self) -> str:
        """model_dir without a trailing slash, with gs://bucket/ in front where a bucket is set."""
        path = self.model_dir.rstrip("/") or "/"
        return f"gs://{self.bucket}/{path.removeprefix('./')}" if self.bucket else path
