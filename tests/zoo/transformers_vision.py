"""Models of ``transformers`` that see: images alone, or with text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.parity.models_architectures import SIDE, classify, contrast, images, images_and_tokens
from tests.parity.models_language import LENGTH, NO_DROPOUT, VOCABULARY
from tests.parity.problem import BATCH, Models, own_loss

from .entry import Entry
from .entry_builders import SIZES, entry, model

LAYERS: dict[str, Any] = {
    key: value for key, value in SIZES.items() if key not in ("vocab_size", "max_position_embeddings")
}
IMAGE: dict[str, Any] = {"image_size": SIDE, "patch_size": 4, "num_channels": 3, "num_labels": 5, **LAYERS}
VISION = "vision"
BOTH = "multimodal"
IMAGE_TOKEN = 2


def seeing(build: Callable[[], nn.Module], reason: str, batch: Any = images, **more: Any) -> Entry:
    return entry(build, batch, classify, VISION, reason, **more)


def contrasting(build: Callable[[], nn.Module], reason: str) -> Entry:
    return entry(build, images_and_tokens, contrast, BOTH, reason)


def two_towers(name: str, text: dict[str, Any] | None = None, **more: Any) -> Callable[[], nn.Module]:
    """A model with a tower for text and one for images."""
    words = {**SIZES, "num_hidden_layers": 3, "max_position_embeddings": LENGTH, "eos_token_id": 2, **(text or {})}
    pixels = {**IMAGE, "num_hidden_layers": 3}
    return model(name, text_config=words, vision_config=pixels, **more)


def large_images(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, 32, 32, generator=random), torch.randint(5, (BATCH,), generator=random)


def depth_maps(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, 32, 32, generator=random), torch.randint(5, (BATCH, 32, 32), generator=random)


def images_and_noise(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=random), torch.rand(BATCH, 16, generator=random)


def reconstruct(models: Models, images: torch.Tensor, noise: torch.Tensor) -> Any:
    """Which patches are hidden is given, not drawn."""
    return own_loss(models, pixel_values=images, noise=noise, results=("logits", "mask"))


def images_and_answers(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    pixels, ids = images_and_tokens(step, random)
    return pixels, ids, torch.rand(BATCH, 5, generator=random)


def answer(models: Models, images: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    return own_loss(models, input_ids=ids, pixel_values=images, labels=labels)


def describe(models: Models, images: torch.Tensor, ids: torch.Tensor) -> Any:
    """Tokens behind an image, which are predicted."""
    return own_loss(models, input_ids=ids, pixel_values=images, labels=ids)


def caption(models: Models, images: torch.Tensor, ids: torch.Tensor) -> Any:
    return own_loss(models, pixel_values=images, labels=ids)


def images_in_text(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    """The first 16 tokens stand for the patches of the image."""
    ids = torch.randint(3, VOCABULARY, (BATCH, 16 + LENGTH), generator=random)
    ids[:, :16] = IMAGE_TOKEN
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=random), ids


def boxes(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Words on a page, with their places and their classes."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random)
    corners = torch.randint(0, 8, (BATCH, LENGTH, 2), generator=random)
    return ids, torch.cat([corners, corners + 4], dim=2), torch.randint(5, (BATCH, LENGTH), generator=random)


def boxes_and_images(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return *boxes(step, random), torch.randn(BATCH, 3, SIDE, SIDE, generator=random)


def read_page(models: Models, ids: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> Any:
    return own_loss(models, input_ids=ids, bbox=boxes, labels=labels)


def read_image(
    models: Models, ids: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor, images: torch.Tensor
) -> Any:
    return own_loss(models, input_ids=ids, bbox=boxes, labels=labels, pixel_values=images)


def regions(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=random)
    features = torch.randn(BATCH, 4, 6, generator=random)
    return ids, features, torch.rand(BATCH, 4, 4, generator=random), torch.randint(2, (BATCH,), generator=random)


def match(models: Models, ids: torch.Tensor, features: torch.Tensor, places: torch.Tensor, labels: torch.Tensor) -> Any:
    """Whether text and regions of an image belong together, and which words are hidden."""
    output = models["model"](input_ids=ids, visual_feats=features, visual_pos=places, matched_label=labels, labels=ids)
    models["model"].backward(output.loss)
    return output.loss, output.prediction_logits


def image_captioner() -> nn.Module:
    config = transformers.VisionEncoderDecoderConfig(
        encoder=transformers.ViTConfig(**{**IMAGE, **NO_DROPOUT, "num_hidden_layers": 3}).to_dict(),
        decoder=transformers.BertConfig(
            is_decoder=True, add_cross_attention=True, **{**SIZES, **NO_DROPOUT, "num_hidden_layers": 3}
        ).to_dict(),
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    result: nn.Module = transformers.VisionEncoderDecoderModel(config)
    return result


def llava() -> nn.Module:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**IMAGE, "num_hidden_layers": 3}).to_dict(),
        text_config=transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}).to_dict(),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-2,
    )
    result: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return result


ENTRIES: dict[str, Entry] = {
    "ViT": seeing(model("ViTForImageClassification", **IMAGE, **NO_DROPOUT), "reads the dtype of a child's weight"),
    "DeiT": seeing(model("DeiTForImageClassification", **IMAGE, **NO_DROPOUT), "two tokens that are parameters"),
    "BEiT": seeing(
        model("BeitForImageClassification", use_relative_position_bias=True, drop_path_rate=0.0, **IMAGE, **NO_DROPOUT),
        "tables of relative positions looked up in every layer",
    ),
    "DINOv2": seeing(
        model("Dinov2ForImageClassification", mlp_ratio=2, drop_path_rate=0.0, **IMAGE, **NO_DROPOUT),
        "scales of layers that are parameters; interpolated positions",
    ),
    "Swin": seeing(
        model(
            "SwinForImageClassification", image_size=SIDE, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[1, 2],
            window_size=4, drop_path_rate=0.0, num_labels=5, **NO_DROPOUT,
        ),
        "shifted windows: rolled and partitioned views",
    ),
    "Swin-v2": seeing(
        model(
            "Swinv2ForImageClassification", image_size=SIDE, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[1, 2],
            window_size=4, drop_path_rate=0.0, num_labels=5, **NO_DROPOUT,
        ),
        "position biases computed by a network from a table in a buffer",
    ),
    "ConvNeXt-v2": seeing(
        model("ConvNextV2ForImageClassification", hidden_sizes=[8, 8, 8], depths=[2, 2, 2], num_stages=3, num_labels=5),
        "norms over all places of an image",
    ),
    "ResNet": seeing(
        model(
            "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 8, 8], depths=[2, 2, 2],
            layer_type="basic", num_labels=5,
        ),
        "batch norm, whose buffers every microbatch changes in turn", batch=large_images,
    ),
    "RegNet": seeing(
        model(
            "RegNetForImageClassification", embedding_size=8, hidden_sizes=[8, 8, 8], depths=[2, 2, 2],
            groups_width=4, num_labels=5,
        ),
        "grouped convolutions with batch norm, squeeze and excitation", batch=large_images,
    ),
    "SegFormer": seeing(
        model(
            "SegformerForSemanticSegmentation", image_size=32, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2, 2, 2, 2], decoder_hidden_size=16, drop_path_rate=0.0,
            classifier_dropout_prob=0.0, num_labels=5, **NO_DROPOUT,
        ),
        "every stage's result goes to the head, which sums them", batch=depth_maps,
    ),
    "ViT-MAE": entry(
        model(
            "ViTMAEForPreTraining", decoder_num_attention_heads=2, decoder_hidden_size=16, decoder_num_hidden_layers=3,
            decoder_intermediate_size=24, **IMAGE, **NO_DROPOUT,
        ),
        images_and_noise, reconstruct, VISION, "gathers the patches it is shown, and puts them back in order",
    ),
    "CLIP": contrasting(two_towers("CLIPModel", projection_dim=8), "two towers; every image meets every text"),
    "SigLIP": contrasting(two_towers("SiglipModel"), "a pooling attention with packed projections"),
    "ViLT": entry(
        model("ViltForQuestionAnswering", max_image_length=16, **{**SIZES, **IMAGE}, **NO_DROPOUT),
        images_and_answers, answer, BOTH, "one encoder for two kinds of input; picks patches by chance",
    ),
    "BLIP": entry(
        two_towers(
            "BlipForConditionalGeneration",
            text={"encoder_hidden_size": 16, "bos_token_id": 1, "sep_token_id": 2, **NO_DROPOUT},
            image_text_hidden_size=16,
        ),
        images_and_tokens, describe, BOTH, "text attends to an image in every layer",
    ),
    "LLaVA": entry(
        llava, images_in_text, describe, BOTH, "image features scattered into embeddings; hidden states of a layer",
    ),
    "ViT to BERT": entry(
        image_captioner, images_and_tokens, caption, BOTH, "two models of different kinds put together by a third"
    ),
    "LXMERT": entry(
        model(
            "LxmertForPreTraining", vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2, intermediate_size=24,
            l_layers=2, x_layers=2, r_layers=2, visual_feat_dim=6, visual_pos_dim=4, task_obj_predict=False,
            task_qa=False, max_position_embeddings=2 * LENGTH, **NO_DROPOUT,
        ),
        regions, match, BOTH, "two streams that cross; a cross attention used for both directions",
    ),
    "LayoutLM": entry(
        model("LayoutLMForTokenClassification", max_2d_position_embeddings=16, num_labels=5, **SIZES, **NO_DROPOUT),
        boxes, read_page, BOTH, "embeddings of places used twice each",
    ),
    "LayoutLMv3": entry(
        model(
            "LayoutLMv3ForTokenClassification", max_2d_position_embeddings=16, coordinate_size=2, shape_size=4,
            input_size=SIDE, patch_size=4, num_labels=5, rel_pos_bins=8, max_rel_pos=16, rel_2d_pos_bins=8,
            max_rel_2d_pos=16, has_relative_attention_bias=True, has_spatial_attention_bias=True,
            second_input_size=8, **SIZES, **NO_DROPOUT,
        ),
        boxes_and_images, read_image, BOTH, "words and patches in one sequence; position biases for all layers",
    ),
}  # fmt: skip
