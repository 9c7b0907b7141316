"""Tokenizers of the tiny checkpoints: the published classes and splitting rules over a few hundred pieces.

The byte-level ones are trained to the end on the prompt templates that diffusers ships, so every word of a template is
one token, as it is in the published vocabularies: the templates then take exactly the 95, 103 and 108 tokens that the
pipelines crop.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
CLIP_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

QWEN2_CHAT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Words that get a token of their own beside those of the templates; all other text falls into bytes or letters.
WORDS = (
    "A cat walks on the grass, realistic, highly detailed. a dog runs through a field of red flowers at sunset while "
    "the camera moves slowly to the left. A woman with short hair looks at the sea; waves roll over sand and rocks. "
    "the worst quality, low quality, blurry, distorted, static, still, motion, smooth, bright, dark, night, day, city, "
    "street, rain, snow, river, mountain, forest, sky, clouds, car, train, boat, man, child, bird, fish, horse, robot, "
    "fire, water, glass, wood, gold, silver, blue, green, yellow, white, black, close up, wide shot, slow motion, 4k"
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as the files of its folder, and the id of every token."""

    ids: Mapping[str, int]
    files: Mapping[str, str]

    @property
    def rows(self) -> int:
        """Rows of the embedding that takes these tokens, rounded up to a multiple of 16."""
        return -(-(max(self.ids.values()) + 1) // 16) * 16

    def save_pretrained(self, folder: Path) -> None:
        """Write the files into ``folder``, which is made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")


def llama3(words: str = WORDS) -> TokenizerFiles:
    """The text tokenizer of HunyuanVideo: byte-level pairs with Llama 3's split, ``<image>`` and ``<pad>`` added.

    Args:
        words: get a token each, beside those of the templates.
    """
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video, pipeline_hunyuan_video_image2video
    from tokenizers import processors

    templates = [
        module.DEFAULT_PROMPT_TEMPLATE["template"]
        for module in (pipeline_hunyuan_video, pipeline_hunyuan_video_image2video)
    ]
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer = _byte_level(LLAMA3_SPLIT, [*templates, words], (*special, "<unk>", "<image>", "<pad>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
    )
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "unk_token": "<unk>"}
    return _files(
        tokenizer,
        {**names, "pad_token": "<pad>"},
        tokenizer_class="LlamaTokenizer",
        padding_side="right",  # the pipelines crop the template off the left
        model_max_length=8192,
    )


def qwen2(words: str = WORDS) -> TokenizerFiles:
    """The text tokenizer of HunyuanVideo 1.5: byte-level pairs with Qwen 2's split, and a chat template.

    Args:
        words: get a token each, beside those of the chat.
    """
    import inspect

    from diffusers import HunyuanVideo15Pipeline
    from tokenizers import normalizers

    system = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
    texts = ["system\n", system, "\n", "user\n", "assistant\n", words]
    tokenizer = _byte_level(QWEN2_SPLIT, texts, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.normalizer = normalizers.NFC()
    return _files(
        tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, tokenizer_class="Qwen2Tokenizer",
        padding_side="right", model_max_length=131072, chat_template=QWEN2_CHAT, add_prefix_space=False,
    )  # fmt: skip


def clip(words: str = WORDS) -> TokenizerFiles:
    """The second tokenizer of HunyuanVideo: byte pairs with an end-of-word mark, at most 77 tokens.

    Args:
        words: get a token each.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CLIP_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces, merges = _byte_pairs(splitter, [words.lower()], suffix="</w>")
    ends = ("<|startoftext|>", "<|endoftext|>")
    vocabulary = dict.fromkeys([*alphabet, *(letter + "</w>" for letter in alphabet), *pieces, *ends])
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    model = models.BPE(vocab=ids, merges=merges, end_of_word_suffix="</w>", unk_token=ends[1])
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(
        (ends[1], ids[ends[1]]), (ends[0], ids[ends[0]]), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.add_special_tokens(list(ends))
    names = {"bos_token": ends[0], "eos_token": ends[1], "unk_token": ends[1], "pad_token": ends[1]}
    return _files(tokenizer, names, tokenizer_class="CLIPTokenizer", model_max_length=77, do_lower_case=True)


def t5(max_length: int) -> TokenizerFiles:
    """The tokenizer of LTX-Video and Mochi: a unigram model over words and the letters of the common alphabets.

    Args:
        max_length: tokens, 128 for LTX-Video and 256 for Mochi.
    """
    words = sorted({f"▁{word}" for word in re.findall(r"\w+", WORDS)})
    letters = ["▁", *(chr(code) for code in range(0x21, 0x530) if chr(code).isprintable())]
    return t5_of({**dict.fromkeys(words, -4.0), **dict.fromkeys(letters, -10.0)}, max_length)


def t5_of(scores: Mapping[str, float], max_length: int) -> TokenizerFiles:
    """A T5 tokenizer of these pieces.

    Args:
        scores: piece to its logarithmic probability; ``▁`` begins a word.
        max_length: tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    extra = [f"<extra_id_{number}>" for number in range(100)]
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    pieces = [(name, 0.0) for name in names.values()] + list(scores.items()) + [(name, 0.0) for name in extra[::-1]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens([*names.values(), *extra])
    return _files(
        tokenizer,
        names,
        tokenizer_class="T5Tokenizer",
        model_max_length=max_length,
        extra_ids=len(extra),
        additional_special_tokens=extra,
    )


def _byte_level(split: str, texts: Iterable[str], special: Iterable[str]) -> Any:
    """A byte-level BPE tokenizer for any UTF-8 text, in which each word of ``texts`` is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Text between the special tokens is split separately, so it is also learnt separately.
    runs = [run for text in texts for run in re.split(r"<\|\w+\|>|<image>|\{\}", text) if run]
    pieces, merges = _byte_pairs(splitter, runs)
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _byte_pairs(splitter: Any, texts: list[str], suffix: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of byte pairs joined until every word of ``texts`` is one piece."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE(end_of_word_suffix=suffix))
    learner.pre_tokenizer = splitter
    learner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1 << 20,
            min_frequency=1,
            show_progress=False,
            initial_alphabet=letters,
            end_of_word_suffix=suffix,
            # Left to itself, the trainer numbers the letters that end a word in another order on each run.
            special_tokens=[letter + suffix for letter in letters] if suffix else [],
        ),
    )
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [tuple(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]


def _files(tokenizer: Any, names: Mapping[str, str], **settings: Any) -> TokenizerFiles:
    """The folder that transformers 4 and 5 both read: one ``tokenizer.json``, beside it the older vocabulary files."""
    model = json.loads(tokenizer.to_str())["model"]
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({**names, **settings}, indent=2, sort_keys=True) + "\n",
        "special_tokens_map.json": json.dumps(dict(names), indent=2, sort_keys=True) + "\n",
    }
    if model["type"] == "BPE" and settings["tokenizer_class"] != "LlamaTokenizer":
        pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
        files["vocab.json"] = json.dumps(model["vocab"], ensure_ascii=False)
        files["merges.txt"] = "\n".join(["#version: 0.2", *pairs]) + "\n"
    return TokenizerFiles(tokenizer.get_vocab(with_added_tokens=True), files)
