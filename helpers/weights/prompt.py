"""The token ids of FlexGen's benchmark sentence."""

from __future__ import annotations

from pathlib import Path

from helpers.models import OptModel

# FlexGen's benchmark sentence is `BOS Paris is the capital city of` in OPT's tokens. FIXED_PROMPT_IDS are the same but
# for one token (Paris), whose real id does not fit the smallest vocabulary here.
SENTENCE = "Paris is the capital city of"
FIXED_PROMPT_IDS = (2, 826, 16, 5, 812, 343, 9)
FIXED_PROMPT = "fixed token ids (no tokenizer files)"
BOS_ID = 2


def prompt_of(folder: Path, model: OptModel) -> tuple[tuple[int, ...], str]:
    """Tokenize the sentence with the tokenizer in `folder`; without a usable one, take the fixed ids. Returns the ids
    and where they come from."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "merges.txt").is_file():
        return fixed_ids(model), FIXED_PROMPT
    try:
        ids = _tokenize(folder)
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error)[:200].split())
        return fixed_ids(model), f"fixed token ids (tokenizer in {folder} cannot be read: {reason})"
    if max(ids) >= model.vocab_size:
        return fixed_ids(model), f"fixed token ids (tokenizer in {folder} has more tokens than the model)"
    return ids, "tokenizer"


def _tokenize(folder: Path) -> tuple[int, ...]:
    import tokenizers

    if (folder / "merges.txt").is_file():
        bpe = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    else:
        bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tuple(bpe.encode(SENTENCE).ids)
    return ids if ids[0] == BOS_ID else (BOS_ID, *ids)  # OPT's tokenizer puts it first, the bare BPE does not


def fixed_ids(model: OptModel) -> tuple[int, ...]:
    """The fixed ids; those too large for a small vocabulary move down, but stay above the special tokens 0 to 3."""
    return tuple(i if i < model.vocab_size else 4 + i % (model.vocab_size - 4) for i in FIXED_PROMPT_IDS)
