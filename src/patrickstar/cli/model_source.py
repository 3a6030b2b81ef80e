"""Sources of models: a name, a configuration file, a directory with weights. Hugging Face's code builds the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patrickstar.cli.models import shape_named
from patrickstar.config.json_file import read_json
from patrickstar.errors import ConfigError, Error

if TYPE_CHECKING:
    from torch import nn


class ModelError(Error):
    """A model's files hold something other than what they should."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A causal language model that can be built: its configuration, and its directory where it has weights."""

    name: str
    settings: Mapping[str, Any]
    weights: Path | None = None

    @classmethod
    def find(cls, name: str) -> ModelSource:
        """The source that `--model NAME|DIR|FILE.json` means; a directory or file of that name goes before a known name.

        Raises:
            ConfigError: nothing of that name, or not a model's configuration.
        """
        path = Path(name)
        if path.is_file():
            return cls(name, read_json(path, what="--model"))
        if not path.is_dir():
            if path.suffix == ".json" or len(path.parts) > 1:
                raise ConfigError(f"--model {name}: no such file or directory")
            return cls(name, shape_named(name).settings())
        config = path / "config.json"
        if not config.is_file():
            raise ConfigError(f"--model {path}: the directory has no config.json")
        if not any(path.glob("*.safetensors")):
            raise ConfigError(
                f"--model {path}: the directory has no *.safetensors weights (other formats are not read); "
                f"to start from fresh weights pass --model {config}"
            )
        return cls(str(path), read_json(config, what="--model"), weights=path)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer that belongs to the weights, where they came with one."""
        file = self.weights / "tokenizer.json" if self.weights else None
        return file if file is not None and file.is_file() else None

    def config(self) -> Any:
        """The Hugging Face configuration, as training needs it: no cache of keys and values.

        Raises:
            ConfigError: not a model that transformers builds as a causal language model.
        """
        transformers = _transformers()
        settings = dict(self.settings)
        kind = settings.pop("model_type", None)
        if not isinstance(kind, str):
            raise ConfigError(f"--model {self.name}: the configuration has no model_type")
        try:
            config = transformers.AutoConfig.for_model(kind, **settings)
        except Exception as error:  # whatever a stranger's file makes its configuration class raise
            raise ConfigError(f"--model {self.name}: transformers refuses the configuration: {error}") from error
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"--model {self.name}: {kind} is none of the causal language models of transformers, "
                "which are what this command trains"
            )
        # Caches of keys and values serve generation; a training step would build one and throw it away.
        config.use_cache = False
        if not isinstance(getattr(config, "vocab_size", None), int):
            raise ConfigError(f"--model {self.name}: the configuration has no vocab_size")
        return config

    def build(self) -> nn.Module:
        """The model in fp32 and in training mode: with its weights, or with fresh ones from torch's random numbers now.

        Raises:
            ModelError: files that do not hold this model's weights.
        """
        import torch

        if self.weights is None:
            return self._fresh()
        given = {"config": self.config(), "dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
        try:
            model: nn.Module = _transformers().AutoModelForCausalLM.from_pretrained(self.weights, **given).train()
        except Exception as error:  # damaged files: safetensors, transformers and the file system each have their own
            raise ModelError(f"{self.weights}: the weights cannot be read: {error}") from error
        return self._complete(model)

    def build_deferred(self) -> nn.Module:
        """A model without memory for its parameters, which `manage` fills, with `weights=` where there are files.

        Raises:
            ModelError, CheckpointError: files that do not hold this model's weights.
        """
        from patrickstar.deferred.deferred_init import deferred_init

        with deferred_init():
            model = self._fresh()
        return self._complete(model)

    def _fresh(self) -> nn.Module:
        import torch

        model: nn.Module = _transformers().AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32)
        return model.train()

    def _complete(self, model: nn.Module) -> nn.Module:
        """The model, if its files have all of its tensors: others would be drawn afresh. Else raises ModelError."""
        from patrickstar.checkpoint.naming import naming_of
        from patrickstar.checkpoint.weight_files import WeightFiles
        from patrickstar.session.loading import matched, tensors_of

        if self.weights is not None:
            with closing(WeightFiles(self.weights)) as files:
                missing = matched(tensors_of(model), files, naming_of(model)).missing
            if missing:
                raise ModelError(
                    f"{self.weights}: {len(missing)} tensors of the model are not in the files, {missing[0]} first"
                )
        return model

    def build_on_meta(self) -> nn.Module:
        """The model's structure without memory for its parameters."""
        import torch

        with torch.device("meta"):
            return self._fresh()


def check_length(config: Any, seq_len: int) -> None:
    """Refuses sequences longer than the model has positions. ConfigError: with the longest that it takes."""
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and seq_len > positions:
        raise ConfigError(f"--seq-len {seq_len}: this model has {positions} positions")


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "transformers is not installed, which builds the command line's models: pip install 'patrickstar[train]'"
        ) from error
    # Its progress bars and advice would tear our display; what matters comes as an exception.
    transformers.utils.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    return transformers
