"""Models from Hugging Face transformers, loaded by name or created from a configuration, with a linear head."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedloom.errors import ConfigError, describe_cause
from fedloom.models.imported import try_out
from fedloom.models.sequences import HeadInputSelection, TokenModelSpec


class Hub(TokenModelSpec):
    """Model of the transformers library, with a linear head on its last hidden states.

    It needs the extra ``hub`` of fedloom.

    With ``name``, weights are downloaded by `AutoModel.from_pretrained`, which never executes code from the repository.
    The data's tokens must then come from the model's tokenizer, with 0 as padding. If ``config`` is given, a new model
    is created without a network connection. Dropout is determined by the model's configuration.
    """

    name: str | None = Field(
        None, description="name of a model on the Hugging Face Hub, or a folder written by `save_pretrained`"
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="configuration of a new model, with its model_type. Set either this or name"
    )
    pool: Literal["last", "mean"] = Field(
        "last",
        description="pooling for the label of a whole sequence: the last token, or the mean over all tokens",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Hub:
        if (self.name is None) == ("model_type" not in self.config):
            raise ValueError("set either `name`, or `config` with a `model_type` such as 'bert'")
        return self

    def sequence(self, length: int, outputs: int, vocabulary: int, each: bool) -> nn.Module:
        try:
            from transformers import AutoConfig, AutoModel
        except ImportError:
            raise ConfigError("model hub needs transformers: pip install 'fedloom[hub]'") from None
        what = self.name or self.config["model_type"]
        try:
            if self.name is not None:
                body = AutoModel.from_pretrained(self.name, trust_remote_code=False)
            else:
                options = {"vocab_size": vocabulary, **{k: v for k, v in self.config.items() if k != "model_type"}}
                body = AutoModel.from_config(AutoConfig.for_model(self.config["model_type"], **options))
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            raise ConfigError(
                f"model hub: {what!r} cannot be created ({describe_cause(error).splitlines()[0]})"
            ) from error
        tokens = body.get_input_embeddings().num_embeddings
        if tokens < vocabulary:
            raise ConfigError(
                f"model hub: {what!r} knows {tokens} tokens, but the data contain {vocabulary} "
                "tokens. Use the tokenizer of the model"
            )
        module = HubNetwork(body.float(), outputs, HeadInputSelection(each, self.pool == "last"))
        try_out(module, (length,), outputs, what, (vocabulary, each))
        return module


class HubNetwork(nn.Module):
    """Network that is built by `Hub`."""

    def __init__(self, body: Any, outputs: int, pick: HeadInputSelection) -> None:
        super().__init__()
        body.config.use_cache = False
        if getattr(body, "pooler", None) is not None:
            body.pooler = None  # unused
        self.body, self.pick, self.head = body, pick, nn.Linear(body.config.hidden_size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for tokens ``[b, L]``."""
        h = self.body(input_ids=x, attention_mask=(x != 0).to(torch.int64)).last_hidden_state
        return self.head(self.pick(h, x))  # type: ignore[no-any-return]
